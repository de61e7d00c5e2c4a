"""rmsnorm_quant and moe_combine(_norm): one program a token, the whole row in registers.

Invariant: the sum over slots starts at slot 0 and is formed before it meets the residual; the norm reads the rounded
residual. Must not know where the rows come from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import group_scale, round_bf16, saturate_e4m3, to_bf16

GROUP = 128


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    weight,
    normed,
    quantised,
    scales,
    token,
    tokens,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Norm of x fp32 [BLOCK] (zeros behind H), stored as bf16 and, when QUANTISED, as e4m3 with its scales."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x) / H + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    y = to_bf16(x * inverse * gain)
    if NORMED:
        tl.store(normed + token * H + columns, y, mask=inside)
    if QUANTISED:
        groups = tl.reshape(y.to(tl.float32), (BLOCK // 128, 128))
        scale = group_scale(tl.max(tl.abs(groups), axis=1))
        quotient = tl.div_rn(groups, tl.broadcast_to(scale[:, None], (BLOCK // 128, 128)))
        tl.store(quantised + token * H + columns, tl.reshape(saturate_e4m3(quotient), (BLOCK,)), mask=inside)
        group = tl.arange(0, BLOCK // 128)
        tl.store(scales + group * tokens + token, scale, mask=group * 128 < H)


@triton.jit
def _rmsnorm_kernel(  # type: ignore[no-untyped-def]
    residual,
    delta,
    weight,
    normed,
    quantised,
    scales,
    tokens,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(residual + token * H + columns, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        x = round_bf16(x + tl.load(delta + token * H + columns, mask=inside, other=0.0).to(tl.float32))
        tl.store(residual + token * H + columns, to_bf16(x), mask=inside)
    _normalise(x, weight, normed, quantised, scales, token, tokens, eps, H, BLOCK, NORMED, QUANTISED)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    rows, expert_ids, token, first_expert, local_experts, H: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr
):
    """((r0 + r1) + r2) + ... in fp32; slots of experts elsewhere count as zero."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        expert = tl.load(expert_ids + token * K + slot) - first_expert
        # A scalar condition as a bound: the interpreter cannot mask with a scalar and a vector together.
        bound = tl.where((expert >= 0) & (expert < local_experts), H, 0)
        row = tl.load(rows + (token * K + slot) * H + columns, mask=columns < bound, other=0.0)
        total += row.to(tl.float32)
    return total


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    rows,
    expert_ids,
    out,
    first_expert,
    local_experts,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = _combine(rows, expert_ids, token, first_expert, local_experts, H, BLOCK, K)
    if ACCUMULATE:
        total += tl.load(out + token * H + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=columns < H)


@triton.jit
def _combine_norm_kernel(  # type: ignore[no-untyped-def]
    rows,
    expert_ids,
    residual,
    weight,
    normed,
    quantised,
    scales,
    first_expert,
    local_experts,
    tokens,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    total = _combine(rows, expert_ids, token, first_expert, local_experts, H, BLOCK, K)
    x = round_bf16(total + tl.load(residual + token * H + columns, mask=inside, other=0.0).to(tl.float32))
    tl.store(residual + token * H + columns, to_bf16(x), mask=inside)
    _normalise(x, weight, normed, quantised, scales, token, tokens, eps, H, BLOCK, NORMED, QUANTISED)


def _block(hidden: int) -> int:
    return max(int(triton.next_power_of_2(hidden)), GROUP)


def _warps(hidden: int) -> int:
    return 8 if hidden > 1024 else 4


def rmsnorm_quant(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor | None,
    quantised: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py for shapes and dtypes. Mutates its outputs on the current stream."""
    tokens, hidden = residual.shape
    if tokens == 0:
        return
    _rmsnorm_kernel[(tokens,)](
        residual, delta, weight, normed, quantised, scales, tokens, eps,
        H=hidden, BLOCK=_block(hidden), DELTA=delta is not None, NORMED=normed is not None,
        QUANTISED=quantised is not None, num_warps=_warps(hidden),
    )  # fmt: skip


def moe_combine(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    accumulate: bool,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py."""
    tokens, top_k, hidden = rows.shape
    if tokens == 0:
        return
    _combine_kernel[(tokens,)](
        rows, expert_ids, out, first_expert, num_local_experts,
        H=hidden, BLOCK=_block(hidden), K=top_k, ACCUMULATE=accumulate, num_warps=_warps(hidden),
    )  # fmt: skip


def moe_combine_norm(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor | None,
    quantised: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py."""
    tokens, top_k, hidden = rows.shape
    if tokens == 0:
        return
    _combine_norm_kernel[(tokens,)](
        rows, expert_ids, residual, weight, normed, quantised, scales, first_expert, num_local_experts, tokens, eps,
        H=hidden, BLOCK=_block(hidden), K=top_k, NORMED=normed is not None, QUANTISED=quantised is not None,
        num_warps=_warps(hidden),
    )  # fmt: skip
