"""kv_slots and rope_kv_append: where a token's keys go, and rotating and writing them.

Invariant: slot -1 writes nothing to the cache; q is written for every row. Halves (neox), fp32 inside. kv_slots is not
launched dependent: with it a step begins, so what was written before the step can be read by any kernel ahead of its
wait, as positions are here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dense import dense_fp8
from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import saturate_e4m3, to_bf16

SLOT_BLOCK = 256
SLOT_STARTS = 32
HEAD_TILE = 16  # heads of one program: 80 programs a token of one warp each took ten times what their bytes take


@triton.jit
def _kv_slots_kernel(  # type: ignore[no-untyped-def]
    positions,
    query_start,
    block_table,
    first_block,
    slots,
    tokens,
    sequences,
    table_width,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    STARTS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    sequence = tl.zeros((BLOCK,), tl.int32)
    for first in range(1, sequences, STARTS):  # one latency for all starts of a round
        s = first + tl.arange(0, STARTS)
        start = tl.load(query_start + s, mask=s < sequences, other=2147483647)
        sequence += tl.sum((token[:, None] >= start[None, :]).to(tl.int32), axis=1)
    real = (token < tokens) & (token < tl.load(query_start + sequences))
    entry = position // BLOCK_TOKENS
    if FIRST:
        entry -= tl.load(first_block + sequence, mask=real, other=0)
    known = real & (entry >= 0) & (entry < table_width)
    block = tl.load(block_table + sequence.to(tl.int64) * table_width + entry, mask=known, other=-1)
    slot = tl.where(block >= 0, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1)
    tl.store(slots + token, slot, mask=token < tokens)


@triton.jit
def _store_cache(target, value, scale, mask, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    if FP8:
        tl.store(target, saturate_e4m3(tl.div_rn(value, tl.zeros_like(value) + scale)), mask=mask)
    else:
        tl.store(target, to_bf16(value), mask=mask)


@triton.jit
def _rope_kv_append_kernel(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    cos_sin,
    slots,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE heads of one token: q heads first, then k, then v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    D: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    column = tl.arange(0, HALF)
    inside = (head < ALL)[:, None] & (column < HALF)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * D + column)[None, :]
    sin = tl.load(cos_sin + position * D + HALF + column)[None, :]
    release()
    wait()
    slot = tl.load(slots + token)
    source = qkv + (token * ALL + head)[:, None] * D + column[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = (head < HEADS + KV_HEADS)[:, None] & (column < HALF)[None, :]
    rotated = tl.where(turned, first * cos - second * sin, first)
    second = tl.where(turned, second * cos + first * sin, second)
    target = q + (token * HEADS + head)[:, None] * D + column[None, :]
    is_q = inside & (head < HEADS)[:, None]
    tl.store(target, to_bf16(rotated), mask=is_q)
    tl.store(target + HALF, to_bf16(second), mask=is_q)
    kv_head = tl.maximum(head - HEADS, 0) % KV_HEADS
    row = ((slot // BLOCK_TOKENS).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    place = row[:, None] * D + column[None, :]
    is_kv = inside & (head >= HEADS)[:, None] & (head >= tl.where(slot >= 0, 0, ALL))[:, None]
    is_k = is_kv & (head < HEADS + KV_HEADS)[:, None]
    is_v = is_kv & (head >= HEADS + KV_HEADS)[:, None]
    _store_cache(k_cache + place, rotated, k_scale, is_k, FP8)
    _store_cache(k_cache + place + HALF, second, k_scale, is_k, FP8)
    _store_cache(v_cache + place, rotated, v_scale, is_v, FP8)
    _store_cache(v_cache + place + HALF, second, v_scale, is_v, FP8)


def kv_slots(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    block_tokens: int,
    slots: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. A position whose block is not in the table gets -1."""
    tokens = positions.shape[0]
    if tokens == 0:
        return
    _kv_slots_kernel[(triton.cdiv(tokens, SLOT_BLOCK),)](
        positions, query_start, block_table, first_block, slots, tokens, block_table.shape[0], block_table.shape[1],
        BLOCK_TOKENS=block_tokens, BLOCK=SLOT_BLOCK, FIRST=first_block is not None, STARTS=SLOT_STARTS,
    )  # fmt: skip


def rope_kv_append(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    kv_heads, block_tokens = k_cache.shape[1], k_cache.shape[2]
    _rope_kv_append_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, HEAD_TILE))](
        qkv, positions, cos_sin, slots, q, k_cache, v_cache, k_scale, v_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_TOKENS=block_tokens,
        FP8=k_cache.dtype == torch.float8_e4m3fn, TILE=HEAD_TILE, num_warps=2, **DEPENDENT,
    )  # fmt: skip


def dense_fp8_rope_kv_append(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates q, k and v between its two kernels."""
    qkv = torch.empty((len(x), len(weight)), dtype=torch.bfloat16, device=x.device)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, qkv)
    rope_kv_append(qkv, positions, cos_sin, slots, k_scale, v_scale, q, k_cache, v_cache)
