"""moe_route: router product, top k, softmax over those k, and the rows of each expert in a fixed order.

Invariant: order by (bf16 logit, lowest index) and rows by (expert, token, slot): no atomics, so the same input gives
the same bits. Four kernels; counts and offsets never leave the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import dot, round_bf16

TOKEN_TILE = 16
EXPERT_TILE = 32
K_TILE = 128
ROW_TILE = 1024


@triton.jit
def _logits_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    logits,
    tokens,
    experts,
    H: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """logits fp32 [T, E] = bf16(x @ weight^T + bias)."""
    token = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    expert = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    acc = tl.zeros((TILE_T, TILE_E), tl.float32)
    for k in range(0, H, TILE_K):
        column = k + tl.arange(0, TILE_K)
        inside = column < H
        a = tl.load(
            x + token.to(tl.int64)[:, None] * H + column[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + expert[None, :] * H + column[:, None],
            mask=(expert < experts)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = dot(a, b, acc)
    acc += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    tl.store(
        logits + token.to(tl.int64)[:, None] * experts + expert[None, :],
        round_bf16(acc),
        mask=(token < tokens)[:, None] & (expert < experts)[None, :],
    )


@triton.jit
def _top_k_kernel(  # type: ignore[no-untyped-def]
    logits, token_count, expert_ids, expert_weights, experts, E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr
):
    """The K best of one token's logits, best first; equal logits by the lower index."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, E)
    value = tl.load(logits + token * experts + index, mask=index < experts, other=-float("inf"))
    real = token >= 0
    if COUNTED:
        real = token < tl.load(token_count)
    best = tl.max(value, axis=0)
    total = 0.0
    for _ in tl.static_range(K):
        top = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == top, index, E), axis=0)
        total += tl.exp(top - best)
        value = tl.where(index == chosen, -float("inf"), value)
    value = tl.load(logits + token * experts + index, mask=index < experts, other=-float("inf"))
    for slot in tl.static_range(K):
        top = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == top, index, E), axis=0)
        share = round_bf16(tl.exp(top - best) / total)
        tl.store(expert_ids + token * K + slot, tl.where(real, chosen, -1))
        tl.store(expert_weights + token * K + slot, tl.where(real, share, 0.0))
        value = tl.where(index == chosen, -float("inf"), value)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    expert_ids, expert_offsets, row_slots, count, first_expert, TILE: tl.constexpr
):
    """One program an expert: its offset is the number of rows of lower experts, its rows are numbered in order."""
    expert = tl.program_id(0)
    experts = tl.num_programs(0)
    before = 0
    own = 0
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        local = tl.load(expert_ids + entry, mask=entry < count, other=-1) - first_expert
        before += tl.sum(((local >= 0) & (local < expert)).to(tl.int32), axis=0)
        own += tl.sum((local == expert).to(tl.int32), axis=0)
    tl.store(expert_offsets + expert, before)
    if expert == experts - 1:
        tl.store(expert_offsets + experts, before + own)
        # Behind the last row there is nothing: -1, written by the one program that knows where that is.
        for start in range(0, count, TILE):
            entry = start + tl.arange(0, TILE)
            tl.store(row_slots + entry, -1, mask=(entry >= before + own) & (entry < count))
    row = before
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        local = tl.load(expert_ids + entry, mask=entry < count, other=-1) - first_expert
        mine = ((local == expert) & (entry < count)).to(tl.int32)
        place = row + tl.cumsum(mine, axis=0) - 1
        tl.store(row_slots + place, entry, mask=mine != 0)
        row += tl.sum(mine, axis=0)


@triton.jit
def _active_kernel(expert_offsets, active_experts, experts, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Local experts with rows, ascending, behind their number; then -1."""
    expert = tl.arange(0, E)
    inside = expert < experts
    begin = tl.load(expert_offsets + expert, mask=inside, other=0)
    end = tl.load(expert_offsets + expert + 1, mask=inside, other=0)
    active = (end > begin).to(tl.int32)
    number = tl.sum(active, axis=0)
    tl.store(active_experts, number)
    place = 1 + tl.cumsum(active, axis=0) - 1
    idle = 1 + number + tl.cumsum(1 - active, axis=0) - 1
    tl.store(active_experts + tl.where(active != 0, place, idle), tl.where(active != 0, expert, -1), mask=inside)


def moe_route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    token_count: torch.Tensor | None,
    first_expert: int,
    num_local_experts: int,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    expert_offsets: torch.Tensor,
    active_experts: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates fp32 logits [T, experts]."""
    tokens, hidden = x.shape
    experts, top_k = weight.shape[0], expert_ids.shape[1]
    if tokens:
        logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
        _logits_kernel[(triton.cdiv(tokens, TOKEN_TILE), triton.cdiv(experts, EXPERT_TILE))](
            x, weight, bias, logits, tokens, experts,
            H=hidden, TILE_T=TOKEN_TILE, TILE_E=EXPERT_TILE, TILE_K=K_TILE, num_warps=4,
        )  # fmt: skip
        _top_k_kernel[(tokens,)](
            logits, token_count, expert_ids, expert_weights, experts,
            E=triton.next_power_of_2(experts), K=top_k, COUNTED=token_count is not None, num_warps=1,
        )  # fmt: skip
    _rows_kernel[(num_local_experts,)](
        expert_ids, expert_offsets, row_slots, tokens * top_k, first_expert, TILE=ROW_TILE, num_warps=4
    )
    _active_kernel[(1,)](
        expert_offsets, active_experts, num_local_experts, E=triton.next_power_of_2(num_local_experts), num_warps=1
    )
