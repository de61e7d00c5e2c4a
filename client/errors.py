"""What a call to a server can fail with, in one vocabulary for gRPC and HTTP.

Invariant: `ServerError.status` is always the name of a gRPC status code, whatever the transport was. Must not know
what was asked.
"""

from __future__ import annotations

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
STATUSES = frozenset(STATUS_OF_HTTP.values())
STATUS_OF_TYPE = {  # of an OpenAI-shaped error without a code that says more
    "invalid_request_error": "INVALID_ARGUMENT",
    "authentication_error": "UNAUTHENTICATED",
    "rate_limit_error": "RESOURCE_EXHAUSTED",
}


class ServerError(Exception):
    """A request that failed: a gRPC status name, the server's message, and the request's id.

    `status` is UNKNOWN where the server gave a message without a code (an error event in the middle of an HTTP
    stream), UNAVAILABLE where it could not be reached, DEADLINE_EXCEEDED where the caller's timeout ran out.
    """

    def __init__(self, status: str, message: str, *, request_id: str = "") -> None:
        super().__init__(status, message, request_id)
        self.status = status
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        where = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status}: {self.message}{where}"


def status_of_http(code: int) -> str:
    """The gRPC status name nearest to an HTTP status code; UNKNOWN for one that has none."""
    return STATUS_OF_HTTP.get(code, "UNAVAILABLE" if code == 502 else "UNKNOWN")


def error_of_body(body: dict[str, object], *, request_id: str = "") -> ServerError:
    """The error of an OpenAI-shaped `{"error": {"message", "type", "code"}}` or Triton's `{"error": "message"}`."""
    detail = body.get("error")
    if not isinstance(detail, dict):
        return ServerError("UNKNOWN", str(detail), request_id=request_id)
    code, kind = detail.get("code"), detail.get("type")
    if isinstance(code, int):
        status = status_of_http(code)
    elif isinstance(code, str) and code.upper() in STATUSES:
        status = code.upper()
    else:
        status = STATUS_OF_TYPE.get(str(kind), "INTERNAL")
    return ServerError(status, str(detail.get("message", "no message")), request_id=request_id)
