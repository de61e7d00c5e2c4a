"""Attention with sinks over the paged cache, full or windowed, for chunks of prompts and single tokens alike.

Invariant: fp64 inside. That is wider than needed, and makes a query's result the same to the last fp32 bit however the
prompt was cut into chunks and whatever else is in the batch. Keys that no query of a tile sees are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_trt.reference.rounding import Round, keep

_QUERY_TILE = 128  # queries whose scores are held at once


@dataclass(frozen=True)
class PagedKv:
    """One layer's cache and the tables that find a sequence's keys in it.

    k, v [blocks, kv_heads, block_tokens, D]; block_table int [S, B]; first_block int [S] or None (zeros); an e4m3
    cache is multiplied by k_scale and v_scale.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    first_block: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def read(self, sequence: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at positions [begin, end) of a sequence, fp64 [kv_heads, end - begin, D] each.

        Raises ValueError when a block of the range is not in the table.
        """
        block_tokens = self.k.shape[2]
        first = 0 if self.first_block is None else int(self.first_block[sequence])
        low, high = begin // block_tokens - first, (end - 1) // block_tokens - first + 1
        row = self.block_table[sequence, max(low, 0) : high].long()
        if low < 0 or len(row) != high - low or int(row.min()) < 0:
            raise ValueError(
                f"sequence {sequence} needs keys {begin} to {end - 1}, entries {low} to {high - 1} of its block table, "
                f"which holds {row.tolist()} there"
            )
        skip = begin - (low + first) * block_tokens
        keys, values = _gather(self.k, row, skip, end - begin), _gather(self.v, row, skip, end - begin)
        if self.k.dtype == torch.float8_e4m3fn:
            return keys * self.k_scale, values * self.v_scale
        return keys, values


def _gather(cache: torch.Tensor, blocks: torch.Tensor, skip: int, count: int) -> torch.Tensor:
    """fp64 [kv_heads, count, D] from the blocks' tokens behind the first `skip`."""
    narrow = cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else cache[blocks]
    by_head = narrow.transpose(0, 1).flatten(1, 2)  # [kv_heads, blocks * block_tokens, D]
    return by_head[:, skip : skip + count].to(torch.float64)


def attention_prefill(
    q: torch.Tensor,
    kv: PagedKv,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    *,
    window: int,
    scale: float,
    inner: Round = keep,
) -> torch.Tensor:
    """out_i = sum_j p_ij v_j with p = exp(s_ij) / (exp(sink) + sum_j exp(s_ij)), s_ij = scale * q_i . k_j, over the
    keys i - window < j <= i (window 0: j <= i), i and j positions in the sequence.

    q [T, heads, D]; query_start int [S + 1], context_lens int [S] (keys with this step's, which the cache holds
    already); sinks [heads], one logit per head that is neither scaled nor has a value. Head h reads KV head
    h // (heads / kv_heads). Returns fp32 [T, heads, D], zeros behind query_start[S].
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_start.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        first_position = context - (end - begin)
        if first_position < 0:
            raise ValueError(f"sequence {sequence} has {end - begin} queries but a context of {context} keys")
        for tile in range(begin, end, _QUERY_TILE):
            stop = min(tile + _QUERY_TILE, end)
            low = first_position + tile - begin  # position of the tile's first query
            high = first_position + stop - begin
            first_key = max(0, low - window + 1) if window else 0
            keys, values = kv.read(sequence, first_key, high)
            out[tile:stop] = _tile(q[tile:stop], keys, values, low - first_key, sinks, window, scale, inner)
    return out


def _tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    inner: Round,
) -> torch.Tensor:
    """Attention of q [m, heads, D] over keys, values fp64 [kv_heads, n, D]; query 0 stands at key `offset`."""
    m, heads, head_dim = q.shape
    kv_heads, n, _ = keys.shape
    group = heads // kv_heads
    wide = q.to(torch.float64).view(m, kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, m, D]
    scores = (wide.reshape(kv_heads, group * m, head_dim) @ keys.transpose(1, 2)).view(kv_heads, group, m, n)
    scores = inner(inner(scores) * scale)
    if m > 1:
        query = torch.arange(offset, offset + m, device=q.device).unsqueeze(1)
        key = torch.arange(n, device=q.device)
        hidden = key > query if not window else (key > query) | (key <= query - window)
        scores = scores.masked_fill(hidden, float("-inf"))
    sink = sinks.to(torch.float64).view(kv_heads, group, 1, 1)
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = (scores - top).exp()
    total = weights.sum(dim=-1, keepdim=True) + (sink - top).exp()
    weights = inner(weights / total)
    mixed = (weights.view(kv_heads, group * m, n) @ values).view(kv_heads, group, m, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(m, heads, head_dim).to(torch.float32)


def attention_decode(
    q: torch.Tensor,
    kv: PagedKv,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    *,
    window: int,
    scale: float,
    inner: Round = keep,
) -> torch.Tensor:
    """attention_prefill for T / S new tokens in every sequence; context_len 0 marks padding and gives zeros.

    q [T, heads, D]; context_lens int [S]. Returns fp32 [T, heads, D]. Raises ValueError when S does not divide T.
    """
    sequences = len(context_lens)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    if len(q) == 0:
        return out
    if sequences == 0 or len(q) % sequences:
        raise ValueError(f"{len(q)} queries are not the same number for each of {sequences} sequences")
    each = len(q) // sequences
    for sequence, context in enumerate(context_lens.tolist()):
        if context == 0:
            continue
        first_query = context - each
        if first_query < 0:
            raise ValueError(f"sequence {sequence} has {each} queries but a context of {context} keys")
        first_key = max(0, first_query - window + 1) if window else 0
        keys, values = kv.read(sequence, first_key, context)
        rows = slice(sequence * each, (sequence + 1) * each)
        out[rows] = _tile(q[rows], keys, values, first_query - first_key, sinks, window, scale, inner)
    return out
