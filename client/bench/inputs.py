"""Input files for perf_analyzer (`--input-data`): requests of a workload as its JSON.

Invariant: names are those of the wire contract, shapes leave the batch axis out (perf_analyzer adds it). Must not know
what perf_analyzer does with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gptoss_trt.client.bench.workload import Request
from gptoss_trt.client.protocol import END_ID_NEVER, MODELS
from gptoss_trt.client.requests import Sampling, Values, chat_values, text_values, token_values


def input_data(model: str, requests: Iterator[Request], count: int, *, streaming: bool) -> dict[str, Any]:
    """The content of an input file for `count` requests. Raw models write all tokens asked for (end_id -1)."""
    never_end = Sampling(end_id=END_ID_NEVER)
    entries = []
    for request in itertools.islice(requests, count):
        if model == "tensorrt_llm":
            values = token_values(request.input_ids or (), request.max_tokens, never_end, stream=streaming)
        elif model == "chat":
            values = chat_values(chat_body(request, streaming), stream=streaming)
        else:
            values = text_values(request.prompt or "", request.max_tokens, never_end, stream=streaming)
        entries.append(entry(model, values))
    return {"data": entries}


def chat_body(request: Request, streaming: bool) -> dict[str, Any]:
    """The /v1/chat/completions body of a chat request; a stream ends with its usage."""
    body = {"model": "gpt-oss", "messages": list(request.messages or ()), "max_completion_tokens": request.max_tokens}
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if streaming else body


def entry(model: str, values: Values) -> dict[str, Any]:
    """One request: {"name": {"content": flat list, "shape": dims without the batch axis}}."""
    contract = MODELS[model]
    result = {}
    for name, value in values.items():
        contract.input(name)
        array = np.asarray(value if np.ndim(value) else [value], dtype=object)
        result[name] = {"content": array.ravel().tolist(), "shape": list(array.shape)}
    return result
