"""Rotation of q and k, and where this step's k and v go in the paged cache.

Invariant: a token's slot is its block times block_tokens plus its place in the block; slot -1 stores nothing.
"""

from __future__ import annotations

import torch

from gptoss_trt.reference.rounding import Round, keep

E4M3_MAX = 448.0


def kv_slots(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    first_block: torch.Tensor | None,
    block_tokens: int,
) -> torch.Tensor:
    """block_table[s, position // block_tokens - first_block[s]] * block_tokens + position % block_tokens.

    positions int [T]; query_start int [S + 1]; block_table int [S, B]; first_block int [S] or None. Returns int32 [T],
    -1 for tokens behind query_start[S]. Raises ValueError when a token's block is not in the table (outside or -1).
    """
    slots = torch.full_like(positions, -1, dtype=torch.int32)
    starts = query_start.long()
    real = int(starts[-1])
    if real == 0:
        return slots
    position = positions[:real].long()
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1, device=positions.device), starts.diff())
    column = position // block_tokens
    if first_block is not None:
        column = column - first_block.long()[sequence]
    outside = (column < 0) | (column >= block_table.shape[1])
    block = block_table.long()[sequence, column.clamp(0, block_table.shape[1] - 1)].masked_fill(outside, -1)
    if bool((block < 0).any()):
        token = int((block < 0).nonzero()[0])
        raise ValueError(
            f"token {token} of sequence {int(sequence[token])} at position {int(position[token])} has no KV block: "
            f"entry {int(column[token])} of {block_table.shape[1]}"
        )
    slots[:real] = (block * block_tokens + position % block_tokens).to(torch.int32)
    return slots


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inner: Round = keep) -> torch.Tensor:
    """Halves, not pairs: (a cos - b sin, b cos + a sin) for the halves a, b of the last dimension.

    x [T, heads, D]; cos_sin fp32 [T, D] of each token's position. Returns fp32 [T, heads, D].
    """
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = inner(cos_sin).unsqueeze(1).chunk(2, dim=-1)
    rotated_first = inner(inner(first * cos) - inner(second * sin))
    rotated_second = inner(inner(second * cos) + inner(first * sin))
    return torch.cat((rotated_first, rotated_second), dim=-1)


def split_rotate(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, heads: int, kv_heads: int, inner: Round = keep
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k rotated, v as it is: qkv [T, (heads + 2 kv_heads) * D] -> fp32 [T, heads, D], 2 x [T, kv_heads, D].

    cos_sin is the whole table [max position, D]. Raises ValueError for a position outside it.
    """
    head_dim = cos_sin.shape[1]
    if len(positions) and (int(positions.max()) >= len(cos_sin) or int(positions.min()) < 0):
        raise ValueError(
            f"positions {int(positions.min())} to {int(positions.max())} are outside the rope table of {len(cos_sin)}"
        )
    by_head = qkv.to(torch.float32).view(len(qkv), heads + 2 * kv_heads, head_dim)
    turned = rotate(by_head[:, : heads + kv_heads], cos_sin[positions.long()], inner)
    return turned[:, :heads], turned[:, heads:], by_head[:, heads + kv_heads :]


def store_kv(values: torch.Tensor, slots: torch.Tensor, scale: float, cache: torch.Tensor) -> None:
    """cache[slot] = values, mutating cache [blocks, kv_heads, block_tokens, D]; bf16 and wider as they are, e4m3 as
    saturate(values / scale). values [T, kv_heads, D]; slots int [T], -1 skipped."""
    block_tokens = cache.shape[2]
    kept = slots >= 0
    slot = slots[kept].long()
    rows = values[kept]
    if cache.dtype == torch.float8_e4m3fn:
        rows = (rows / scale).clamp(-E4M3_MAX, E4M3_MAX)
    view = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    view[slot // block_tokens, :, slot % block_tokens] = rows.to(cache.dtype).view(view.dtype)
