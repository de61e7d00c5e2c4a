"""Runs a step: the plan's work as one StepBatch, the forward pass, the tokens.

Invariant: a failure belongs to the requests that cause it. A step that raises is run again in halves down to the single
sequence (the keys and values it writes are the same each time); only a broken device ends the process. Must not know
the queue or sockets.
"""

from __future__ import annotations

import itertools
import logging
from typing import Protocol

import numpy as np
import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.plain_decode import DrawingModel, decode_plain, is_plain
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, Sampler, logprobs_of
from gptoss_trt.runtime.engine.scheduler import Outcome, StepPlan, Work
from gptoss_trt.runtime.engine.table_rows import TableRows
from gptoss_trt.runtime.model.batch import StepBatch

log = logging.getLogger(__name__)


class Model(Protocol):
    """What the engine needs of a loaded model."""

    @property
    def config(self) -> ModelConfig: ...

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None: ...

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]: ...

    def forward(self, batch: StepBatch) -> torch.Tensor: ...


class StepRunner:
    """Runs plans on a model whose KV blocks hold `block_tokens` tokens; batches are made on `device`.

    A model that draws tokens itself (DrawingModel) does so in the steps that ask for nothing else.
    """

    def __init__(self, model: Model, sampler: Sampler, block_tokens: int, device: str) -> None:
        self._model = model
        self._drawing = model if isinstance(model, DrawingModel) else None
        self._sampler = sampler
        self._block_tokens = block_tokens
        self._device = device
        self._table_rows = (TableRows(), TableRows())

    def run(self, plan: StepPlan) -> list[Outcome]:
        """One outcome a work, in the plan's order."""
        return self._run(plan.work)

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
        batch = assemble(works, self._block_tokens, self._device, self._table_rows)
        if self._drawing is not None and is_plain(works):
            return decode_plain(self._drawing, batch, works)
        logits = self._model.forward(batch)
        ends = np.cumsum([work.logits for work in works]).tolist()
        prompts = [_prompt_part(logits[end - work.logits : end], work) for work, end in zip(works, ends, strict=True)]
        sampling = [(work, end - 1) for work, end in zip(works, ends, strict=True) if work.samples]
        rows = logits if len(sampling) == len(logits) else logits[[row for _, row in sampling]]
        chosen = iter(self._sampler.sample(rows, [work.sequence for work, _ in sampling]) if sampling else ())
        outcomes = []
        for work, prompt in zip(works, prompts, strict=True):
            outcome = next(chosen) if work.samples else Outcome()
            failure = outcome.failure or prompt.failure
            outcomes.append(Outcome(outcome.token, outcome.logprobs, prompt.prompt_logprobs, failure))
        return outcomes


def assemble(
    works: list[Work], block_tokens: int, device: str, known: tuple[TableRows, TableRows] | None = None
) -> StepBatch:
    """The batch of these works, in their order. Tables are cut to the blocks that this step reads or writes; `known`
    remembers the rows of the full and the window pool from step to step."""
    sequences = [work.sequence for work in works]
    begins = np.fromiter((work.start for work in works), np.int32, len(works))
    counts = np.fromiter((work.count for work in works), np.int32, len(works))
    contexts = begins + counts
    starts = np.zeros(len(works) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] == len(works) and counts.all():  # decode: one token each
        tokens = [work.sequence.tokens[work.start] for work in works]
        positions = begins
    else:
        tokens = [token for work in works for token in work.sequence.tokens[work.start : work.start + work.count]]
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(begins - starts[:-1], counts)
    blocks = (-(-contexts // block_tokens)).tolist()
    tables = [sequence.table for sequence in sequences]
    firsts = [table.window_first for table in tables]
    full_rows, window_rows = known or (TableRows(), TableRows())
    full = full_rows.padded(sequences, [table.full for table in tables], [0] * len(works), blocks)
    window = window_rows.padded(sequences, [table.window for table in tables], firsts, blocks)
    rows = [range(end - work.logits, end) for work, end in zip(works, starts[1:].tolist(), strict=True)]

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

    return StepBatch(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        query_start=tensor(starts),
        context_lens=tensor(contexts),
        full_blocks=tensor(full),
        window_blocks=tensor(window),
        window_first_block=tensor(firsts),
        logits_rows=tensor(list(itertools.chain.from_iterable(rows))),
    )


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
    return Outcome(prompt_logprobs=tuple(logprobs_of(logits[:count], targets, best)))


def _is_fatal(error: Exception) -> bool:
    """Whether the device is broken for good: after a CUDA error every further call fails."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
