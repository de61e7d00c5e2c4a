"""A step's batch: a piece of a prompt alone is put together as it is among others; awaited tokens are marked."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from gptoss_trt.runtime.engine.messages import IDS, Submit
from gptoss_trt.runtime.engine.sequence import BlockTable, Request, Sequence
from gptoss_trt.runtime.engine.step_plan import Work
from gptoss_trt.runtime.engine.steps import _take_awaited, assemble
from gptoss_trt.runtime.engine.table_rows import TableRows
from gptoss_trt.runtime.model.batch import StepBatch

BLOCK, WINDOW = 4, 10


def sequence(rng: random.Random, tokens: int, computed: int) -> Sequence:
    """With blocks for all its tokens, of the window's as many as a query behind `computed` sees."""
    ids = array(IDS, (rng.randrange(200_000) for _ in range(tokens)))
    one = Sequence(Request((0, "r"), Submit("r", ids, 9), 0, 0, 0, b""), 0, ids[:], computed=computed)
    blocks, first = -(-tokens // BLOCK), max(0, computed - WINDOW + 1) // BLOCK
    one.table = BlockTable(
        [rng.randrange(1000) for _ in range(blocks)], [rng.randrange(1000) for _ in range(blocks - first)], first
    )
    return one


def first_of(batch: StepBatch, count: int, logits: int) -> list[torch.Tensor]:
    """The parts of the first sequence, its tables without unused entries."""
    tables = [part[0][part[0] >= 0] for part in (batch.full_blocks, batch.window_blocks)]
    parts = (batch.context_lens[:1], batch.window_first_block[:1], batch.logits_rows[:logits])
    return [batch.token_ids[:count], batch.positions[:count], batch.query_start[:2], *tables, *parts]


@pytest.mark.parametrize("seed", range(20))
def test_a_lone_prompt_is_as_among_others(seed: int) -> None:
    rng = random.Random(seed)
    tokens = rng.randrange(20, 90)
    begin = rng.choice((0, 0, rng.randrange(tokens - 2)))
    count = rng.choice((tokens - begin, rng.randrange(2, tokens - begin + 1)))
    logits = rng.choice((0, 1, count))
    work = Work(sequence(rng, tokens, begin), begin, count, logits)
    other = Work(sequence(rng, 30, 29), 29, 1, 1)
    rows = TableRows(BLOCK, WINDOW)
    assemble([other], rows, "cpu")  # rows of others stand there
    alone = assemble([work], rows, "cpu")
    among = assemble([work, other], rows, "cpu")
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in vars(alone).values())
    assert len(alone.token_ids) == count and len(alone.logits_rows) == logits and len(alone.context_lens) == 1
    assert len(alone.query_start) == 2 and alone.full_blocks.shape == (1, -(-(begin + count) // BLOCK))
    for one, same in zip(first_of(alone, count, logits), first_of(among, count, logits), strict=True):
        assert torch.equal(one, same)


def test_a_token_that_nobody_draws_is_an_error() -> None:
    rng = random.Random(0)
    awaiting = sequence(rng, 12, 0)
    work = Work(awaiting, 0, 12, 1)
    batch = assemble([work], TableRows(BLOCK, WINDOW), "cpu")
    assert _take_awaited(batch, [work], None) is None
    del awaiting.tokens[11:]
    batch = assemble([work], TableRows(BLOCK, WINDOW), "cpu")
    assert batch.token_ids.tolist() == [*awaiting.tokens, -1]
    with pytest.raises(AssertionError, match="nobody launched"):
        _take_awaited(batch, [work], None)
