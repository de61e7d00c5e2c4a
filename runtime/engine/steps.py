"""Runs a step: the plan's work as one StepBatch, the forward pass, the tokens.

Invariant: a failure belongs to the requests that cause it. A step that raises is run again in halves down to the single
sequence (the keys and values it writes are the same each time); only a broken device ends the process. A step whose
tokens the model draws may be launched behind one that still runs; its inputs then are the tokens that one draws. Must
not know the queue or sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.messages import IdArray
from gptoss_trt.runtime.engine.plain_decode import DrawingModel, Launched, draws_of, is_drawn, outcomes_of
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, Sampler, logprobs_of
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.verify import choose_by_round, drafted, is_verification, one_token_rows
from gptoss_trt.runtime.engine.step_plan import Outcome, StepPlan, Work
from gptoss_trt.runtime.engine.table_rows import Ints, TableRows
from gptoss_trt.runtime.model.batch import StepBatch

log = logging.getLogger(__name__)

AWAITED = -1
Observer = Callable[[list[Work]], None]


class Model(Protocol):
    """What the engine needs of a loaded model."""

    @property
    def config(self) -> ModelConfig: ...

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None: ...

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]: ...

    def forward(self, batch: StepBatch) -> torch.Tensor: ...


@dataclass
class Flight:
    """A launched step: its plan, the model's handle, the sequence of each token that it draws."""

    plan: StepPlan
    launched: Launched
    draws: list[Sequence]


class StepRunner:
    """Runs plans on a model whose KV blocks hold `block_tokens` tokens; batches are made on `device`.

    A model that draws tokens itself (DrawingModel) does so in the steps that ask for nothing else. `observer` is shown
    the works of each forward pass behind it.
    """

    def __init__(
        self, model: Model, sampler: Sampler, block_tokens: int, device: str, observer: Observer | None = None
    ) -> None:
        self._model = model
        self._drawing = model if isinstance(model, DrawingModel) else None
        self._sampler = sampler
        self._device = device
        self._observer = observer
        self._block_tokens = block_tokens
        self._table_rows = TableRows(block_tokens, model.config.sliding_window)

    def launch(self, plan: StepPlan, before: Flight | None) -> Flight | None:
        """Starts a step behind `before`, which was launched last and is not collected yet. None, with nothing started,
        when it has no work, wants more than tokens that the model draws, or raises."""
        if self._drawing is None or not plan.work or not is_drawn(plan.work, self._drawing.most_draws):
            return None
        try:
            return self._launch(self._drawing, plan, before)
        except Exception as error:
            if _is_fatal(error):
                raise
            log.warning("a step of %d sequences was not launched: %s", len(plan.work), error)
            return None

    def collect(self, flight: Flight) -> list[Outcome]:
        """Waits for a step: one outcome a work, in the plan's order."""
        outcomes = outcomes_of(flight.plan.work, flight.launched.tokens())
        self._show(flight.plan.work)
        return outcomes

    def run(self, plan: StepPlan) -> list[Outcome]:
        """One outcome a work, in the plan's order. Nothing may be under way."""
        return self._run(plan.work)

    def _launch(self, model: DrawingModel, plan: StepPlan, before: Flight | None) -> Flight:
        batch = assemble(plan.work, self._table_rows, self._device)
        source = _take_awaited(batch, plan.work, before)
        draws, sequences = draws_of(plan.work, source)
        return Flight(plan, model.launch(batch, draws), sequences)

    def _run(self, works: list[Work]) -> list[Outcome]:
        try:
            with torch.inference_mode():
                return self._attempt(works)
        except Exception as error:
            if _is_fatal(error):
                raise
            names = ", ".join(work.sequence.request.submit.request_id for work in works)
            log.exception("a step of %d sequences failed (requests %s)", len(works), names)
            if len(works) == 1:
                return [Outcome(failure=f"the step of this request failed: {type(error).__name__}: {error}")]
        half = len(works) // 2
        return self._run(works[:half]) + self._run(works[half:])

    def _attempt(self, works: list[Work]) -> list[Outcome]:
        with drafted(works):
            batch = assemble(works, self._table_rows, self._device)
        if self._drawing is not None:
            if is_verification(works):
                batch = one_token_rows(batch, self._block_tokens, self._model.config.sliding_window)
            if is_drawn(works, self._drawing.most_draws, drafts=True):
                draws, _ = draws_of(works, None)
                outcomes = outcomes_of(works, self._drawing.launch(batch, draws).tokens())
                self._show(works)
                return outcomes
        logits = self._model.forward(batch)
        self._show(works)
        ends = np.cumsum([work.logits for work in works]).tolist()
        prompts = [_prompt_part(logits[end - work.logits : end], work) for work, end in zip(works, ends, strict=True)]
        sampling = [(work, end - 1 - len(work.draft)) for work, end in zip(works, ends, strict=True) if work.samples]
        rows = [row for _, row in sampling]
        chosen = iter(choose_by_round([work for work, _ in sampling], rows, logits, self._sampler.sample))
        outcomes = []
        for work, prompt in zip(works, prompts, strict=True):
            outcome = next(chosen) if work.samples else Outcome()
            failure = outcome.failure or prompt.failure
            outcomes.append(outcome._replace(prompt_logprobs=prompt.prompt_logprobs, failure=failure))
        return outcomes

    def _show(self, works: list[Work]) -> None:
        if self._observer is not None:
            self._observer(works)


def assemble(works: list[Work], rows: TableRows, device: str) -> StepBatch:
    """The batch of these works, in their order, with AWAITED in the place of each token that is not known yet. Tables
    are cut to the blocks that this step reads or writes and hold until the next call with these `rows`."""
    if len(works) == 1 and works[0].count > 1:
        return _moved(_lone_prompt(works[0], rows), device)
    sequences = [work.sequence for work in works]
    begins = np.array([work.start for work in works], np.int32)
    if all(work.count == 1 == work.logits for work in works):  # decode
        contexts = begins + 1
        starts = np.arange(len(works) + 1, dtype=np.int32)
        known = [_token(sequence.tokens, work.start) for sequence, work in zip(sequences, works, strict=True)]
        tokens = np.array(known, np.int32)
        positions, logits_rows = begins, starts[:-1]
    else:
        counts = np.array([work.count for work in works], np.int32)
        contexts = begins + counts
        starts = np.zeros(len(works) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        tokens = _tokens(works, starts.tolist())
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(begins - starts[:-1], counts)
        logits_rows = _last_rows(starts[1:], np.array([work.logits for work in works], np.int32))
    full, window, firsts = rows.of([sequence.table for sequence in sequences], begins, contexts)
    tables = np.ascontiguousarray(full), np.ascontiguousarray(window)
    return _moved((tokens, positions, starts, contexts, *tables, firsts, logits_rows), device)


def _lone_prompt(work: Work, rows: TableRows) -> tuple[Ints, ...]:
    """The fields of a batch that is one piece of one prompt. Nothing runs ahead of it as a rule, so that its first
    kernel waits for this, and for code and data that no cache has: few calls instead of none that depends on what was
    there before."""
    begin, end = work.start, work.start + work.count
    starts = np.array((0, work.count), np.int32)
    tokens = _tokens([work], [0, work.count])
    full, window, first = rows.row(work.sequence.table, begin, end)
    return (
        tokens,
        np.arange(begin, end, dtype=np.int32),
        starts,
        np.array((end,), np.int32),
        np.array((full,), np.int32),
        np.array((window,), np.int32),
        np.array((first,), np.int32),
        np.arange(work.count - work.logits, work.count, dtype=np.int32),
    )


def _moved(fields: tuple[Ints, ...], device: str) -> StepBatch:
    there = map(torch.from_numpy, fields)
    return StepBatch(*(there if device == "cpu" else (field.to(device) for field in there)))


def _token(tokens: IdArray, position: int) -> int:
    return tokens[position] if position < len(tokens) else AWAITED


def _tokens(works: list[Work], starts: list[int]) -> Ints:
    """The ids of all works, one behind the other from `starts` on."""
    tokens = np.empty(starts[-1], np.int32)
    for work, start in zip(works, starts, strict=False):
        known = memoryview(work.sequence.tokens)[work.start : work.start + work.count]
        end = start + len(known)
        tokens[start:end] = known
        tokens[end : start + work.count] = AWAITED  # one at most
    return tokens


def _last_rows(ends: Ints, counts: Ints) -> Ints:
    """The last counts[i] of the rows before ends[i], for each i."""
    before = np.cumsum(counts, dtype=np.int32)
    total = int(before[-1])
    return np.arange(total, dtype=np.int32) + np.repeat(ends - before, counts)


def _take_awaited(batch: StepBatch, works: list[Work], before: Flight | None) -> Ints | None:
    """Draws.source of a batch with awaited tokens, whose ids then are any that exist; None when all are known."""
    if before is None:
        missing = any(work.start + work.count > len(work.sequence.tokens) for work in works)
        assert not missing, "a token is awaited of a step that nobody launched"
        return None
    tokens = batch.token_ids.numpy()
    if tokens.min(initial=0) != AWAITED:
        return None
    awaited = tokens == AWAITED
    sequences = [work.sequence for work in works]
    if len(tokens) == len(works) and sequences == before.draws:  # the usual case: the same rows
        source = np.where(awaited, np.arange(len(works), dtype=np.int32), np.int32(-1))
    else:
        row_of = {sequence: row for row, sequence in enumerate(before.draws)}
        places = np.flatnonzero(awaited)
        owners = np.searchsorted(batch.query_start.numpy(), places, side="right") - 1
        source = np.full(len(tokens), -1, np.int32)
        source[places] = [row_of[sequences[owner]] for owner in owners.tolist()]
    tokens[awaited] = 0
    return source


def _prompt_part(logits: torch.Tensor, work: Work) -> Outcome:
    """Log-probabilities of the prompt tokens that the rows of `work` predict; nothing when they are not wanted."""
    sequence = work.sequence
    if not work.logits or not sequence.lacks_prompt_logprobs:
        return Outcome()
    count = min(work.start + work.count, sequence.prompt_tokens - 1) - work.start
    best = sequence.request.submit.prompt_logprobs
    if count <= 0 or best is None:
        return Outcome()
    if not bool(torch.isfinite(logits[:count].amax(-1)).all()):
        return Outcome(failure=NOT_FINITE)
    targets = sequence.tokens[work.start + 1 : work.start + 1 + count]
    return Outcome(prompt_logprobs=tuple(logprobs_of(logits[:count], targets.tolist(), best)))


def _is_fatal(error: Exception) -> bool:
    """Whether the device is broken for good: after a CUDA error every further call fails."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
