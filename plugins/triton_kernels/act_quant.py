"""act_quant: activations to e4m3, a program for a few tokens' group of channels."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import STATIC_SCALE, group_scale, saturate_e4m3

STATIC_BLOCK = 128
# Most tokens, tokens of a program and its warps. Measured on an H200 at 4,096 channels: 1.5 us for 17 tokens, 1.8 for
# 64 (one token a program: 3.2) and 29 for 8,192 (317, and 80 by fours).
TILES = ((32, 1, 1), (512, 4, 2), (sys.maxsize, 16, 4))


@triton.jit
def _act_quant_kernel(  # type: ignore[no-untyped-def]
    x, quantised, scales, tokens, K: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    present = (token < tokens)[:, None] & (column < K)[None, :]
    at = token.to(tl.int64)[:, None] * K + column[None, :]
    release()
    wait()
    value = tl.load(x + at, mask=present, other=0.0).to(tl.float32)
    if STATIC:
        quotient = value / STATIC_SCALE
    else:
        scale = group_scale(tl.max(tl.abs(value), axis=1))
        quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], (TILE, GROUP)))
        tl.store(scales + group * tokens + token, scale, mask=token < tokens)
    tl.store(quantised + at, saturate_e4m3(quotient), mask=present)


def act_quant(x: torch.Tensor, group: int, quantised: torch.Tensor, scales: torch.Tensor | None) -> None:
    """The op of that name; see ops/schemas.py. group 128, 64 or 0 (static)."""
    tokens, channels = x.shape
    if tokens == 0:
        return
    width = group or STATIC_BLOCK
    tile, warps = next(shape for most, *shape in TILES if tokens <= most)
    _act_quant_kernel[(triton.cdiv(tokens, tile), triton.cdiv(channels, width))](
        x, quantised, scales, tokens, K=channels, GROUP=width, STATIC=group == 0, TILE=tile, num_warps=warps,
        **DEPENDENT,
    )  # fmt: skip
