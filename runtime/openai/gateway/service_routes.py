"""Everything beside generation: models, health, readiness, version, metrics, tokens of a text and back.

Invariant: /health answers while the process lives, /ready only while requests can be served. Must not know gRPC.
"""

from __future__ import annotations

import asyncio
import datetime
import urllib.request
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from gptoss_trt import __version__
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai.chat_request import prompt_ids, read_chat
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.bodies import read_object
from gptoss_trt.runtime.openai.gateway.generation_routes import served_name
from gptoss_trt.runtime.openai.gateway.metrics import CONTENT_TYPE

router = APIRouter()
SCRAPE_TIMEOUT_S = 5.0
_TOKENIZE_ONLY = ("add_special_tokens", "return_token_strs", "add_generation_prompt", "continue_final_message")


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    reason = await request.app.state.readiness.reason_against()
    if reason:
        raise RequestError(503, None, f"not ready: {reason}", "unavailable")
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.text()
    if url := request.app.state.options.server_metrics_url:
        text += await asyncio.to_thread(_scrape, url)
    return PlainTextResponse(text, media_type=CONTENT_TYPE)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    length = await request.app.state.readiness.max_model_len()
    names = request.app.state.options.served_model_name
    return {"object": "list", "data": [_model(request, name, length) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    return _model(request, served_name(request, {"model": name}), await request.app.state.readiness.max_model_len())


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Tokens of `prompt`, or of the prompt that chat `messages` make."""
    body, _ = await read_object(request)
    served_name(request, body)
    ids = await asyncio.to_thread(_ids, {name: value for name, value in body.items() if name != "model"})
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": await request.app.state.readiness.max_model_len(),
        "tokens": ids,
    }
    if body.get("return_token_strs"):
        token_bytes = Tokenizer.load().token_bytes
        answer["token_strs"] = [token_bytes(number).decode("utf-8", "replace") for number in ids]
    return answer


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    body, _ = await read_object(request)
    served_name(request, body)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(number) is int for number in tokens):
        raise RequestError(400, "tokens", "tokens must be a list of token ids", "invalid_type")
    try:
        return {"prompt": await asyncio.to_thread(lambda: Tokenizer.load().decode(tokens))}
    except ValueError as error:
        raise RequestError(400, "tokens", str(error), "invalid_value") from error


def _ids(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        chat = read_chat({name: value for name, value in body.items() if name not in _TOKENIZE_ONLY})
        return prompt_ids(chat, current_date=datetime.date.today().isoformat())
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise RequestError(400, "prompt", "prompt must be a string (or give messages)", "missing_required_parameter")
    return Tokenizer.load().encode(prompt)


def _model(request: Request, name: str, length: int | None) -> dict[str, Any]:
    entry = {"id": name, "object": "model", "created": request.app.state.started, "owned_by": "gptoss-trt"}
    root = request.app.state.options.served_model_name[0]
    return {**entry, "root": root, "parent": None, "max_model_len": length}


def _scrape(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except OSError as error:
        return f"# the server's metrics at {url} cannot be read: {error}\n"
