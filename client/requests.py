"""What a caller can ask for, as values by wire name: text, tokens or a chat body.

Invariant: a field left at None is not sent, so the server's own default holds. Must not know a transport, nor the
types and shapes of tensors (client/tensors.py has them from client/protocol.py).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Unset top_k and top_p together are greedy on these models, whatever the temperature."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    end_id: int | None = None
    num_return_sequences: int | None = None

    def values(self, *, tokens: bool) -> Values:
        """Set fields by wire name; the token model calls two of them `runtime_*`."""
        names = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"} if tokens else {}
        return {names.get(name, name): value for name, value in vars(self).items() if value is not None}


GREEDY = Sampling()


@dataclass(frozen=True)
class Call:
    """One request to one Triton model: values by tensor name, an id, and seconds until it is given up (None: never)."""

    model: str
    values: Values
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    timeout_s: float | None = None


def text_values(
    prompt: str,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stream: bool,
    stop_words: Sequence[str] = (),
    bad_words: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Values:
    """Inputs of `ensemble` or `tensorrt_llm_bls`; `extra` adds tensors by name. Token counts are always asked for."""
    values: Values = {
        "text_input": prompt,
        "max_tokens": max_tokens,
        "stream": stream,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        **sampling.values(tokens=False),
    }
    if stop_words:
        values["stop_words"] = list(stop_words)
    if bad_words:
        values["bad_words"] = list(bad_words)
    return {**values, **(extra or {})}


def token_values(
    input_ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stream: bool,
    stop_sequences: Sequence[Sequence[int]] = (),
    bad_sequences: Sequence[Sequence[int]] = (),
    extra: Mapping[str, Any] | None = None,
) -> Values:
    """Inputs of `tensorrt_llm`; `extra` adds tensors by name. Token counts are always asked for."""
    values: Values = {
        "input_ids": list(input_ids),
        "input_lengths": len(input_ids),
        "request_output_len": max_tokens,
        "streaming": stream,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        **sampling.values(tokens=True),
    }
    if stop_sequences:
        values["stop_words_list"] = word_list(stop_sequences)
    if bad_sequences:
        values["bad_words_list"] = word_list(bad_sequences)
    return {**values, **(extra or {})}


def chat_values(body: Mapping[str, Any], *, stream: bool) -> Values:
    """Inputs of `chat` and `completions`: the body of the OpenAI route, sent as it is."""
    return {"request": json.dumps(body, ensure_ascii=False), "stream": stream}


def word_list(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token sequences as the wire's [2, length]: all ids one after another, and their end offsets padded with -1.

    Raises ValueError for an empty sequence, which could never match.
    """
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("an empty token sequence cannot stop or be forbidden")
    ids = [token for sequence in sequences for token in sequence]
    ends = [sum(len(sequence) for sequence in sequences[: index + 1]) for index in range(len(sequences))]
    return [ids, ends + [-1] * (len(ids) - len(ends))]
