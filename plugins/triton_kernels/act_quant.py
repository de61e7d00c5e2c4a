"""act_quant: activations to e4m3, one program a token and group of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import STATIC_SCALE, group_scale, saturate_e4m3

STATIC_BLOCK = 128


@triton.jit
def _act_quant_kernel(  # type: ignore[no-untyped-def]
    x, quantised, scales, tokens, K: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = group * GROUP + tl.arange(0, GROUP)
    release()
    wait()
    value = tl.load(x + token * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    if STATIC:
        quotient = value / STATIC_SCALE
    else:
        scale = group_scale(tl.max(tl.abs(value), axis=0, keep_dims=True))
        quotient = tl.div_rn(value, tl.broadcast_to(scale, (GROUP,)))
        tl.store(scales + group * tokens + token + tl.zeros((1,), tl.int32), scale)
    tl.store(quantised + token * K + columns, saturate_e4m3(quotient), mask=columns < K)


def act_quant(x: torch.Tensor, group: int, quantised: torch.Tensor, scales: torch.Tensor | None) -> None:
    """The op of that name; see ops/schemas.py. group 128, 64 or 0 (static)."""
    tokens, channels = x.shape
    if tokens == 0:
        return
    width = group or STATIC_BLOCK
    _act_quant_kernel[(tokens, triton.cdiv(channels, width))](
        x, quantised, scales, tokens, K=channels, GROUP=width, STATIC=group == 0, num_warps=1, **DEPENDENT
    )
