"""attention_prefill and attention_decode with sinks over the paged cache.

Invariant: rows of a tile are (query, head of one KV head's group); a tile reads the blocks that its queries see and no
others. The sink enters once: at the end of a tile that holds the whole key range, or in the merge of a split one.
Must not know layers: window, scale and tables are arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels import dependent
from gptoss_trt.triton_kernels.act_quant import act_quant
from gptoss_trt.triton_kernels.dependent import DEPENDENT
from gptoss_trt.triton_kernels.numerics import dot, to_bf16

MIN_ROWS = 16  # tl.dot needs 16 rows
PREFILL_ROWS = 128
SPLIT_KEYS = 256  # keys of one part of a split range: a function of the sequence alone, so batches do not change it
MAX_SPLITS = 64
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _blocks(  # type: ignore[no-untyped-def]
    state,
    q,
    k_cache,
    v_cache,
    table,
    position,
    valid,
    kv_head,
    first_block,
    begin,
    end,
    key_begin,
    key_end,
    scale,
    k_scale,
    v_scale,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds blocks [begin, end) to the state (output, maximum, sum). Unless MASKED, every row sees all of their keys."""
    acc, top, total = state
    column = tl.arange(0, D)
    offset = tl.arange(0, BLOCK_TOKENS)
    for block in range(begin, end):
        key = block * BLOCK_TOKENS + offset
        physical = tl.load(table + block - first_block).to(tl.int64)
        base = (physical * KV_HEADS + kv_head) * BLOCK_TOKENS * D
        if MASKED:
            inside = key < key_end
            k = tl.load(k_cache + base + offset[None, :] * D + column[:, None], mask=inside[None, :], other=0.0)
            v = tl.load(v_cache + base + offset[:, None] * D + column[None, :], mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_cache + base + offset[None, :] * D + column[:, None])
            v = tl.load(v_cache + base + offset[:, None] * D + column[None, :])
        if k_cache.dtype.element_ty != tl.bfloat16:  # bf16 goes from memory to the tensor cores as it is
            k = to_bf16(k.to(tl.float32) * k_scale)
            v = to_bf16(v.to(tl.float32) * v_scale)
        scores = dot(q, k, tl.zeros((ROWS, BLOCK_TOKENS), tl.float32)) * (scale * LOG2E)
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= position[:, None]) & (key >= key_begin)[None, :] & valid[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base_row = higher
        if MASKED:
            # A row that has seen no key yet keeps -inf: subtract 0 there, so that exp2 gives 0 and not NaN.
            base_row = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base_row[:, None])
        shrink = tl.exp2(top - base_row)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = dot(to_bf16(weights), v, acc * shrink[:, None])
        top = higher
    return acc, top, total


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    table,
    position,
    lowest,
    valid,
    kv_head,
    first_block,
    key_begin,
    key_end,
    scale,
    k_scale,
    v_scale,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Online softmax of q bf16 [ROWS, D] over keys [key_begin, key_end); `lowest` is the smallest position of a row.
    Returns the unnormalised output, the maximum (in log2 units) and the sum of weights."""
    state = (
        tl.zeros((ROWS, D), tl.float32),
        tl.full((ROWS,), -float("inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )
    begin = key_begin // BLOCK_TOKENS
    whole = begin
    if not WINDOW:
        # key_begin is the start of a block (a power of two divides a part); up to `lowest` every row sees every key.
        whole = tl.maximum(tl.minimum(lowest + 1, key_end) // BLOCK_TOKENS, begin)
        state = _blocks(
            state, q, k_cache, v_cache, table, position, valid, kv_head, first_block, begin, whole, key_begin, key_end,
            scale, k_scale, v_scale, ROWS, D, KV_HEADS, BLOCK_TOKENS, WINDOW, False,
        )  # fmt: skip
    return _blocks(
        state, q, k_cache, v_cache, table, position, valid, kv_head, first_block, whole,
        tl.cdiv(key_end, BLOCK_TOKENS), key_begin, key_end,
        scale, k_scale, v_scale, ROWS, D, KV_HEADS, BLOCK_TOKENS, WINDOW, True,
    )  # fmt: skip


@triton.jit
def _finish(acc, top, total, sink):  # type: ignore[no-untyped-def]
    """The output with the sink in the denominator; 0 for rows without a key."""
    sink2 = sink * LOG2E
    higher = tl.maximum(top, sink2)
    kept = tl.exp2(top - higher)
    denominator = total * kept + tl.exp2(sink2 - higher)
    return acc * (kept / denominator)[:, None]


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    block_table,
    first_block,
    query_start,
    context_lens,
    sinks,
    out,
    sequences,
    table_width,
    scale,
    k_scale,
    v_scale,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    dependent.wait()
    dependent.release()
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Tiles are numbered sequence by sequence; the one that owns this program is found by counting.
    sequence = tile * 0
    first_tile = tile * 0
    counted = tile * 0
    for s in range(sequences):
        tiles = tl.cdiv(tl.load(query_start + s + 1) - tl.load(query_start + s), QUERIES)
        here = (tile >= counted) & (tile < counted + tiles)
        sequence = tl.where(here, s, sequence)
        first_tile = tl.where(here, counted, first_tile)
        counted += tiles
    if tile >= counted:
        return
    begin = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    row = tl.arange(0, ROWS)
    query = begin + (tile - first_tile) * QUERIES + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = query < end
    position = context - end + query
    first_position = context - end + begin + (tile - first_tile) * QUERIES
    key_end = tl.minimum(first_position + QUERIES, context)
    key_begin = first_position * 0
    if WINDOW:
        key_begin = tl.maximum(first_position - WINDOW + 1, 0)
    skipped = first_position * 0
    if FIRST:
        skipped = tl.load(first_block + sequence)
    place = (query.to(tl.int64) * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    rows = tl.load(q + place, mask=valid[:, None], other=0.0)
    acc, top, total = _attend(
        rows, k_cache, v_cache, block_table + sequence.to(tl.int64) * table_width, position, first_position, valid,
        kv_head, skipped, key_begin, key_end, scale, k_scale, v_scale, ROWS, D, KV_HEADS, BLOCK_TOKENS, WINDOW,
    )  # fmt: skip
    sink = tl.load(sinks + head).to(tl.float32)
    tl.store(out + place, to_bf16(_finish(acc, top, total, sink)), mask=valid[:, None])


@triton.jit
def _zero_tail_kernel(out, query_start, sequences, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros the rows behind query_start[S]."""
    dependent.wait()
    dependent.release()
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_start + sequences):
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(out + token * WIDTH + column, tl.zeros((BLOCK,), tl.bfloat16), mask=column < WIDTH)


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    block_table,
    first_block,
    context_lens,
    sinks,
    part_out,
    part_top,
    part_sum,
    out,
    table_width,
    scale,
    k_scale,
    v_scale,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """One part of one sequence's keys for one KV head; with one part, the result itself."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context = tl.load(context_lens + sequence)
    row = tl.arange(0, ROWS)
    number = row // GROUP
    valid = number < tl.where(context > 0, QUERIES, 0)
    position = context - QUERIES + number
    low = context * 0
    if WINDOW:
        low = tl.maximum(context - QUERIES - WINDOW + 1, 0)
    key_begin = low
    key_end = context
    if SPLITS > 1:
        # Parts are whole blocks, and the last one takes what the grid has no part for.
        length = tl.maximum(tl.cdiv(tl.cdiv(context, SPLITS), SPLIT_KEYS), 1) * SPLIT_KEYS
        key_begin = tl.minimum(part * length, context)
        key_end = tl.minimum(key_begin + length, context)
    skipped = context * 0
    if FIRST:
        skipped = tl.load(first_block + sequence)
    dependent.wait()
    dependent.release()
    head = kv_head * GROUP + row % GROUP
    query = (sequence * QUERIES + number).to(tl.int64)
    column = tl.arange(0, D)
    place = (query * HEADS + head)[:, None] * D + column[None, :]
    rows = tl.load(q + place, mask=valid[:, None], other=0.0)
    acc, top, total = _attend(
        rows, k_cache, v_cache, block_table + sequence.to(tl.int64) * table_width, position, context - QUERIES, valid,
        kv_head, skipped, key_begin, key_end, scale, k_scale, v_scale, ROWS, D, KV_HEADS, BLOCK_TOKENS, WINDOW,
    )  # fmt: skip
    stored = number < QUERIES
    if SPLITS > 1:
        line = (query * HEADS + head) * SPLITS + part
        tl.store(part_out + line[:, None] * D + column[None, :], acc, mask=stored[:, None])
        tl.store(part_top + line, top, mask=stored)
        tl.store(part_sum + line, total, mask=stored)
    else:
        sink = tl.load(sinks + head).to(tl.float32)
        tl.store(out + place, to_bf16(_finish(acc, top, total, sink)), mask=stored[:, None])


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    part_out, part_top, part_sum, sinks, out, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    """Adds the parts of one (query, head) in order, then the sink. Empty parts have top -inf and sum 0."""
    dependent.wait()
    dependent.release()
    line = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    column = tl.arange(0, D)
    tops = tl.load(part_top + line * SPLITS + part)
    sink2 = tl.load(sinks + line % HEADS).to(tl.float32) * LOG2E
    higher = tl.maximum(tl.max(tops, axis=0), sink2)
    kept = tl.exp2(tops - higher)
    denominator = tl.sum(kept * tl.load(part_sum + line * SPLITS + part), axis=0) + tl.exp2(sink2 - higher)
    parts = tl.load(part_out + (line * SPLITS + part)[:, None] * D + column[None, :])
    mixed = tl.sum(parts * kept[:, None], axis=0) / denominator
    tl.store(out + line * D + column, to_bf16(mixed))


def _block_tokens(cache: torch.Tensor) -> int:
    size = cache.shape[2]
    if size & (size - 1):
        raise ValueError(f"the Triton attention kernels read blocks of 1, 2, 4, ... 64 tokens, not of {size}")
    return size


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Raises ValueError for a block of tokens that is no power of two."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    kv_heads, block_tokens = k_cache.shape[1], _block_tokens(k_cache)
    group, sequences = heads // kv_heads, block_table.shape[0]
    rows = max(min(PREFILL_ROWS, triton.next_power_of_2(tokens * group)), MIN_ROWS)
    # The most tiles that any cut of T tokens into S sequences can give; programs behind the last tile return.
    tiles = tokens // (rows // group) + sequences
    _zero_tail_kernel[(tokens,)](
        out, query_start, sequences, WIDTH=heads * head_dim, BLOCK=1024, num_warps=4, **DEPENDENT
    )
    _prefill_kernel[(tiles, kv_heads)](
        q, k_cache, v_cache, block_table, first_block, query_start, context_lens, sinks, out,
        sequences, block_table.shape[1], scale, k_scale, v_scale,
        ROWS=rows, GROUP=group, KV_HEADS=kv_heads, D=head_dim, BLOCK_TOKENS=block_tokens, WINDOW=window,
        FIRST=first_block is not None, num_warps=4 if rows <= 64 else 8, **DEPENDENT,
    )  # fmt: skip


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. A full range is split by the width of the block table, which a captured
    graph fixes; allocates the parts. Raises ValueError for a block of tokens that is no power of two."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    kv_heads, block_tokens = k_cache.shape[1], _block_tokens(k_cache)
    group, sequences = heads // kv_heads, context_lens.shape[0]
    queries = tokens // sequences
    splits = 1
    if not window:
        splits = min(triton.next_power_of_2(triton.cdiv(block_table.shape[1] * block_tokens, SPLIT_KEYS)), MAX_SPLITS)
    part_out = part_top = part_sum = None
    if splits > 1:
        part_out = torch.empty((tokens, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        part_top = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
        part_sum = torch.empty_like(part_top)
    _decode_kernel[(sequences, kv_heads, splits)](
        q, k_cache, v_cache, block_table, first_block, context_lens, sinks, part_out, part_top, part_sum, out,
        block_table.shape[1], scale, k_scale, v_scale,
        QUERIES=queries, ROWS=max(triton.next_power_of_2(queries * group), MIN_ROWS), GROUP=group, KV_HEADS=kv_heads,
        D=head_dim, BLOCK_TOKENS=block_tokens, WINDOW=window, FIRST=first_block is not None, SPLITS=splits,
        SPLIT_KEYS=SPLIT_KEYS, num_warps=4, **DEPENDENT,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](
            part_out, part_top, part_sum, sinks, out, HEADS=heads, D=head_dim, SPLITS=splits, num_warps=4, **DEPENDENT
        )


def attention_prefill_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates the output between its kernels."""
    out = torch.empty_like(q)
    attention_prefill(
        q, k_cache, v_cache, block_table, first_block, query_start, context_lens, sinks, window, scale, k_scale,
        v_scale, out,
    )  # fmt: skip
    act_quant(out.flatten(1), 128, quantised, scales)


def attention_decode_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    quantised: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates the output between its kernels."""
    out = torch.empty_like(q)
    attention_decode(
        q, k_cache, v_cache, block_table, first_block, context_lens, sinks, window, scale, k_scale, v_scale,
        out,
    )  # fmt: skip
    act_quant(out.flatten(1), 128, quantised, scales)
