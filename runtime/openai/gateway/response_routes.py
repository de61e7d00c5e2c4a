"""/v1/responses: create, read, delete.

Invariant: a response is stored under the owner of its request and read by that owner only; with `store` false nothing
of it is kept. Must not know Harmony: a response is a chat stream, told in other words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.bodies import read_object
from gptoss_trt.runtime.openai.gateway.generation_routes import note_usage, served_name
from gptoss_trt.runtime.openai.gateway.streaming import ERROR_BEGIN, Exchange, event_stream
from gptoss_trt.runtime.openai.gateway.triton import error_of_text
from gptoss_trt.runtime.openai.response_errors import in_response_terms
from gptoss_trt.runtime.openai.response_objects import ResponseAnswer
from gptoss_trt.runtime.openai.response_request import (
    ResponseRequest,
    chat_body,
    input_messages,
    message_places,
    read_response,
)

router = APIRouter()
Json = dict[str, Any]


@router.post("/v1/responses")
async def create(request: Request) -> Response:
    body, _ = await read_object(request)
    name = served_name(request, body)
    asked = read_response(body)
    earlier = await _earlier(request, asked.previous_response_id)
    chat = {**chat_body(asked, earlier), "model": name}
    places = message_places(asked, earlier)
    answer = ResponseAnswer(asked, model=name)
    history = [*earlier, *input_messages(asked.input)]
    state = request.app.state
    source = state.models.ask(
        state.options.chat_model, json.dumps(chat).encode(), stream=True, request_id=request.state.request_id
    )
    if asked.stream:
        return await event_stream(
            request,
            source,
            lambda batches: _events(request, asked, answer, history, _chunks(request, batches, places)),
            done=False,
        )
    exchange = Exchange(request, source)
    try:
        async for chunk in _chunks(request, source.batches(), places):
            answer.push(chunk)
        if exchange.gone:
            raise RequestError(499, None, "the client has gone away", "client_closed_request")
        source.closed = True
    finally:
        exchange.close()
    answer.finish()
    await _store(request, asked, answer, history)
    return _json(answer.response())


@router.get("/v1/responses/{response_id}")
async def read(request: Request, response_id: str) -> Response:
    return _json((await _stored(request, response_id))["response"])


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    items = (await _stored(request, response_id))["input"]
    ids = [item["id"] for item in items]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return _json({"object": "list", "data": items, "has_more": False, **ends})


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    if not await asyncio.to_thread(request.app.state.store.delete, request.state.owner, response_id):
        raise _not_found(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def _json(body: Json) -> Response:
    """ASCII JSON: the request's own texts are in it, and half a surrogate pair in one has no UTF-8."""
    return Response(json.dumps(body), media_type="application/json")


async def _events(
    request: Request,
    asked: ResponseRequest,
    answer: ResponseAnswer,
    history: list[Json],
    chunks: AsyncIterator[Json],
) -> AsyncIterator[bytes]:
    """Server-sent events, each named by its type. The first ones wait for the model to take the request."""
    begun = False
    try:
        async for chunk in chunks:
            if not begun:
                yield _encode(answer.begin())
                begun = True
            if events := answer.push(chunk):
                yield _encode(events)
    except RequestError as error:
        if not begun:
            raise
        yield _encode(answer.fail(error))
        return
    if begun:
        end = answer.finish()
        await _store(request, asked, answer, history)
        yield _encode(end)


async def _chunks(request: Request, batches: AsyncIterator[list[bytes]], places: list[str]) -> AsyncIterator[Json]:
    """The chat model's chunks. Raises RequestError in the words of /v1/responses."""
    try:
        async for texts in batches:
            for text in texts:
                if text.startswith(ERROR_BEGIN):
                    raise error_of_text(text)
                chunk: Json = json.loads(text)
                if chunk.get("usage") is not None:
                    note_usage(request, chunk["usage"])
                yield chunk
    except RequestError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            request.app.state.readiness.doubt()
        raise in_response_terms(error, places) from error


def _encode(events: list[Json]) -> bytes:
    texts = [(event["type"], json.dumps(event, ensure_ascii=False, separators=(",", ":"))) for event in events]
    return "".join(f"event: {name}\ndata: {text}\n\n" for name, text in texts).encode("utf-8", "replace")


async def _earlier(request: Request, response_id: str | None) -> list[Json]:
    if response_id is None:
        return []
    try:
        messages: list[Json] = (await _stored(request, response_id))["messages"]
    except RequestError as error:
        raise RequestError(404, "previous_response_id", error.message, "previous_response_not_found") from error
    return messages


async def _stored(request: Request, response_id: str) -> Json:
    body: Json | None = await asyncio.to_thread(request.app.state.store.get, request.state.owner, response_id)
    if body is None:
        raise _not_found(response_id)
    return body


def _not_found(response_id: str) -> RequestError:
    return RequestError(404, "response_id", f"no stored response has the id {response_id[:80]!r}", "not_found")


async def _store(request: Request, asked: ResponseRequest, answer: ResponseAnswer, history: list[Json]) -> None:
    if not asked.store:
        return
    items = asked.input
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]}]
    numbered = [{"id": f"item_{answer.id}_{index}", **item} for index, item in enumerate(items)]
    body = {"response": answer.response(), "input": numbered, "messages": [*history, *answer.messages()]}
    await asyncio.to_thread(request.app.state.store.put, request.state.owner, answer.id, body)
