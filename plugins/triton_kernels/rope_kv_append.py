"""kv_slots and rope_kv_append: where a token's keys go, and rotating and writing them.

Invariant: slot -1 writes nothing to the cache; q is written for every row. Halves (neox), fp32 inside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import saturate_e4m3, to_bf16

SLOT_BLOCK = 256


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
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    sequence = tl.zeros((BLOCK,), tl.int32)
    for s in range(1, sequences):
        sequence += (token >= tl.load(query_start + s)).to(tl.int32)
    real = (token < tokens) & (token < tl.load(query_start + sequences))
    entry = position // BLOCK_TOKENS
    if FIRST:
        entry -= tl.load(first_block + sequence, mask=real, other=0)
    known = real & (entry >= 0) & (entry < table_width)
    block = tl.load(block_table + sequence.to(tl.int64) * table_width + entry, mask=known, other=-1)
    slot = tl.where(block >= 0, block * BLOCK_TOKENS + position % BLOCK_TOKENS, -1)
    tl.store(slots + token, slot, mask=token < tokens)


@triton.jit
def _store_half(target, value, scale, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    if FP8:
        tl.store(target, saturate_e4m3(tl.div_rn(value, tl.zeros_like(value) + scale)))
    else:
        tl.store(target, to_bf16(value))


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
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    column = tl.arange(0, HALF)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * D
    first = tl.load(source + column).to(tl.float32)
    second = tl.load(source + HALF + column).to(tl.float32)
    slot = tl.load(slots + token)
    kv_head = (head - HEADS) % KV_HEADS
    row = ((slot // BLOCK_TOKENS).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    if head < HEADS + KV_HEADS:
        position = tl.load(positions + token).to(tl.int64)
        cos = tl.load(cos_sin + position * D + column)
        sin = tl.load(cos_sin + position * D + HALF + column)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    if head < HEADS:
        target = q + (token * HEADS + head) * D
        tl.store(target + column, to_bf16(first))
        tl.store(target + HALF + column, to_bf16(second))
    elif slot >= 0:
        if head < HEADS + KV_HEADS:
            _store_half(k_cache + row * D + column, first, k_scale, FP8)
            _store_half(k_cache + row * D + HALF + column, second, k_scale, FP8)
        else:
            _store_half(v_cache + row * D + column, first, v_scale, FP8)
            _store_half(v_cache + row * D + HALF + column, second, v_scale, FP8)


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
        BLOCK_TOKENS=block_tokens, BLOCK=SLOT_BLOCK, FIRST=first_block is not None,
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
    _rope_kv_append_kernel[(tokens, heads + 2 * kv_heads)](
        qkv, positions, cos_sin, slots, q, k_cache, v_cache, k_scale, v_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_TOKENS=block_tokens,
        FP8=k_cache.dtype == torch.float8_e4m3fn, num_warps=1,
    )  # fmt: skip
