"""Traces of the real server: Triton's span of a request and the engine's phases below it, as a collector gets them."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """What is compared of a span; ids in hexadecimal."""

    service: str
    name: str
    trace: str
    span: str
    parent: str


class Collector:
    """Takes what exporters POST and keeps the spans: protobuf from the engine, OTLP's JSON from Triton."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                is_json = self.headers["content-type"] == "application/json"
                collector.spans += spans_of_json(json.loads(body)) if is_json else spans_of_protobuf(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def spans_of_protobuf(body: bytes) -> list[Span]:
    return [
        Span(service(resource.resource.attributes), span.name, span.trace_id.hex(), span.span_id.hex(),
             span.parent_span_id.hex())
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def service(attributes: Any) -> str:
    return str(next(a.value.string_value for a in attributes if a.key == "service.name"))


def spans_of_json(body: dict[str, Any]) -> list[Span]:
    return [
        Span("triton", span["name"], span["traceId"], span["spanId"], span.get("parentSpanId", ""))
        for resource in body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_the_engine_s_phases_lie_below_the_server_s_span(
    launch: Callable[..., Any], collector: Collector, words: Any
) -> None:
    triton = launch(models=("ensemble",), otlp_url=collector.url)
    status, _ = triton.post("ensemble/generate", {"text_input": "Hi", "max_tokens": 5}, 20.0)
    assert status == 200

    def engine_spans() -> list[Span]:
        return [span for span in collector.spans if span.service == "gptoss-trt-engine"]

    def server_spans() -> list[Span]:
        return [span for span in collector.spans if span.service == "triton"]

    words.wait_until(lambda: len(engine_spans()) >= 4 and server_spans(), timeout_s=15.0, period_s=0.1)
    whole = next(span for span in engine_spans() if span.name == "generate")
    below = {span.name for span in engine_spans() if span.parent == whole.span}
    assert below == {"queue", "prefill", "decode"}
    assert whole.parent in {span.span for span in server_spans()}
    assert whole.trace in {span.trace for span in server_spans()}
