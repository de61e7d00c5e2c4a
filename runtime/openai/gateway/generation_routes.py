"""/v1/chat/completions and /v1/completions: bodies to the Triton models, their objects back.

Invariant: the models decide what a body means; here a body is only checked for what concerns the gateway (JSON, the
model's name, `stream`). Must not know Harmony.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.bodies import read_object
from gptoss_trt.runtime.openai.gateway.streaming import ERROR_BEGIN, event_stream, whole_object
from gptoss_trt.runtime.openai.gateway.triton import error_of_text

router = APIRouter()
# A chunk that holds this outside a string has the usage; inside a JSON string the quote would be escaped.
_USAGE = b'"usage":{'


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _generate(request, request.app.state.options.chat_model)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _generate(request, request.app.state.options.completions_model)


async def _generate(request: Request, model: str) -> Response:
    body, data = await read_object(request)
    name = served_name(request, body)
    if body.get("model") != name:
        data = json.dumps({**body, "model": name}).encode()
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise RequestError(400, "stream", f"stream is {stream!r}; allowed: true, false", "invalid_value")
    answer = request.app.state.models.ask(model, data, stream=stream, request_id=request.state.request_id)
    if not stream:
        text = await whole_object(request, answer)
        note_usage(request, json.loads(text)["usage"])
        return Response(text, media_type="application/json")
    asked = stream_asks_usage(body)
    return await event_stream(request, answer, lambda batches: _chunks(request, batches, asked))


def served_name(request: Request, body: dict[str, Any]) -> str:
    """The model that a body names, or the first of those served. Raises RequestError 404."""
    names = request.app.state.options.served_model_name
    name = body.get("model")
    if name is None or name == "":
        return str(names[0])
    if name not in names:
        message = f"the model {name!r} is not served here; served: {', '.join(names)}"
        raise RequestError(404, "model", message, "model_not_found")
    return str(name)


def stream_asks_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def note_usage(request: Request, usage: dict[str, Any]) -> None:
    """Counts an answer's tokens; the engine is alive."""
    state = request.app.state
    state.readiness.alive()
    state.metrics.count("prompt_tokens", usage["prompt_tokens"])
    state.metrics.count("completion_tokens", usage["completion_tokens"])


async def _chunks(request: Request, batches: AsyncIterator[list[bytes]], usage_asked: bool) -> AsyncIterator[bytes]:
    """Chunks as they came, but for the usage in the last one, which the model always gives and not everybody asks."""
    async for texts in batches:
        if texts[0].startswith(ERROR_BEGIN):
            raise error_of_text(texts[0])
        if _USAGE in texts[-1]:
            last = json.loads(texts[-1])
            note_usage(request, last["usage"])
            if not usage_asked:
                del last["usage"]
                texts[-1] = json.dumps(last, ensure_ascii=False, separators=(",", ":")).encode()
        yield b"".join([b"data: " + text + b"\n\n" for text in texts])
