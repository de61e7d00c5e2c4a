"""moe_route: router product, top k, softmax over those k, and the rows of each expert in a fixed order.

Invariant: order by (bf16 logit, lowest index) and rows by (expert, token, slot): no atomics, so the same input gives
the same bits; the router product is cut along H into the same parts whatever the number of tokens. Two kernels for few
tokens, four for many; counts and offsets never leave the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import dot, round_bf16

TOKEN_TILE = 16
EXPERT_TILE = 16
K_TILE = 128
K_PART = 512  # of H, for one program: a router is 0.2 to 0.7 MB, which few programs would read slowly
ROW_TILE = 1024
SMALL_ENTRIES = 64  # (token, slot) pairs that one program sorts by comparing each with each


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    parts,
    tokens,
    experts,
    H: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_K: tl.constexpr,
    PART: tl.constexpr,
):
    """parts fp32 [P, T, E]: x @ weight^T over PART channels each."""
    token = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    expert = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    part = tl.program_id(2)
    acc = tl.zeros((TILE_T, TILE_E), tl.float32)
    for k in tl.static_range(0, PART, TILE_K):
        column = part * PART + k + tl.arange(0, TILE_K)
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
    tl.store(
        parts + (part.to(tl.int64) * tokens + token.to(tl.int64)[:, None]) * experts + expert[None, :],
        acc,
        mask=(token < tokens)[:, None] & (expert < experts)[None, :],
    )


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    parts,
    bias,
    expert_ids,
    expert_weights,
    token,
    tokens,
    real,
    experts,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """The K best of each token's logits bf16(sum of parts + bias), best first, equal ones by the lower index; stores
    ids and softmax weights of `token` [TILE_T], -1 and 0 where not `real`."""
    index = tl.arange(0, E)
    inside = (token < tokens)[:, None] & (index < experts)[None, :]
    logits = tl.zeros((TILE_T, E), tl.float32)
    for part in tl.static_range(PARTS):
        line = part * tokens + token.to(tl.int64)
        logits += tl.load(parts + line[:, None] * experts + index[None, :], mask=inside, other=0.0)
    logits += tl.load(bias + index, mask=index < experts, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(inside, round_bf16(logits), -float("inf"))
    best = tl.max(logits, axis=1)
    total = tl.zeros((TILE_T,), tl.float32)
    value = logits
    for _ in tl.static_range(K):
        top = tl.max(value, axis=1)
        chosen = tl.min(tl.where(value == top[:, None], index[None, :], E), axis=1)
        total += tl.exp(top - best)
        value = tl.where(index[None, :] == chosen[:, None], -float("inf"), value)
    value = logits
    for slot in tl.static_range(K):
        top = tl.max(value, axis=1)
        chosen = tl.min(tl.where(value == top[:, None], index[None, :], E), axis=1)
        share = round_bf16(tl.exp(top - best) / total)
        tl.store(expert_ids + token * K + slot, tl.where(real, chosen, -1), mask=token < tokens)
        tl.store(expert_weights + token * K + slot, tl.where(real, share, 0.0), mask=token < tokens)
        value = tl.where(index[None, :] == chosen[:, None], -float("inf"), value)


@triton.jit
def _top_k_kernel(  # type: ignore[no-untyped-def]
    parts,
    bias,
    token_count,
    expert_ids,
    expert_weights,
    tokens,
    experts,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """`_choose` for one token."""
    token = tl.program_id(0) + tl.arange(0, 1)
    real = token < tokens
    if COUNTED:
        real = token < tl.load(token_count)
    _choose(parts, bias, expert_ids, expert_weights, token, tokens, real, experts, E, K, PARTS, 1)


@triton.jit
def _small_kernel(  # type: ignore[no-untyped-def]
    parts,
    bias,
    token_count,
    expert_ids,
    expert_weights,
    expert_offsets,
    active_experts,
    row_slots,
    tokens,
    experts,
    first_expert,
    local_experts,
    E: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    COUNTED: tl.constexpr,
    TILE_T: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """All of routing behind the product, in one program: TILE_T tokens, TILE_T * K entries."""
    token = tl.arange(0, TILE_T)
    real = token < tokens
    if COUNTED:
        real = token < tl.load(token_count)
    _choose(parts, bias, expert_ids, expert_weights, token, tokens, real, experts, E, K, PARTS, TILE_T)
    tl.debug_barrier()  # what other threads stored is read back in another order
    entry = tl.arange(0, TILE_T * K)
    count = tokens * K
    local = tl.load(expert_ids + entry, mask=entry < count, other=-1) - first_expert
    mine = (local >= 0) & (local < local_experts)
    key = tl.where(mine, local * (TILE_T * K) + entry, LOCAL * TILE_T * K + entry)  # others behind, in order
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(row_slots + rank, tl.where(mine, entry, -1), mask=entry < count)
    expert = tl.arange(0, LOCAL)
    inside = expert < local_experts
    begin = tl.sum((mine[None, :] & (local[None, :] < expert[:, None])).to(tl.int32), axis=1)
    own = tl.sum((mine[None, :] & (local[None, :] == expert[:, None])).to(tl.int32), axis=1)
    tl.store(expert_offsets + expert, begin, mask=inside)
    tl.store(expert_offsets + local_experts, tl.sum(mine.to(tl.int32), axis=0))
    _store_active(active_experts, expert, inside, own > 0)


@triton.jit
def _store_active(active_experts, expert, inside, used):  # type: ignore[no-untyped-def]
    """The number of used experts, their ids ascending, then -1."""
    active = (used & inside).to(tl.int32)
    number = tl.sum(active, axis=0)
    tl.store(active_experts, number)
    place = tl.where(active != 0, tl.cumsum(active, axis=0), number + tl.cumsum(1 - active, axis=0))
    tl.store(active_experts + place, tl.where(active != 0, expert, -1), mask=inside)


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
    expert = tl.arange(0, E)
    inside = expert < experts
    begin = tl.load(expert_offsets + expert, mask=inside, other=0)
    end = tl.load(expert_offsets + expert + 1, mask=inside, other=0)
    _store_active(active_experts, expert, inside, end > begin)


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
    """The op of that name; see ops/schemas.py. Allocates fp32 parts of the logits [P, T, experts]."""
    tokens, hidden = x.shape
    experts, top_k = weight.shape[0], expert_ids.shape[1]
    pieces = triton.cdiv(hidden, K_PART)
    width, local_width = triton.next_power_of_2(experts), triton.next_power_of_2(num_local_experts)
    parts = torch.empty((pieces, tokens, experts), dtype=torch.float32, device=x.device)
    counted = token_count is not None
    if tokens:
        _product_kernel[(triton.cdiv(tokens, TOKEN_TILE), triton.cdiv(experts, EXPERT_TILE), pieces)](
            x, weight, parts, tokens, experts,
            H=hidden, TILE_T=TOKEN_TILE, TILE_E=EXPERT_TILE, TILE_K=K_TILE, PART=K_PART, num_warps=4,
        )  # fmt: skip
    tile = triton.next_power_of_2(max(tokens, 1))
    if tokens and tile * top_k <= SMALL_ENTRIES and triton.next_power_of_2(top_k) == top_k:
        _small_kernel[(1,)](
            parts, bias, token_count, expert_ids, expert_weights, expert_offsets, active_experts, row_slots,
            tokens, experts, first_expert, num_local_experts,
            E=width, K=top_k, PARTS=pieces, COUNTED=counted, TILE_T=tile, LOCAL=local_width, num_warps=8,
        )  # fmt: skip
        return
    if tokens:
        _top_k_kernel[(tokens,)](
            parts, bias, token_count, expert_ids, expert_weights, tokens, experts,
            E=width, K=top_k, PARTS=pieces, COUNTED=counted, num_warps=1,
        )  # fmt: skip
    _rows_kernel[(num_local_experts,)](
        expert_ids, expert_offsets, row_slots, tokens * top_k, first_expert, TILE=ROW_TILE, num_warps=4
    )
    _active_kernel[(1,)](expert_offsets, active_experts, num_local_experts, E=local_width, num_warps=1)
