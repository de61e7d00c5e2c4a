"""sample: one token a row of logits, in two kernels: what each block of the vocabulary holds, then block and column.

Logits are read once, and once more the one block that the token lies in. Blocks are small enough that one row keeps
the whole card busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait

BLOCK = 1024
LEAST_BLOCKS = 16  # a scan of fewer is no faster
NOT_FINITE = tl.constexpr(-1)


@triton.jit
def _best(values, columns, NONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(whether a value is NaN, the highest of the others, the lowest of its columns)."""
    number = (values >= 0) | (values < 0)
    clean = tl.where(number, values, float("-inf"))
    highest = tl.max(clean, axis=0)
    where = tl.min(tl.where(clean == highest, columns, NONE), axis=0)
    return tl.sum(tl.where(number, 0, 1), axis=0) > 0, highest, where


@triton.jit
def _weights(values, highest, divisor):  # type: ignore[no-untyped-def]
    """exp((value - highest) / divisor), 0 where highest is no number that can be taken away."""
    usable = (highest > float("-inf")) & (highest < float("inf"))
    return tl.where(usable, tl.exp((values - tl.where(usable, highest, 0.0)) / divisor), 0.0)


@triton.jit
def _blocks_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, highs, places, sums, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    row = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    release()
    wait()
    values = tl.load(logits + row.to(tl.int64) * V + columns, mask=columns < V, other=float("-inf"))
    broken, highest, where = _best(values, columns, V)
    heat = tl.load(temperature + row)
    weights = _weights(values, highest, tl.where(heat == 0, 1.0, heat))
    out = row * BLOCKS + block
    tl.store(highs + out, tl.where(broken, float("nan"), highest))
    tl.store(places + out, where)
    tl.store(sums + out, tl.sum(weights, axis=0))


@triton.jit
def _token_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, share, turn, highs, places, sums, tokens, fed, C,
    V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    release()
    wait()
    index = tl.arange(0, PADDED)
    inside = index < BLOCKS
    high = tl.load(highs + row * BLOCKS + index, mask=inside, other=float("-inf"))
    place = tl.load(places + row * BLOCKS + index, mask=inside, other=V)
    # All that needs no other is asked for at once: behind a reduction each load would be a trip of its own.
    sum_of_block = tl.load(sums + row * BLOCKS + index, mask=inside, other=0.0)
    heat = tl.load(temperature + row)
    wanted = tl.load(share + row)
    out = row
    if turn is not None:
        out += tl.load(turn) * C
    broken, highest, _ = _best(high, index, PADDED)
    best = tl.min(tl.where(high == highest, place, V), axis=0)
    finite = (highest > float("-inf")) & (highest < float("inf")) & (broken == 0)
    divisor = tl.where(heat == 0, 1.0, heat)

    weight = sum_of_block * _weights(high, highest, divisor)
    weight = tl.where(finite, weight, 0.0)
    running = tl.cumsum(weight, axis=0)
    total = tl.max(running, axis=0)
    target = wanted * total
    # Rounding may put the target on the total: then the first block that reaches it. Never a block that adds nothing.
    passes = ((running > target) | (running >= total)) & (weight > 0)
    block = tl.min(tl.where(passes, index, BLOCKS - 1), axis=0)
    before = tl.sum(tl.where(index == block, running - weight, 0.0), axis=0)

    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * V + columns, mask=columns < V, other=float("-inf"))
    column_weight = tl.where(finite, _weights(values, highest, divisor), 0.0)
    passes = (before + tl.cumsum(column_weight, axis=0) > target) & (column_weight > 0)
    drawn = tl.min(tl.where(passes, columns, V), axis=0)
    last = tl.max(tl.where(column_weight > 0, columns, -1), axis=0)
    drawn = tl.where(drawn < V, drawn, tl.where(last >= 0, last, best))
    token = tl.where(finite, tl.where(heat == 0, best, drawn), NOT_FINITE)
    tl.store(tokens + out, token)
    tl.store(fed + row, tl.maximum(token, 0))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    share: torch.Tensor,
    turn: torch.Tensor | None,
    tokens: torch.Tensor,
    fed: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py."""
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    blocks = triton.cdiv(vocabulary, BLOCK)
    highs = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    sums = torch.empty_like(highs)
    _blocks_kernel[(blocks, rows)](
        logits, temperature, highs, places, sums, V=vocabulary, BLOCKS=blocks, BLOCK=BLOCK, num_warps=4, **DEPENDENT
    )
    padded = max(LEAST_BLOCKS, triton.next_power_of_2(blocks))
    _token_kernel[(rows,)](
        logits, temperature, share, turn, highs, places, sums, tokens, fed, tokens.shape[1],
        V=vocabulary, BLOCKS=blocks, PADDED=padded, BLOCK=BLOCK, num_warps=4, **DEPENDENT,
    )  # fmt: skip
