"""Whether a request can be served at all: one pure check that names the value and the limit.

Invariant: a request that passes can be run to its end by an idle engine. Must not know the state of the scheduler.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gptoss_trt.runtime.engine.messages import IDS, ErrorCode, Prompt, Sampling, Submit

MAX_SEQUENCES = 128  # n of one request, OpenAI's limit
MAX_LOGPROBS = 100  # best tokens a position
MAX_PROMPT_LOGPROBS = 1 << 21  # entries in one Finished message
MAX_SEQUENCE_IDS = 1 << 17  # ids in all stop or bad sequences together


@dataclass(frozen=True)
class Limits:
    """What one engine can take. Counts of tokens; `guides`: whether guides are served."""

    vocab_size: int
    max_context: int
    kv_tokens: int  # tokens that the whole KV cache holds
    guides: bool = False


def refusal(submit: Submit, limits: Limits) -> tuple[ErrorCode, str] | None:
    """Why this request can never be served: (INVALID_ARGUMENT, reason); None when it can."""
    reason = next(_reasons(submit, limits), None)
    return None if reason is None else ("INVALID_ARGUMENT", reason)


def _reasons(submit: Submit, limits: Limits) -> Iterator[str]:
    yield from _length_reasons(submit, limits)
    yield from _id_reasons(submit, limits.vocab_size)
    yield from _sampling_reasons(submit.sampling)
    yield from _count_reasons(submit)
    if submit.guides and not limits.guides:
        guide = submit.guides[0]
        yield f"this engine serves no guided decoding; the request asks for a guide of kind {guide.kind!r}"


def _length_reasons(submit: Submit, limits: Limits) -> Iterator[str]:
    prompt = len(submit.token_ids)
    if not prompt:
        yield "the prompt is empty: it has 0 tokens"
    if submit.max_tokens <= 0:
        yield f"max_tokens is {submit.max_tokens}; it must be at least 1"
    if prompt + submit.max_tokens > limits.max_context:
        yield (
            f"prompt of {prompt} tokens + max_tokens {submit.max_tokens} = {prompt + submit.max_tokens}; "
            f"the context is {limits.max_context} tokens"
        )
    if prompt + submit.max_tokens > limits.kv_tokens:
        yield (
            f"prompt of {prompt} tokens + max_tokens {submit.max_tokens} = {prompt + submit.max_tokens}; "
            f"the KV cache of this engine holds {limits.kv_tokens} tokens"
        )
    if not 0 <= submit.min_tokens <= submit.max_tokens:
        yield f"min_tokens is {submit.min_tokens}; it must lie in 0..max_tokens, which is {submit.max_tokens}"


def _id_reasons(submit: Submit, vocab_size: int) -> Iterator[str]:
    sequences: dict[str, Prompt] = {
        "token_ids": submit.token_ids,
        "stop_ids": submit.stop_ids,
        "logit_bias": tuple(token for token, _ in submit.logit_bias),
        **{f"stop_sequences[{i}]": sequence for i, sequence in enumerate(submit.stop_sequences)},
        **{f"bad_sequences[{i}]": sequence for i, sequence in enumerate(submit.bad_sequences)},
    }
    for name, ids in sequences.items():
        if not ids:
            if "sequences" in name:
                yield f"{name} is empty"
            continue
        if _all_known(ids, vocab_size):
            continue
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            yield f"{name} holds the id {low if low < 0 else high}; ids lie in 0..{vocab_size - 1}"


def _all_known(ids: Prompt, vocab_size: int) -> bool:
    """Whether a look at an array shows that all its ids lie in the vocabulary; never for a tuple."""
    if not isinstance(ids, array) or ids.typecode != IDS:
        return False
    most = np.maximum.reduce(np.frombuffer(ids, np.uint32))  # a negative id is a very large one
    return bool(most < vocab_size)


def _sampling_reasons(sampling: Sampling) -> Iterator[str]:
    ranges = (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-3, 1e3),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
    )
    for name, low, high in ranges:
        value = getattr(sampling, name)
        if not low <= value <= high:  # false for NaN as well
            yield f"{name} is {value}; it must lie in {low}..{high}"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; it must be at least 0"
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 64:
        yield f"seed is {sampling.seed}; it must lie in 0..2**64 - 1"


def _count_reasons(submit: Submit) -> Iterator[str]:
    if not 1 <= submit.n <= MAX_SEQUENCES:
        yield f"n is {submit.n}; it must lie in 1..{MAX_SEQUENCES}"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(submit, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            yield f"{name} is {value}; it must lie in 0..{MAX_LOGPROBS}"
    entries = len(submit.token_ids) * ((submit.prompt_logprobs or 0) + 1)
    if submit.prompt_logprobs is not None and entries > MAX_PROMPT_LOGPROBS:
        yield f"prompt_logprobs would return {entries} entries; the limit is {MAX_PROMPT_LOGPROBS}"
    ids = sum(map(len, submit.stop_sequences)) + sum(map(len, submit.bad_sequences))
    if ids > MAX_SEQUENCE_IDS:
        yield f"stop and bad sequences hold {ids} ids; the limit is {MAX_SEQUENCE_IDS}"
    for token, bias in submit.logit_bias:
        if not math.isfinite(bias):
            yield f"logit_bias of id {token} is {bias}; it must be finite"
    if submit.deadline_ms is not None and submit.deadline_ms <= 0:
        yield f"deadline_ms is {submit.deadline_ms}; it must be at least 1"
