"""Refusals and failures in the shape of the OpenAI API.

Owns the mapping from the engine's error codes to HTTP statuses. Invariant: every error has a status, a type and a text
that names the value and the limit. Must not know HTTP servers or requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from gptoss_trt.runtime.engine.messages import ErrorCode

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_STATUSES: dict[ErrorCode, int] = {
    "INVALID_ARGUMENT": 400,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
}

MAX_SHOWN = 1000  # characters of a message or a place


class RequestError(ValueError):
    """A request that is not served. `status`: HTTP status; `param`: the place in the request; `code`: a short word."""

    def __init__(self, status: int, param: str | None, message: str, code: str | None = None) -> None:
        self.message = _shown(message)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else _shown(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """The response's JSON: {"error": {"message", "type", "param", "code"}}."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _shown(text: str) -> str:
    """`text` with its middle left out where it is long, because what a client wrote is repeated in it, and with half a
    surrogate pair, which has no UTF-8, spelled out."""
    if len(text) > MAX_SHOWN:
        text = f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def engine_error(code: ErrorCode, message: str) -> RequestError:
    """The engine's error as a RequestError."""
    return RequestError(_STATUSES[code], None, message, code.lower())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
