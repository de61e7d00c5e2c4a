"""The synchronous HTTP client: Triton's generate extension, with server-sent events for streams.

Invariant: closing a source closes its connection, which is how the server learns of a cancellation. Must not know what
a model answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from gptoss_trt.client.answers import Record
from gptoss_trt.client.api import Client
from gptoss_trt.client.errors import ServerError, error_of_body, error_of_text, status_of_http
from gptoss_trt.client.requests import Call
from gptoss_trt.client.sse import EventReader
from gptoss_trt.client.tensors import decode_body, generate_body

CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 5.0
STREAM_INPUTS = ("stream", "streaming")


def generate_path(call: Call) -> str:
    """The route of a call: the one that streams when the call asks for a stream."""
    streamed = any(call.values.get(name) is True for name in STREAM_INPUTS)
    return f"/v2/models/{call.model}/generate{'_stream' if streamed else ''}"


def error_of_response(status: int, text: str) -> ServerError:
    """The error of an answer that is not 200, with the server's message."""
    return error_of_text(status_of_http(status), text.strip() or f"HTTP status {status}")


def error_of_transport(error: Exception) -> ServerError:
    """The error of a request that got no (whole) answer."""
    status = "DEADLINE_EXCEEDED" if isinstance(error, httpx.TimeoutException) else "UNAVAILABLE"
    return ServerError(status, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def timeouts(timeout_s: float | None) -> httpx.Timeout:
    """httpx's timeouts for a request given up after `timeout_s`; it knows waits between bytes, not totals."""
    return httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s or CONNECT_TIMEOUT_S))


def record_of_event(data: str) -> Record:
    """The record of one event's data. Raises ServerError for an error event (the stream's status was sent before)."""
    body: dict[str, Any] = json.loads(data)
    if "error" in body:
        raise error_of_body(body)
    return decode_body(body)


class HttpSource:
    """One POST to /generate or /generate_stream, sent at once."""

    def __init__(self, client: httpx.Client, call: Call) -> None:
        body = generate_body(call)
        self._deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        self._closed = False
        path = generate_path(call)
        self._streamed = path.endswith("_stream")
        self._records: Iterator[Record] | None = None
        request = client.build_request("POST", path, json=body, timeout=timeouts(call.timeout_s))
        try:
            self._response = client.send(request, stream=True)
        except httpx.TransportError as error:
            raise error_of_transport(error) from error

    def receive(self) -> Record | None:
        if self._records is None:
            self._records = self._read()
        try:
            return next(self._records, None)
        except (httpx.TransportError, httpx.StreamError) as error:
            if self._closed:
                return None
            raise error_of_transport(error) from error

    def _read(self) -> Iterator[Record]:
        if self._response.status_code != httpx.codes.OK or not self._streamed:
            text = self._response.read().decode("utf-8", "replace")
            if self._response.status_code != httpx.codes.OK:
                raise error_of_response(self._response.status_code, text)
            yield record_of_event(text)
            return
        reader = EventReader()
        for data in self._response.iter_bytes():
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise ServerError("DEADLINE_EXCEEDED", "the request's time ran out in the middle of its stream")
            yield from map(record_of_event, reader.push(data))
        yield from map(record_of_event, reader.finish())

    def close(self) -> None:
        self._closed = True
        self._response.close()


class HttpClient(Client):
    """A client for a base URL. `headers` go with every request; `transport` replaces the network in tests."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.Client(base_url=url, headers=dict(headers or {}), transport=transport, limits=limits)

    def open(self, call: Call) -> HttpSource:
        return HttpSource(self._client, call)

    def ready(self, model: str | None = None) -> bool:
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        try:
            answer = self._client.get(path, timeout=HEALTH_TIMEOUT_S)
        except httpx.TransportError as error:
            raise error_of_transport(error) from error
        return answer.status_code == httpx.codes.OK

    def close(self) -> None:
        self._client.close()
