"""Verification of drafts: the tokens that would have come one by one, found from the logits of all of them at once.

Invariant: the token at a position is chosen as without speculation, from logits that saw the tokens before it, with
that position's own random number, filters and penalties, and a draft only says whether the next logits are of use: they
are while the chosen tokens equal the draft. So output is the same token for token, seeded sampling included, and the
distribution with it. Must not know blocks, plans or how drafts were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import fields

import torch

from gptoss_trt.runtime.engine.sequence import Sequence, end_reason
from gptoss_trt.runtime.engine.step_plan import Outcome, Work
from gptoss_trt.runtime.model.batch import StepBatch

Choose = Callable[[torch.Tensor, list[Sequence]], list[Outcome]]
"""The Sampler's choice of a token for each row of logits."""


@contextmanager
def drafted(works: Items[Work]) -> Iterator[None]:
    """While it holds, each sequence's tokens end with its work's draft, as the step's batch needs them."""
    for work in works:
        work.sequence.tokens.extend(work.draft)
    try:
        yield
    finally:
        for work in works:
            if work.draft:
                _cut(work.sequence, work.start + 1)


def choose_by_round(works: Items[Work], first_rows: Items[int], logits: torch.Tensor, choose: Choose) -> list[Outcome]:
    """The outcome of each sampling work. `first_rows`: the row of `logits` ([R, vocabulary]) of each one's first token
    to choose, those of its draft behind it; rows that were chosen from may be overwritten.

    One call of `choose` for the first token of all, one for the second of those whose first was drafted, and so on:
    each sees the tokens before it in the sequence.
    """
    chosen: list[list[Outcome]] = [[] for _ in works]
    ends = [len(work.sequence.tokens) for work in works]
    active = list(range(len(works)))
    try:
        while active:
            rows = [first_rows[i] + len(chosen[i]) for i in active]
            part = logits if rows == list(range(len(logits))) else logits[rows]
            outcomes = choose(part, [works[i].sequence for i in active])
            for i, outcome in zip(active, outcomes, strict=True):
                chosen[i].append(outcome)
            active = [i for i in active if _goes_on(works[i], chosen[i])]
    finally:
        for work, end in zip(works, ends, strict=True):
            _cut(work.sequence, end)
    return [joined(outcomes) for outcomes in chosen]


def choose_at_once(work: Work, tokens: Items[Outcome]) -> Outcome:
    """The outcome of a work from `tokens`, chosen for its rows each: for sequences whose choices depend on nothing but
    the logits and the position."""
    end = len(work.sequence.tokens)
    chosen: list[Outcome] = []
    for outcome in tokens:
        chosen.append(outcome)
        if not _goes_on(work, chosen):
            break
    _cut(work.sequence, end)
    return joined(chosen)


def joined(outcomes: list[Outcome]) -> Outcome:
    """The outcomes of successive tokens as one: the first, with the others following; a failure is that of all."""
    failed = next((outcome for outcome in outcomes if outcome.failure is not None), None)
    if failed is not None:
        return Outcome(failure=failed.failure, code=failed.code)
    return outcomes[0]._replace(following=tuple(outcomes[1:]))


def _goes_on(work: Work, chosen: list[Outcome]) -> bool:
    """Whether the logits behind the last chosen token are of use; if so the token stands in the sequence."""
    place, token = len(chosen) - 1, chosen[-1].token
    if chosen[-1].failure is not None or token is None or place >= len(work.draft) or work.draft[place] != token:
        return False
    work.sequence.tokens.append(token)
    return end_reason(work.sequence) is None


def _cut(sequence: Sequence, length: int) -> None:
    del sequence.tokens[length:]


def is_verification(works: Items[Work]) -> bool:
    """Whether a step is a decode step but for drafts."""
    return any(work.draft for work in works) and all(
        work.count == work.logits == 1 + len(work.draft) and work.samples for work in works
    )


def one_token_rows(batch: StepBatch, block_tokens: int, window: int) -> StepBatch:
    """The batch with a sequence of one token for each of its tokens, so that a step of several tokens a sequence is a
    decode step: keys of all are written before any is read, and a row reads no further than its own position.

    Batches in host memory whose tokens all want logits. `window`: tokens that a windowed layer sees.
    """
    counts = batch.query_start.diff()
    positions = batch.positions
    rows = torch.arange(len(positions), dtype=torch.int32)
    visible = (positions - window + 1).clamp(min=0).div(block_tokens, rounding_mode="floor")
    held = batch.window_first_block.repeat_interleave(counts)
    width = int((positions.div(block_tokens, rounding_mode="floor") - visible).max()) + 1
    columns = (visible - held)[:, None] + torch.arange(width)
    table = batch.window_blocks.repeat_interleave(counts, 0)
    missing = columns >= table.shape[1]
    windowed = table.gather(1, columns.clamp(max=table.shape[1] - 1).long()).masked_fill(missing, -1)
    changed = {
        "query_start": torch.arange(len(positions) + 1, dtype=torch.int32),
        "context_lens": positions + 1,
        "full_blocks": batch.full_blocks.repeat_interleave(counts, 0),
        "window_blocks": windowed,
        "window_first_block": visible.to(torch.int32),
        "logits_rows": rows,
    }
    return StepBatch(**{field.name: changed.get(field.name, getattr(batch, field.name)) for field in fields(StepBatch)})
