"""Request bodies: read within a limit, as JSON objects.

Invariant: no body makes the gateway raise anything but RequestError, and none is kept beyond the limit. Must not know
what a body means.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.json_object import parse_object

Json = dict[str, Any]
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
