"""Decode steps whose tokens the model draws itself, on its device: which steps those are, and their outcomes.

Invariant: a token drawn here is the one that the Sampler would choose: same order of filters (none apply), same random
number. Must not know blocks or the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from gptoss_trt.runtime.engine.messages import Sampling, Submit
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, is_greedy, uniform
from gptoss_trt.runtime.engine.scheduler import Outcome, Work
from gptoss_trt.runtime.model.batch import StepBatch


@runtime_checkable
class DrawingModel(Protocol):
    """A model with a decode step that ends with tokens; it takes batches in host memory."""

    def decode(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> list[int]:
        """The next token of each sequence, -1 where its logits are not finite: the best where temperature is 0, else
        the one whose cumulated probability passes `share`."""


def is_plain(works: Sequence[Work]) -> bool:
    """Whether every work is one token of a sequence that wants nothing but the next one."""
    return all(work.count == work.logits == 1 and work.samples and _wants_token_only(work) for work in works)


def decode_plain(model: DrawingModel, batch: StepBatch, works: Sequence[Work]) -> list[Outcome]:
    """Outcomes of a step that `is_plain`, in its order."""
    temperature = [0.0] * len(works)
    share = [0.0] * len(works)
    for row, work in enumerate(works):
        sequence = work.sequence
        request = sequence.request
        sampling = request.submit.sampling
        if not is_greedy(sampling):
            temperature[row] = sampling.temperature
            share[row] = uniform(request.seed, sequence.index, sequence.output_tokens)
    tokens = model.decode(batch, temperature, share)
    return [Outcome(failure=NOT_FINITE) if token < 0 else Outcome(token) for token in tokens]


def _wants_token_only(work: Work) -> bool:
    sequence = work.sequence
    submit = sequence.request.submit
    bans_stops = bool(submit.stop_ids) and sequence.output_tokens < submit.min_tokens
    return not bans_stops and not sequence.lacks_prompt_logprobs and _is_unfiltered(submit)


def _is_unfiltered(submit: Submit) -> bool:
    extras = submit.logit_bias or submit.bad_sequences or submit.guides or submit.logprobs is not None
    return not extras and _is_temperature_only(submit.sampling)


def _is_temperature_only(sampling: Sampling) -> bool:
    penalised = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    filtered = sampling.top_k > 1 or sampling.top_p < 1.0 or sampling.min_p
    return not penalised and (is_greedy(sampling) or not filtered)
