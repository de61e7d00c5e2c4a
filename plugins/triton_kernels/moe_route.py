"""moe_route: router product, top k, softmax over those k, and the rows of each expert in a fixed order.

Invariant: order by (bf16 logit, lowest index) and rows by (expert, token, slot): no atomics, so the same input gives
the same bits; the router product is cut along H into the same parts whatever the number of tokens. Two kernels for few
tokens, four for many, all launched dependent; counts and offsets never leave the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import dot, round_bf16

TOKEN_TILE = 16
EXPERT_TILE = 16
K_TILE = 128
K_PART = 512  # of H, for one program: a router is 0.2 to 0.7 MB, which few programs would read slowly
ROW_TILE = 1024
CHOICE_TILE = 8  # tokens of a program that chooses
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
    release()
    wait()
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
def _order(logits, index, inside):  # type: ignore[no-untyped-def]
    """int32 keys in the order of (bf16 logit, lowest index); both can be read back from a key. Outside: the least."""
    value = tl.where(logits == 0.0, 0.0, logits)  # -0 ties with 0
    bits = value.to(tl.int32, bitcast=True) >> 16
    ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    return tl.where(inside, ordered * 65536 + (65535 - index), -2147483648)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, index, inside, K: tl.constexpr, WIDTH: tl.constexpr, TILE_T: tl.constexpr
):
    """(ids int32, weights fp32), both [TILE_T, WIDTH]: the K best of each row of logits fp32 [TILE_T, E], rounded to
    bf16, best first, equal ones by the lower index, and their softmax rounded to bf16; anything behind the K.
    `index` is 0 .. E - 1 as [1, E]."""
    key = _order(round_bf16(logits), index, inside)
    place = tl.arange(0, WIDTH)[None, :]
    best = tl.full((TILE_T, WIDTH), -2147483648, tl.int32)
    for slot in tl.static_range(K):
        top = tl.max(key, axis=1)[:, None]
        best = tl.where(place == slot, top, best)
        key = tl.where(key == top, -2147483648, key)
    ordered = best >> 16
    value = (tl.where(ordered < 0, ordered ^ 0x7FFF, ordered) << 16).to(tl.float32, bitcast=True)
    first = tl.max(tl.where(place == 0, value, -float("inf")), axis=1)[:, None]
    weight = tl.where(place < K, tl.exp(value - first), 0.0)
    return 65535 - (best & 65535), round_bf16(weight / tl.sum(weight, axis=1)[:, None])


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    parts, bias, token, inside, tokens, experts, E: tl.constexpr, PARTS: tl.constexpr, TILE_T: tl.constexpr
):
    """fp32 [TILE_T, E]: sum of parts + bias."""
    index = tl.arange(0, E)
    logits = tl.zeros((TILE_T, E), tl.float32)
    for part in tl.static_range(PARTS):
        line = part * tokens + token.to(tl.int64)
        logits += tl.load(parts + line[:, None] * experts + index[None, :], mask=inside, other=0.0)
    return logits + tl.load(bias + index, mask=index < experts, other=0.0).to(tl.float32)[None, :]


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
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COUNTED: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """The choice of TILE_T tokens, each for itself."""
    token = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    index = tl.arange(0, E)[None, :]
    inside = (token < tokens)[:, None] & (index < experts)
    release()
    wait()
    real = token < tokens
    if COUNTED:
        real = token < tl.load(token_count)
    logits = _logits(parts, bias, token, inside, tokens, experts, E, PARTS, TILE_T)
    ids, weights = _choose(logits, index, inside, K, WIDTH, TILE_T)
    _store_choice(expert_ids, expert_weights, ids, weights, token, real, tokens, K, WIDTH)


@triton.jit
def _store_choice(  # type: ignore[no-untyped-def]
    expert_ids, expert_weights, ids, weights, token, real, tokens, K: tl.constexpr, WIDTH: tl.constexpr
):
    """Stores the first K of WIDTH choices; -1 and 0 where not `real`."""
    place = tl.arange(0, WIDTH)[None, :]
    target = token[:, None] * K + place
    mask = (token < tokens)[:, None] & (place < K)
    tl.store(expert_ids + target, tl.where(real[:, None], ids, -1), mask=mask)
    tl.store(expert_weights + target, tl.where(real[:, None], weights, 0.0), mask=mask)


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
    index = tl.arange(0, E)[None, :]
    inside = (token < tokens)[:, None] & (index < experts)
    release()
    wait()
    real = token < tokens
    if COUNTED:
        real = token < tl.load(token_count)
    logits = _logits(parts, bias, token, inside, tokens, experts, E, PARTS, TILE_T)
    ids, weights = _choose(logits, index, inside, K, K, TILE_T)
    _store_choice(expert_ids, expert_weights, ids, weights, token, real, tokens, K, K)
    entry = tl.arange(0, TILE_T * K)
    local = tl.reshape(tl.where(real[:, None], ids, -1), (TILE_T * K,)) - first_expert
    mine = (local >= 0) & (local < local_experts)
    key = tl.where(mine, local * (TILE_T * K) + entry, LOCAL * TILE_T * K + entry)  # others behind, in order
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(row_slots + rank, tl.where(mine, entry, -1), mask=entry < tokens * K)
    expert = tl.arange(0, LOCAL)
    held = expert < local_experts
    begin = tl.sum((mine[None, :] & (local[None, :] < expert[:, None])).to(tl.int32), axis=1)
    own = tl.sum((mine[None, :] & (local[None, :] == expert[:, None])).to(tl.int32), axis=1)
    tl.store(expert_offsets + expert, begin, mask=held)
    # Not the sum of `mine`: a reshaped tensor's layout may hold its elements more than once, which sums of Triton 3.6
    # count wrongly (of 14 tokens with 8 experts it gave 64 rows for 56).
    tl.store(expert_offsets + local_experts, tl.sum(own, axis=0))
    _store_active(active_experts, expert, held, own > 0)


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
    release()
    wait()
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
    release()
    wait()
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
    choose_and_sort(
        product(x, weight), bias, token_count, (first_expert, num_local_experts),
        (expert_ids, expert_weights, expert_offsets, active_experts, row_slots),
    )  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [P, T, experts], which add up to x @ weight^T."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
    pieces = triton.cdiv(hidden, K_PART)
    parts = torch.empty((pieces, tokens, experts), dtype=torch.float32, device=x.device)
    if tokens:
        _product_kernel[(triton.cdiv(tokens, TOKEN_TILE), triton.cdiv(experts, EXPERT_TILE), pieces)](
            x, weight, parts, tokens, experts,
            H=hidden, TILE_T=TOKEN_TILE, TILE_E=EXPERT_TILE, TILE_K=K_TILE, PART=K_PART, num_warps=4, **DEPENDENT,
        )  # fmt: skip
    return parts


def few(tokens: int, top_k: int) -> bool:
    """Whether one program sorts the rows of so many tokens."""
    return int(triton.next_power_of_2(max(tokens, 1))) * top_k <= SMALL_ENTRIES and top_k & (top_k - 1) == 0


def choose_and_sort(
    parts: torch.Tensor,
    bias: torch.Tensor,
    token_count: torch.Tensor | None,
    local: tuple[int, int],
    outputs: tuple[torch.Tensor, ...],
    at_once: bool = True,
) -> None:
    """What follows the router product: parts fp32 [P, T, experts] add up to the logits but for the bias; `local` is
    first_expert and num_local_experts, `outputs` are moe_route's, in its order. Few tokens take one program if
    `at_once`."""
    pieces, tokens, experts = parts.shape
    expert_ids, expert_weights, expert_offsets, active_experts, row_slots = outputs
    first_expert, num_local_experts = local
    top_k, counted = expert_ids.shape[1], token_count is not None
    width, local_width = triton.next_power_of_2(experts), triton.next_power_of_2(num_local_experts)
    if at_once and tokens and few(tokens, top_k):
        tile = triton.next_power_of_2(tokens)
        _small_kernel[(1,)](
            parts, bias, token_count, expert_ids, expert_weights, expert_offsets, active_experts, row_slots,
            tokens, experts, first_expert, num_local_experts,
            E=width, K=top_k, PARTS=pieces, COUNTED=counted, TILE_T=tile, LOCAL=local_width,
            num_warps=_small_warps(tile * max(width, top_k * local_width)), **DEPENDENT,
        )  # fmt: skip
        return
    choose(parts, bias, token_count, expert_ids, expert_weights)
    _rows_kernel[(num_local_experts,)](
        expert_ids, expert_offsets, row_slots, tokens * top_k, first_expert, TILE=ROW_TILE, num_warps=4, **DEPENDENT
    )
    _active_kernel[(1,)](expert_offsets, active_experts, num_local_experts, E=local_width, num_warps=1, **DEPENDENT)


def choose(
    parts: torch.Tensor,
    bias: torch.Tensor,
    token_count: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> None:
    """moe_route's first two outputs; `parts` as in choose_and_sort. A token's do not depend on the others."""
    pieces, tokens, experts = parts.shape
    top_k = expert_ids.shape[1]
    if tokens:
        _top_k_kernel[(triton.cdiv(tokens, CHOICE_TILE),)](
            parts, bias, token_count, expert_ids, expert_weights, tokens, experts,
            E=triton.next_power_of_2(experts), K=top_k, WIDTH=triton.next_power_of_2(top_k), PARTS=pieces,
            COUNTED=token_count is not None, TILE_T=CHOICE_TILE, num_warps=1, **DEPENDENT,
        )  # fmt: skip


def _small_warps(elements: int) -> int:
    """One warp, which needs no barriers, while a lane has few of the largest array's elements."""
    return max(1, min(8, elements // 1024))
