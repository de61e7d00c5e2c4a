"""What every request passes first: its id, its key, how many are served at once, and its place in the metrics.

Invariant: every response carries x-request-id, and everything that is refused here has OpenAI's error shape. An ASGI
layer of its own, because Starlette's base class puts a queue and a task between a stream and its client. Must not know
routes' meaning.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway.keys import Keys
from gptoss_trt.runtime.openai.gateway.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Served without a key and beyond the limit of requests at once: probes of a machine, not of a user."""
RETRY_AFTER_S = 1
_request_id = re.compile(r"[\x21-\x7e]{1,128}")


def error_response(error: RequestError) -> Response:
    """An error as an HTTP response; 429 and 503 say when to come again."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    # ASCII: what a client wrote and the text repeats may hold half a surrogate pair, which UTF-8 cannot.
    return Response(json.dumps(error.body()), error.status, headers, "application/json")


class Front:
    """The outermost layer. Puts `owner` and `request_id` into the request's state."""

    def __init__(self, app: ASGIApp, *, keys: Keys, metrics: Metrics, max_concurrency: int) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max = max_concurrency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _request_id.fullmatch(request_id):
            request_id = f"req-{secrets.token_hex(16)}"
        start, status = time.monotonic(), 500
        began = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._metrics.in_flight += 1
        try:
            refusal = self._refusal(scope, headers)
            scope.setdefault("state", {})["request_id"] = request_id
            await (self._app if refusal is None else refusal)(scope, receive, send_with_id)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": request_id}})
            if began:
                raise
            await error_response(RequestError(500, None, "the gateway failed; its log says why", "internal"))(
                scope, receive, send_with_id
            )
        finally:
            self._metrics.in_flight -= 1
            route, seconds = _route_of(scope), time.monotonic() - start
            self._metrics.request_ended(route, status, seconds)
            level = logging.INFO if status >= 500 and scope["path"] not in OPEN_PATHS else logging.DEBUG
            if log.isEnabledFor(level):
                told = {"request_id": request_id, "route": route, "status": status, "seconds": round(seconds, 4)}
                log.log(level, "request ended", extra={"fields": told})

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        try:
            scope.setdefault("state", {})["owner"] = self._keys.owner(headers.get("authorization", ""))
            if self._metrics.in_flight > self._max:
                message = f"{self._metrics.in_flight - 1} requests are being served; the limit is {self._max}"
                raise RequestError(429, None, message, "resource_exhausted")
        except RequestError as error:
            return error_response(error)
        return None


def _route_of(scope: Scope) -> str:
    """The route's own path, with its parameters' names: a fixed set."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", "other"))
