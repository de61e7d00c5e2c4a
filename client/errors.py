"""What a call to a server can fail with, in one vocabulary for gRPC and HTTP.

Invariant: `ServerError.status` is always the name of a gRPC status code, whatever the transport was. Must not know
what was asked.
"""

from __future__ import annotations

import json
from typing import Any

STATUS_OF_HTTP = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
MAX_LAYERS = 4
NO_SERVER = "Is a server there? `gptoss-trt serve ENGINE_DIR` starts one; --url names another address."
STATUSES = frozenset(STATUS_OF_HTTP.values())
STATUS_OF_TYPE = {  # of an OpenAI-shaped error without a code that says more
    "invalid_request_error": "INVALID_ARGUMENT",
    "authentication_error": "UNAUTHENTICATED",
    "rate_limit_error": "RESOURCE_EXHAUSTED",
}


class ServerError(Exception):
    """A request that failed: a gRPC status name, the server's message, and the request's id.

    `status` is UNKNOWN where the server gave a message without a code (an error event in the middle of an HTTP
    stream), UNAVAILABLE where it could not be reached, DEADLINE_EXCEEDED where the caller's timeout ran out. `detail`
    is the OpenAI-shaped error (`param`, `code`) where the model gave one.
    """

    def __init__(
        self, status: str, message: str, *, request_id: str = "", detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(status, message, request_id)
        self.status = status
        self.message = message
        self.request_id = request_id
        self.detail = detail

    def __str__(self) -> str:
        where = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status}: {self.message}{where}"


def status_of_http(code: int) -> str:
    """The gRPC status name nearest to an HTTP status code; UNKNOWN for one that has none."""
    return STATUS_OF_HTTP.get(code, "UNAVAILABLE" if code == 502 else "UNKNOWN")


def error_of_text(status: str, text: str) -> ServerError:
    """The error that a server's text says: plain text, JSON `{"error": ...}`, or an event with such JSON.

    The OpenAI-shaped models put JSON into the text of a Triton error, and Triton puts that into JSON or an event again.
    A status of UNKNOWN gives way to what the innermost error says.
    """
    for _layer in range(MAX_LAYERS):
        body = _json_object(text)
        if "error" not in body:
            break
        if isinstance(body["error"], dict):
            return _error_of_detail(status, body["error"])
        text = str(body["error"])
    return ServerError(status, text.strip() or "no message")


def error_of_body(body: dict[str, Any]) -> ServerError:
    """The error of a JSON answer that has the key `error`."""
    return error_of_text("UNKNOWN", json.dumps(body, ensure_ascii=False))


def _json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text.strip().removeprefix("data:"))
    except json.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _error_of_detail(status: str, detail: dict[str, Any]) -> ServerError:
    if status == "UNKNOWN":
        status = _status_of_detail(detail)
    return ServerError(status, str(detail.get("message", "no message")), detail=detail)


def _status_of_detail(detail: dict[str, Any]) -> str:
    for code in (detail.get("status"), detail.get("code")):
        if isinstance(code, int):
            return status_of_http(code)
        if isinstance(code, str) and code.upper() in STATUSES:
            return code.upper()
    return STATUS_OF_TYPE.get(str(detail.get("type")), "INTERNAL")
