"""feed: what a decode step reads, from pinned memory of the host, and its tokens, from there or from the step before.

A kernel and no copy: between two kernels of a stream the card waits for less than between a kernel and its copy engine.
The first of a step, so it is launched without `DEPENDENT` (dependent.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
ROWS = 256


@triton.jit
def _feed_kernel(  # type: ignore[no-untyped-def]
    host, drawn, source_at, memory, token_ids, words, rows, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    program = tl.program_id(0)
    word = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + word, tl.load(host + word, mask=word < words, volatile=True), mask=word < words)
    row = program * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    source = tl.load(host + source_at + row, mask=inside, other=-1, volatile=True)
    given = tl.load(host + row, mask=inside, other=0, volatile=True)
    taken = tl.load(drawn + source, mask=inside & (source >= 0), other=0)
    tl.store(token_ids + row, tl.where(source >= 0, taken, given), mask=inside)


def feed(
    host: torch.Tensor, drawn: torch.Tensor, source_at: int, memory: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """The op of that name; see ops/schemas.py."""
    words, rows = len(host), len(token_ids)
    grid = (max(triton.cdiv(words, BLOCK), triton.cdiv(rows, ROWS)),)
    _feed_kernel[grid](host, drawn, source_at, memory, token_ids, words, rows, BLOCK=BLOCK, ROWS=ROWS, num_warps=8)
