"""What a sequence's tokens become on the wire: the tensors of its responses, for token and text models.

Invariant: over all responses of a sequence nothing is lost, doubled or out of order, whatever the chunking; the last
one carries finish_reason. Tested without a server. Must not know Triton's Python module, sockets or threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.runtime.engine.messages import Finished, FinishReason, Prompt, Tokens, Usage
from gptoss_trt.runtime.harmony import StopMatcher
from gptoss_trt.runtime.triton_models.generation import Wanted

Arrays = dict[str, NDArray[Any]]
NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)


class Answer(Protocol):
    """One (prompt, sequence) of a request, on its way to the client."""

    def push(self, tokens: Tokens) -> bool:
        """Takes new tokens. True: the answer is complete, and the engine need not go on."""

    def finish(self, end: Finished) -> None:
        """The engine has ended the sequence."""

    def take(self) -> Arrays | None:
        """The tensors of one response with all that may be said now; None when there is nothing to say yet."""


@dataclass(frozen=True)
class Place:
    """Where a sequence belongs in its Triton request."""

    batch_index: int
    sequence_index: int


class Results:
    """The outputs that token and text models share: counters [1, 1], log-probabilities [1, 1] and [1, 1, length]."""

    def __init__(self, place: Place, want: Wanted, prompt_tokens: int) -> None:
        self._place = place
        self._want = want
        self._prompt_tokens = prompt_tokens
        self._logprobs: list[float] = []
        self._cumulated = 0.0
        self.output_tokens = 0
        self.reason: FinishReason | None = None
        self._usage = NO_USAGE

    def push(self, tokens: Tokens) -> None:
        self.output_tokens += len(tokens.token_ids)
        if tokens.logprobs is not None:
            fresh = [entry.logprob for entry in tokens.logprobs]
            self._logprobs += fresh
            self._cumulated += sum(fresh)

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        self.reason, self._usage = reason, usage

    def take(self) -> Arrays:
        """The shared outputs of the next response; its log-probabilities are those since the last one."""
        arrays: Arrays = {
            "batch_index": _int32(self._place.batch_index),
            "sequence_index": _int32(self._place.sequence_index),
        }
        if self._want.log_probs:
            arrays["cum_log_probs"] = np.array([[self._cumulated]], dtype=np.float32)
            arrays["output_log_probs"] = np.array([[self._logprobs]], dtype=np.float32).reshape(1, 1, -1)
            self._logprobs = []
        if self._want.num_input_tokens:
            arrays["num_input_tokens"] = _int32(self._prompt_tokens)
        if self._want.num_output_tokens:
            arrays["num_output_tokens"] = _int32(self.output_tokens)
        if self._want.perf_metrics:
            arrays.update(_perf_metrics(self._usage))
        if self.reason is not None:
            arrays["finish_reason"] = np.array([self.reason.encode()], dtype=np.object_)
        return arrays


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)


def _perf_metrics(usage: Usage) -> Mapping[str, NDArray[Any]]:
    """Zeros until the sequence has ended: clients read these tensors from every response."""
    times = {
        "arrival_time_ns": usage.arrival_ns,
        "first_scheduled_time_ns": usage.first_scheduled_ns,
        "first_token_time_ns": usage.first_token_ns,
        "last_token_time_ns": usage.last_token_ns,
    }
    rate = usage.accepted_draft_tokens / usage.draft_tokens if usage.draft_tokens else 0.0
    return {
        "kv_cache_alloc_new_blocks": _int32(usage.kv_new_blocks),
        "kv_cache_reused_blocks": _int32(usage.kv_reused_blocks),
        "kv_cache_alloc_total_blocks": _int32(usage.kv_total_blocks),
        **{name: np.array([[value]], dtype=np.int64) for name, value in times.items()},
        "acceptance_rate": np.array([[rate]], dtype=np.float32),
        "total_accepted_draft_tokens": _int32(usage.accepted_draft_tokens),
        "total_draft_tokens": _int32(usage.draft_tokens),
    }


class TokenAnswer:
    """An answer of `tensorrt_llm`: output_ids [1, 1, length] and sequence_length [1, 1], the length in this response.

    Streaming: each response has the new tokens. Else one response, which begins with the prompt unless excluded.
    """

    def __init__(self, place: Place, want: Wanted, prompt: Prompt) -> None:
        self._want = want
        self._results = Results(place, want, len(prompt))
        self._fresh: list[int] = [] if want.streaming or want.exclude_input else list(prompt)

    def push(self, tokens: Tokens) -> bool:
        self._results.push(tokens)
        self._fresh += tokens.token_ids
        return False

    def finish(self, end: Finished) -> None:
        self._results.finish(end.reason, end.usage)

    def take(self) -> Arrays | None:
        if self._results.reason is None and not (self._want.streaming and self._fresh):
            return None
        ids, self._fresh = self._fresh, []
        arrays: Arrays = {
            "output_ids": np.array([[ids]], dtype=np.int32).reshape(1, 1, -1),
            "sequence_length": _int32(len(ids)),
        }
        return {**arrays, **self._results.take()}


class Decoder(Protocol):
    """Ids to text: `TextStream`, or the final channel of a Harmony answer."""

    def push(self, token_ids: tuple[int, ...]) -> str: ...

    def finish(self) -> str: ...


class TextAnswer:
    """An answer of `ensemble` and `tensorrt_llm_bls`: text_output [1]. Whole characters only; stop words never show.

    `prompt_text` begins a non-streaming answer. `stop_ids` are dropped where the engine emitted them.
    """

    def __init__(
        self,
        results: Results,
        decoder: Decoder,
        *,
        streaming: bool,
        prompt_text: str,
        stop_words: list[str],
        stop_ids: tuple[int, ...],
    ) -> None:
        self._results = results
        self._decoder = decoder
        self._streaming = streaming
        self._text = "" if streaming else prompt_text
        self._stop = StopMatcher(stop_words)
        self._has_stop_words = bool(stop_words)
        self._stop_ids = frozenset(stop_ids)
        self._complete = False

    def push(self, tokens: Tokens) -> bool:
        for piece in self._pieces(tokens):
            if self._complete:  # counts and log-probabilities end with the token that completed the stop word
                break
            self._results.push(piece)
            self._show(self._decoder.push(tuple(i for i in piece.token_ids if i not in self._stop_ids)))
        return self._complete

    def _pieces(self, tokens: Tokens) -> Iterable[Tokens]:
        """One by one where a stop word may end the answer between two tokens."""
        if not self._has_stop_words:
            return (tokens,)
        logprobs = tokens.logprobs
        return (
            replace(tokens, token_ids=(token_id,), logprobs=None if logprobs is None else (logprobs[index],))
            for index, token_id in enumerate(tokens.token_ids)
        )

    def _show(self, text: str) -> None:
        visible, matched = self._stop.push(text)
        self._text += visible
        self._complete = matched is not None

    def finish(self, end: Finished) -> None:
        if not self._complete:
            self._show(self._decoder.finish())
            self._text += "" if self._complete else self._stop.finish()
        self._results.finish("stop" if self._complete else end.reason, end.usage)

    def take(self) -> Arrays | None:
        if self._results.reason is None and not (self._streaming and self._text):
            return None
        text, self._text = self._text, ""
        return {"text_output": np.array([text.encode()], dtype=np.object_), **self._results.take()}
