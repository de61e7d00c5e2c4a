"""Request bodies: read within a limit, as JSON objects.

Invariant: no body makes the gateway raise anything but RequestError, and none is read beyond the limit. Must not know
what a body means.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from gptoss_trt.runtime.openai.errors import RequestError

Json = dict[str, Any]
MAX_DIGITS = 1000  # of an integer; Python itself stops at 4,300 with a text about Python


class TooLargeError(RequestError):
    """A body over the limit."""

    def __init__(self, limit: int, size: int | None = None) -> None:
        shown = "more bytes" if size is None else f"{size} bytes"
        super().__init__(413, None, f"the body has {shown}; the limit is {limit}", "request_too_large")


async def read_object(request: Request) -> tuple[Json, bytes]:
    """The body as an object and as it was sent. Raises RequestError 400 or 413."""
    limit: int = request.app.state.options.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise TooLargeError(limit, int(length))
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise TooLargeError(limit)
            parts.append(part)
    except ClientDisconnect as error:
        raise RequestError(400, None, "the body was not sent to its end", "incomplete_body") from error
    return parse_object(data := b"".join(parts)), data


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
