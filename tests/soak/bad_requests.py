"""Requests that must be refused: HTTP bodies that are no request at all, and requests with impossible values.

Invariant: none of these can be answered; each must get an error. Must not know the engine.
"""

from __future__ import annotations

import json
import random

TOKENS = {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 5}
TEXT = {"text_input": "hello", "max_tokens": 5}
ASK = {"model": "x", "messages": [{"role": "user", "content": "hello"}]}


def _of(model: str, values: object) -> tuple[str, bytes]:
    return model, json.dumps(values).encode()


def _chat(body: object) -> tuple[str, bytes]:
    return _of("chat", {"request": json.dumps(body), "stream": False})


BAD: tuple[tuple[str, bytes], ...] = (
    ("ensemble", b""),
    ("ensemble", b"{"),
    ("ensemble", b"[1, 2]"),
    ("ensemble", b"\xff\xfe\x00"),
    ("tensorrt_llm", b'{"input_ids": ' + b"[" * 2000),
    _of("tensorrt_llm", {**TOKENS, "input_ids": "text"}),
    _of("tensorrt_llm", {**TOKENS, "input_lengths": 99}),
    _of("tensorrt_llm", {**TOKENS, "request_output_len": -1}),
    _of("tensorrt_llm", {**TOKENS, "input_ids": [21, -1]}),
    _of("tensorrt_llm", {**TOKENS, "beam_width": 4}),
    _of("tensorrt_llm", {"input_ids": [21]}),
    _of("ensemble", {**TEXT, "max_tokens": 0}),
    _of("ensemble", {**TEXT, "max_tokens": 2**31 - 1}),
    _of("ensemble", {**TEXT, "top_p": 7.5}),
    _of("ensemble", {"max_tokens": 5}),
    _of("chat", {"request": "{not json", "stream": False}),
    _of("chat", {"request": "[]", "stream": False}),
    _chat({**ASK, "messages": []}),
    _chat({**ASK, "messages": [{"role": "wizard", "content": "x"}]}),
    _chat({**ASK, "temperature": "hot"}),
    _chat({**ASK, "max_tokens": -3}),
    _chat({**ASK, "tools": [{"type": "function"}]}),
    ("no_such_model", b"{}"),
)


def draw(generator: random.Random) -> tuple[str, bytes]:
    """A model's name and the body of a POST to its /generate."""
    return generator.choice(BAD)
