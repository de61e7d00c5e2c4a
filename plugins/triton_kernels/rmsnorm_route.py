"""rmsnorm_route: the norm ahead of the experts and the routing behind it, few tokens in two kernels.

Invariant: each program of the first kernel forms its token's norm anew, which costs less than a kernel boundary; one
more program for each group of channels stores it. The residual is therefore not updated in place. Up to MOST_TOKENS a
token's result does not depend on the other tokens; above, the kernels of rmsnorm_quant and moe_route run, whose router
product adds in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels import moe_route as route
from gptoss_trt.triton_kernels import rmsnorm_quant as norm
from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import group_scale, saturate_e4m3, to_bf16

MOST_TOKENS = 16
ROUTER_WARPS = 16
GROUP = tl.constexpr(128)  # channels that share a scale


@triton.jit
def _norm_router_kernel(  # type: ignore[no-untyped-def]
    residual,
    delta,
    weight,
    router,
    updated,
    quantised,
    scales,
    logits,
    tokens,
    experts,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Program (e, t): logits[t, e] without bias, fp32; program (experts + g, t): group g of the token's new residual
    and quantised norm."""
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    gain = norm.load_gain(weight, H, BLOCK)
    bound = tl.where(program < experts, H, 0)
    row = tl.load(router + program.to(tl.int64) * H + columns, mask=columns < bound, other=0.0)
    group = tl.maximum(program - experts, 0)
    part = group * GROUP + tl.arange(0, GROUP)
    part_gain = tl.load(weight + part, mask=part < H, other=0.0)
    release()
    wait()
    x = norm.add_delta(residual, delta, token, columns, H, DELTA)
    mine = norm.add_delta(residual, delta, token, part, H, DELTA)
    inverse = norm.inverse_rms(x, eps, H)
    if program < experts:
        normed = norm.normalise(x, gain, inverse).to(tl.float32)
        tl.store(logits + token * experts + program, tl.sum(normed * row.to(tl.float32)))
    else:
        tl.store(updated + token * H + part, to_bf16(mine), mask=part < H)
        y = norm.normalise(mine, part_gain, inverse).to(tl.float32)
        scale = group_scale(tl.max(tl.abs(y), axis=0, keep_dims=True))
        quotient = tl.div_rn(y, tl.broadcast_to(scale, (GROUP,)))
        tl.store(quantised + token * H + part, saturate_e4m3(quotient), mask=part < H)
        tl.store(scales + group * tokens + token + tl.zeros((1,), tl.int32), scale)


def rmsnorm_route(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    router_bias: torch.Tensor,
    token_count: torch.Tensor | None,
    first_expert: int,
    num_local_experts: int,
    updated: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    expert_offsets: torch.Tensor,
    active_experts: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates logits, or above MOST_TOKENS the norm and parts of logits."""
    tokens, hidden = residual.shape
    outputs = (expert_ids, expert_weights, expert_offsets, active_experts, row_slots)
    local = (first_expert, num_local_experts)
    if tokens == 0 or tokens > MOST_TOKENS or not route.few(tokens, expert_ids.shape[1]):
        normed = torch.empty_like(residual)
        norm.add_and_norm(residual, delta, updated, weight, eps, (normed, quantised, scales))
        route.moe_route(normed, router, router_bias, token_count, *local, *outputs)
        return
    experts = router.shape[0]
    logits = torch.empty((1, tokens, experts), dtype=torch.float32, device=residual.device)
    _norm_router_kernel[(experts + triton.cdiv(hidden, GROUP.value), tokens)](
        residual, delta, weight, router, updated, quantised, scales, logits, tokens, experts, eps,
        H=hidden, BLOCK=norm.row_block(hidden), DELTA=delta is not None,
        num_warps=ROUTER_WARPS if hidden > 1024 else 4, **DEPENDENT,
    )  # fmt: skip
    route.choose_and_sort(logits, router_bias, token_count, local, outputs)
