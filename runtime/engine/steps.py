"""Runs a step: the plan's work as one StepBatch, the forward pass, the tokens.

Invariant: a failure belongs to the requests that cause it. A step that raises is run again in halves down to the single
sequence (the keys and values it writes are the same each time); only a broken device ends the process. Must not know
the queue or sockets.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.plain_decode import DrawingModel, decode_plain, is_plain
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, Sampler, logprobs_of
from gptoss_trt.runtime.engine.scheduler import Outcome, StepPlan, Work
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
        batch = assemble(works, self._block_tokens, self._device)
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


def assemble(works: list[Work], block_tokens: int, device: str) -> StepBatch:
    """The batch of these works, in their order. Tables are cut to the blocks that this step reads or writes."""
    counts = [work.count for work in works]
    starts = np.concatenate(([0], np.cumsum(counts)))
    tokens = [token for work in works for token in work.sequence.tokens[work.start : work.start + work.count]]
    positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in works])
    contexts = [work.start + work.count for work in works]
    blocks = [-(-context // block_tokens) for context in contexts]
    tables = [work.sequence.table for work in works]
    full = _padded([table.full[:end] for table, end in zip(tables, blocks, strict=True)])
    window = _padded([t.window[: end - t.window_first] for t, end in zip(tables, blocks, strict=True)])
    rows = [np.arange(end - w.logits, end) for w, end in zip(works, starts[1:].tolist(), strict=True)]

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

    return StepBatch(
        token_ids=tensor(tokens),
        positions=tensor(positions),
        query_start=tensor(starts),
        context_lens=tensor(contexts),
        full_blocks=tensor(full),
        window_blocks=tensor(window),
        window_first_block=tensor([table.window_first for table in tables]),
        logits_rows=tensor(np.concatenate(rows)),
    )


def _padded(tables: list[list[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    padded = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


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
