"""From a model's answer to an HTTP response: server-sent events, or one JSON object.

Invariant: a client that goes away ends its generation at once, streaming or not; a stream's status is decided by its
first event, and what goes wrong later is an event; a chat stream ends with [DONE], after an error too. Must not know
which route asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.metrics import Metrics
from gptoss_trt.runtime.openai.gateway.readiness import Readiness
from gptoss_trt.runtime.openai.gateway.triton import Answer, error_of_text

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
ERROR_BEGIN = b'{"error":'
_CLOSED = RequestError(499, None, "the client has gone away", "client_closed_request")

Events = AsyncIterator[bytes]
"""Bytes to send, each piece one or more whole events."""


class Exchange:
    """One request's answer together with the watch for its client's leaving."""

    def __init__(self, request: Request, answer: Answer) -> None:
        self.answer = answer
        self.metrics: Metrics = request.app.state.metrics
        self.readiness: Readiness = request.app.state.readiness
        self.keep_alive_s: float = request.app.state.options.keep_alive_s
        self.gone = False
        self._receive = request.receive
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        message = await self._receive()
        while message["type"] != "http.disconnect":
            message = await self._receive()
        self.gone = True
        if not self.answer.closed:
            self.metrics.count("client_disconnects")
        self.answer.close()

    def close(self) -> None:
        self._watch.cancel()
        self.answer.close()


async def whole_object(request: Request, answer: Answer) -> bytes:
    """The one JSON text of an answer that does not stream. Raises RequestError."""
    exchange = Exchange(request, answer)
    try:
        texts: list[bytes] = []
        async for batch in answer.batches():
            texts += batch
        if exchange.gone:
            raise _CLOSED
        if len(texts) != 1:
            raise RequestError(500, None, f"the model gave {len(texts)} objects for one answer", "internal")
        if texts[0].startswith(ERROR_BEGIN):
            raise error_of_text(texts[0])
        answer.closed = True  # it has ended: there is nothing to cancel
        return texts[0]
    finally:
        exchange.close()


async def event_stream(
    request: Request, answer: Answer, events: Callable[[AsyncIterator[list[bytes]]], Events], *, done: bool = True
) -> Response:
    """A response that streams `events(batches)`. Raises RequestError for an error before the first event, unless that
    takes longer than the keep-alive period: then the stream has begun, and the error is its event. `done`: whether the
    stream ends with [DONE]."""
    exchange = Exchange(request, answer)
    start = time.monotonic()
    source = events(answer.batches())
    first = asyncio.ensure_future(anext(source, b""))
    try:
        await asyncio.wait({first}, timeout=exchange.keep_alive_s)
        if first.done():
            first.result()
            exchange.metrics.first_chunk.add(time.monotonic() - start)
            if exchange.gone:
                raise _CLOSED
    except BaseException:
        first.cancel()
        exchange.close()
        raise
    return _EventStream(exchange, first, source, DONE if done else b"")


class _EventStream(Response):
    """Sends events as they come, and a comment when none has come for a while."""

    def __init__(self, exchange: Exchange, first: asyncio.Future[bytes], source: Events, last: bytes) -> None:
        super().__init__(None, 200, HEADERS)
        del self.headers["content-length"]
        self._exchange = exchange
        self._first = first
        self._source = source
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sent_at = time.monotonic()

        async def comment_when_silent() -> None:
            period_s = self._exchange.keep_alive_s
            while True:
                await asyncio.sleep(max(0.01, sent_at + period_s - time.monotonic()))
                if time.monotonic() - sent_at >= period_s and not self._exchange.gone:
                    await emit(COMMENT)

        async def emit(data: bytes, *, more: bool = True) -> None:
            nonlocal sent_at
            sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        if not self._first.done():
            await emit(COMMENT)
        comments = asyncio.create_task(comment_when_silent())
        try:
            try:
                await emit(await self._first)
                async for data in self._source:
                    await emit(data)
            except RequestError as error:
                if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    self._exchange.readiness.doubt()
                await emit(event_of(error.body()))
            if not self._exchange.gone:
                self._exchange.answer.closed = True
                await emit(self._last, more=False)
        finally:
            comments.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await comments
            self._exchange.close()


def event_of(body: dict[str, Any]) -> bytes:
    """One event of a JSON object."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
