"""rmsnorm_quant and moe_combine(_norm): one program a token, the whole row in registers.

Invariant: the sum over slots starts at slot 0 and is formed before it meets the residual; the norm reads the rounded
residual. Every kernel is launched dependent: the norm's weight is read while the kernel before it still runs. Must not
know where the rows come from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import group_scale, round_bf16, saturate_e4m3, to_bf16

GROUP = 128
FEW_TOKENS = 64  # up to which a row's latency counts: more warps a row


@triton.jit
def load_gain(weight, H: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm's weight bf16 [BLOCK], zeros behind H."""
    columns = tl.arange(0, BLOCK)
    return tl.load(weight + columns, mask=columns < H, other=0.0)


@triton.jit
def add_delta(residual, delta, token, columns, H: tl.constexpr, DELTA: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16(residual + delta) of one token's `columns` as fp32, zeros behind H; the residual itself without DELTA."""
    x = tl.load(residual + token * H + columns, mask=columns < H, other=0.0).to(tl.float32)
    if DELTA:
        x = round_bf16(x + tl.load(delta + token * H + columns, mask=columns < H, other=0.0).to(tl.float32))
    return x


@triton.jit
def inverse_rms(x, eps, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """rsqrt(mean(x^2) + eps) of x fp32 [BLOCK] that is zero behind H."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x) / H + eps)


@triton.jit
def normalise(x, gain, inverse):  # type: ignore[no-untyped-def]
    """bf16 norm of x fp32, a row or a part of it."""
    return to_bf16(x * inverse * gain.to(tl.float32))


@triton.jit
def store_normed(  # type: ignore[no-untyped-def]
    y,
    normed,
    quantised,
    scales,
    token,
    tokens,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Stores a token's norm y bf16 [BLOCK] as it is and, when QUANTISED, as e4m3 with its scales."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
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
    updated,
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
    COPY: tl.constexpr,
):
    """`updated` takes the sum with delta; it may be `residual`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    gain = load_gain(weight, H, BLOCK)
    release()
    wait()
    x = add_delta(residual, delta, token, columns, H, DELTA)
    if DELTA or COPY:
        tl.store(updated + token * H + columns, to_bf16(x), mask=columns < H)
    y = normalise(x, gain, inverse_rms(x, eps, H))
    store_normed(y, normed, quantised, scales, token, tokens, H, BLOCK, NORMED, QUANTISED)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    rows, expert_ids, token, first_expert, local_experts, H: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr
):
    """((r0 + r1) + r2) + ... in fp32; slots of experts elsewhere count as zero."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        expert = tl.load(expert_ids + token * K + slot) - first_expert
        # The row is read whatever the id says, so that neither waits for the other, and dropped if not ours. A scalar
        # condition as a bound: the interpreter cannot join a scalar and a vector.
        bound = tl.where((expert >= 0) & (expert < local_experts), H, 0)
        row = tl.load(rows + (token * K + slot) * H + columns, mask=columns < H, other=0.0)
        total += tl.where(columns < bound, row.to(tl.float32), 0.0)
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
    release()
    wait()
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
    gain = load_gain(weight, H, BLOCK)
    release()
    wait()
    before = tl.load(residual + token * H + columns, mask=inside, other=0.0)
    total = _combine(rows, expert_ids, token, first_expert, local_experts, H, BLOCK, K)
    x = round_bf16(total + before.to(tl.float32))
    tl.store(residual + token * H + columns, to_bf16(x), mask=inside)
    y = normalise(x, gain, inverse_rms(x, eps, H))
    store_normed(y, normed, quantised, scales, token, tokens, H, BLOCK, NORMED, QUANTISED)


def row_block(hidden: int) -> int:
    """The power of two that holds a row and whole groups of the quantisation."""
    return max(int(triton.next_power_of_2(hidden)), GROUP)


def row_warps(hidden: int, tokens: int) -> int:
    """Warps of a program that holds a row."""
    if hidden <= 1024:
        return 4
    return 16 if tokens <= FEW_TOKENS else 8


def add_and_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    updated: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    outputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    warps: int = 0,
) -> None:
    """updated = bf16(residual + delta), and its norm into `outputs` (normed, quantised, scales), each or None.
    `updated` may be `residual`; without delta it is the residual's copy, or itself. Sums of a row are equal bit for bit
    for equal `warps` only (0: chosen from the sizes)."""
    tokens, hidden = residual.shape
    if tokens == 0:
        return
    normed, quantised, scales = outputs
    _rmsnorm_kernel[(tokens,)](
        residual, delta, updated, weight, normed, quantised, scales, tokens, eps,
        H=hidden, BLOCK=row_block(hidden), DELTA=delta is not None, NORMED=normed is not None,
        QUANTISED=quantised is not None, COPY=updated is not residual,
        num_warps=warps or row_warps(hidden, tokens), **DEPENDENT,
    )  # fmt: skip


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
    add_and_norm(residual, delta, residual, weight, eps, (normed, quantised, scales))


def moe_combine(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    accumulate: bool,
    out: torch.Tensor,
    *,
    warps: int = 0,
) -> None:
    """The op of that name; see ops/schemas.py. `warps` as in add_and_norm."""
    tokens, top_k, hidden = rows.shape
    if tokens == 0:
        return
    _combine_kernel[(tokens,)](
        rows, expert_ids, out, first_expert, num_local_experts,
        H=hidden, BLOCK=row_block(hidden), K=top_k, ACCUMULATE=accumulate,
        num_warps=warps or row_warps(hidden, tokens), **DEPENDENT,
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
    *,
    warps: int = 0,
) -> None:
    """The op of that name; see ops/schemas.py. `warps` as in add_and_norm."""
    tokens, top_k, hidden = rows.shape
    if tokens == 0:
        return
    _combine_norm_kernel[(tokens,)](
        rows, expert_ids, residual, weight, normed, quantised, scales, first_expert, num_local_experts, tokens, eps,
        H=hidden, BLOCK=row_block(hidden), K=top_k, NORMED=normed is not None, QUANTISED=quantised is not None,
        num_warps=warps or row_warps(hidden, tokens), **DEPENDENT,
    )  # fmt: skip
