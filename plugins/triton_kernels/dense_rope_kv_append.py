"""dense_rope_kv_append: the qkv product with rotation and append in its tail, for few tokens one kernel.

Invariant: a program's weight rows are a run of a head's first half and the same run of its second half, so that it
holds both halves of what it rotates; the product is rounded to bf16 before, as between ops. More tokens, and heads that
such runs do not divide, take the three ops one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels import dense, dense_few
from gptoss_trt.triton_kernels.dependent import prefetch, release, wait
from gptoss_trt.triton_kernels.numerics import round_bf16, to_bf16
from gptoss_trt.triton_kernels.rope_kv_append import rope_kv_append, store_cache


@triton.jit
def _dense_rope_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    positions,
    cos_sin,
    slots,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    tokens,
    K: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    FP8: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_T: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    RUN: tl.constexpr = ROWS // 2
    D: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    head = tl.program_id(0) // (HALF // RUN)
    begin = tl.program_id(0) % (HALF // RUN) * RUN  # of the run in a half
    first = (head * D + begin).to(tl.int64)
    if AHEAD > 0:
        valid = RUN * (K if FP8 else 2 * K)
        prefetch(weight + first * K, valid, AHEAD // 2)
        prefetch(weight + (first + HALF) * K, valid, AHEAD // 2)
    token = tl.arange(0, TILE_T).to(tl.int64)
    real = token < tokens
    column = begin + tl.arange(0, RUN)
    angle = cos_sin + tl.load(positions + token, mask=real, other=0).to(tl.int64)[None, :] * D + column[:, None]
    cos = tl.load(angle, mask=real[None, :], other=0.0)
    sin = tl.load(angle + HALF, mask=real[None, :], other=0.0)
    release()
    wait()
    slot = tl.load(slots + token, mask=real, other=-1)
    place = tl.arange(0, ROWS)
    row = first + place // RUN * HALF + place % RUN
    if FP8:
        scales = weight_scale + dense_few.row_of_scales(row, S0, S1) * ((K + STEP - 1) // STEP)
        total = dense_few.sum_fp8(x, x_scale, weight, scales, row, ALL, token, tokens, K, WARPS, STEP, STAGES)
    else:
        total = dense_few.sum_bf16(x, weight, row, ALL, token, tokens, K, WARPS, STEP, STAGES)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    halves = tl.permute(tl.reshape(round_bf16(total), (2, RUN, TILE_T)), (1, 2, 0))
    left, right = tl.split(halves)
    turned = head < HEADS + KV_HEADS
    low = tl.where(turned, left * cos - right * sin, left)
    high = tl.where(turned, right * cos + left * sin, right)
    if head < HEADS:
        target = q + (token * HEADS + head)[None, :] * D + column[:, None]
        tl.store(target, to_bf16(low), mask=real[None, :])
        tl.store(target + HALF, to_bf16(high), mask=real[None, :])
    else:
        kv_head = (head - HEADS) % KV_HEADS
        line = ((slot // BLOCK_TOKENS).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
        entry = line[None, :] * D + column[:, None]
        kept = (slot >= 0)[None, :]
        if turned:
            store_cache(k_cache + entry, low, k_scale, kept, FP8_CACHE)
            store_cache(k_cache + entry + HALF, high, k_scale, kept, FP8_CACHE)
        else:
            store_cache(v_cache + entry, low, v_scale, kept, FP8_CACHE)
            store_cache(v_cache + entry + HALF, high, v_scale, kept, FP8_CACHE)


def dense_rope_kv_append(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
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
    """The op of that name; see ops/schemas.py. Allocates qkv where the three steps do not run in one kernel."""
    tokens, heads, head_dim = q.shape
    tile = dense_few.BF16_TILE if x_scale is None else dense_few.FP8_TILE
    run = tile.rows // 2
    if tokens == 0 or tokens > dense_few.MOST_TOKENS or head_dim // 2 % run:
        qkv = torch.empty((tokens, weight.shape[0]), dtype=torch.bfloat16, device=x.device)
        if x_scale is None or weight_scale is None:
            dense.dense(x, weight, bias, qkv)
        else:
            dense.dense_fp8(x, x_scale, weight, weight_scale, segments, bias, qkv)
        rope_kv_append(qkv, positions, cos_sin, slots, k_scale, v_scale, q, k_cache, v_cache)
        return
    columns, rows = x.shape[1], weight.shape[0]
    first = [*segments, rows, 0][:2] if segments else [rows, 0]
    _dense_rope_kernel[(rows // tile.rows,)](
        x, x_scale, weight, weight_scale, bias, positions, cos_sin, slots, q, k_cache, v_cache, k_scale, v_scale,
        tokens, K=columns, S0=first[0], S1=first[1], FP8=x_scale is not None,
        FP8_CACHE=k_cache.dtype == torch.float8_e4m3fn, HEADS=heads, KV_HEADS=k_cache.shape[1], HALF=head_dim // 2,
        BLOCK_TOKENS=k_cache.shape[2], BIAS=bias is not None, **tile.options(tokens, columns * weight.element_size()),
    )  # fmt: skip
