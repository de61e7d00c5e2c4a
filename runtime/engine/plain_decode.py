"""Steps whose tokens the model draws itself, on its device: which steps those are, and what it is told to draw them.

Invariant: a token drawn there is the one that the Sampler would choose: same order of filters (none apply), same random
number. Must not know blocks or the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.runtime.engine.messages import Sampling, Submit
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, is_greedy, uniform
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.verify import choose_at_once
from gptoss_trt.runtime.engine.step_plan import Outcome, Work
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.draw import Draws


class Launched(Protocol):
    """A step that runs on the model's device."""

    def tokens(self) -> list[int]:
        """Waits for the step: a token for each row of its logits, -1 where they are not finite."""


@runtime_checkable
class DrawingModel(Protocol):
    """A model with steps that end with tokens: the best where temperature is 0, else the one whose cumulated
    probability passes the share. It takes batches in host memory. Two steps may be launched before the tokens of the
    first are asked for."""

    @property
    def most_draws(self) -> int:
        """Tokens that one step may draw."""

    def launch(self, batch: StepBatch, draws: Draws) -> Launched:
        """Starts a step that draws a token for each row of the batch's logits."""


class _Wish(NamedTuple):
    """What a request wants of its tokens, looked at once."""

    token_only: bool  # nothing but the next token, from unfiltered logits
    always: bool  # and that at every position
    unstoppable: int  # output tokens that no stop id may follow: that many are chosen by the Sampler
    temperature: float  # 0 when greedy


def is_drawn(works: Items[Work], most: int, *, drafts: bool = False) -> bool:
    """Whether the model can draw all tokens of a step: every work brings at most the next token of a sequence that
    wants no more than that, or with `drafts` one for each token of its draft too, and they are `most` or fewer."""
    draws = 0
    for work in works:
        if work.samples:
            rows = 1 + len(work.draft) if drafts else 1
            draws += rows
            if work.logits != rows or not _wants_token_only(work):
                return False
        elif work.logits:
            return False
    return draws <= most


def _wants_token_only(work: Work) -> bool:
    sequence = work.sequence
    wish = _wish(sequence.request)
    if wish.always or not wish.token_only:
        return wish.token_only
    position = work.start + work.count - len(work.draft) - sequence.prompt_tokens
    return position >= wish.unstoppable and not sequence.lacks_prompt_logprobs


def draws_of(works: Items[Work], source: NDArray[np.int32] | None) -> tuple[Draws, list[Sequence]]:
    """What a model is told for a step that `is_drawn`, and the sequence of each row that it draws; `source` as in
    Draws."""
    sequences, temperatures, shares = [], [], []
    for work in works:
        if work.samples:
            sequence = work.sequence
            request = sequence.request
            temperature = _wish(request).temperature
            last = work.start + work.count - sequence.prompt_tokens
            for position in range(last - len(work.draft), last + 1) if work.draft else (last,):
                sequences.append(sequence)
                temperatures.append(temperature)
                shares.append(uniform(request.seed, sequence.index, position) if temperature else 0.0)
    return Draws(np.array(temperatures, np.float32), np.array(shares, np.float32), source), sequences


def outcomes_of(works: Items[Work], tokens: Items[int]) -> list[Outcome]:
    """One outcome a work, in order; `tokens` of those that sample and of their drafts, -1 for logits that are not
    finite."""
    drawn = iter(tokens)
    return [_outcome_of(work, drawn) if work.samples else Outcome() for work in works]


def _outcome_of(work: Work, drawn: Iterator[int]) -> Outcome:
    first = _outcome(next(drawn))
    if not work.draft:
        return first
    return choose_at_once(work, [first, *(_outcome(next(drawn)) for _ in work.draft)])


def _outcome(token: int) -> Outcome:
    return Outcome(token) if token >= 0 else Outcome(failure=NOT_FINITE)


def _wish(request: Request) -> _Wish:
    memo = request.memo
    if not isinstance(memo, _Wish):
        submit = request.submit
        unstoppable = submit.min_tokens if submit.stop_ids else 0
        temperature = 0.0 if is_greedy(submit.sampling) else submit.sampling.temperature
        token_only = _is_unfiltered(submit)
        always = token_only and not unstoppable and submit.prompt_logprobs is None
        memo = request.memo = _Wish(token_only, always, unstoppable, temperature)
    return memo


def _is_unfiltered(submit: Submit) -> bool:
    extras = submit.logit_bias or submit.bad_sequences or submit.guides or submit.logprobs is not None
    return not extras and _is_temperature_only(submit.sampling)


def _is_temperature_only(sampling: Sampling) -> bool:
    penalised = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    filtered = sampling.top_k > 1 or sampling.top_p < 1.0 or sampling.min_p
    return not penalised and (is_greedy(sampling) or not filtered)
