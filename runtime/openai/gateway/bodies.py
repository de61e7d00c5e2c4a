"""Request bodies: read within a limit, as JSON objects.

Invariant: no body makes the gateway raise anything but RequestError, and none is kept beyond the limit. Must not know
what a body means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from gptoss_trt.runtime.openai.errors import RequestError

Json = dict[str, Any]
MAX_DIGITS = 1000  # of an integer; Python itself stops at 4,300 with a text about Python
# How much of a refused body is read and dropped. A client that still writes when the connection closes sees a broken
# pipe and never the 413.
DRAIN_BYTES = 256 << 20
DRAIN_S = 5.0


class TooLargeError(RequestError):
    """A body over the limit."""

    def __init__(self, limit: int, size: int | None = None) -> None:
        shown = "more bytes" if size is None else f"{size} bytes"
        super().__init__(413, None, f"the body has {shown}; the limit is {limit}", "request_too_large")


async def read_object(request: Request) -> tuple[Json, bytes]:
    """The body as an object and as it was sent. Raises RequestError 400 or 413."""
    limit: int = request.app.state.options.max_body_bytes
    length = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = 0
    try:
        if length.isdecimal() and int(length) > limit:
            await _drain(request)
            raise TooLargeError(limit, int(length))
        async for part in request.stream():
            size += len(part)
            if size > limit:
                await _drain(request)
                raise TooLargeError(limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise RequestError(400, None, "the body was not sent to its end", "incomplete_body") from error
    return parse_object(data := b"".join(parts)), data


async def _drain(request: Request) -> None:
    """Reads on without keeping anything, within bounds; not from a client that waits to be told to send."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return

    async def read() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > DRAIN_BYTES:
                return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), DRAIN_S)


def parse_object(data: bytes) -> Json:
    """JSON text as an object. Raises RequestError 400."""
    try:
        body = json.loads(data, parse_constant=_no_constant, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, None, f"the body is not JSON: {reason}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, None, f"the body is {type(body).__name__}, not a JSON object", "invalid_type")
    return body


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
