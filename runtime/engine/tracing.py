"""Spans of a request's phases in the engine, for OpenTelemetry: a core around the core that looks at ends only.

One span `generate` a sequence, from arrival to its last token, with the children `queue` (arrival to its first step),
`prefill` (to its first token) and `decode` (to its last). The parent is the request's `trace`, a W3C
traceparent; a request without one begins a trace of its own. Attributes are counts and ids, never prompts or answers.

Invariant: nothing is done in a step for a request that does not end in it; the exporter works in a thread of its own
and drops spans when nobody takes them. Must not know the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gptoss_trt.runtime.engine.core import EngineCore, RequestKey
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Submit, Usage

SERVICE = "gptoss-trt-engine"
DELAY_MS = 1000  # shorter than an engine process outlives its last client, so that the last spans leave too


@dataclass(frozen=True)
class _Open:
    """What is kept of a request until it ends."""

    trace: str
    arrival_ns: int


class TracedCore:
    """An EngineCore that gives the spans of `core` to `exporter`."""

    def __init__(self, core: EngineCore, exporter: SpanExporter) -> None:
        self._core = core
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_MS))
        self._tracer = self._provider.get_tracer("gptoss_trt")
        self._open: dict[RequestKey, _Open] = {}

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
        self._open[key] = _Open(submit.trace, arrival_ns)
        self._core.submit(key, submit, arrival_ns)

    def cancel(self, key: RequestKey) -> None:
        self._core.cancel(key)

    def has_work(self) -> bool:
        return self._core.has_work()

    def settle(self) -> None:
        self._core.settle()

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def begin(self) -> None:
        self._core.begin()

    def step(self) -> list[tuple[RequestKey, Event]]:
        events = self._core.step()
        for key, event in events:
            if isinstance(event, Finished):
                self._ended(key, event)
            elif isinstance(event, Error):
                self._failed(key, event)
        return events

    def close(self) -> None:
        """Sends what waits and stops the exporter."""
        self._provider.shutdown()

    def _ended(self, key: RequestKey, end: Finished) -> None:
        known = self._open.get(key)
        if known is None:
            return
        if not end.remaining:
            del self._open[key]
        usage = end.usage
        last_ns = max(usage.last_token_ns, usage.first_scheduled_ns, usage.arrival_ns)
        attributes: dict[str, str | int] = {
            "gptoss.request_id": end.request_id,
            "gptoss.sequence": end.sequence,
            "gptoss.finish_reason": end.reason,
            "gptoss.cached_tokens": usage.cached_tokens,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
        whole = self._tracer.start_span(
            "generate", _parent(known.trace), SpanKind.SERVER, attributes, start_time=usage.arrival_ns
        )
        for name, begin_ns, end_ns in _phases(usage):
            phase = self._tracer.start_span(name, set_span_in_context(whole), start_time=begin_ns)
            phase.end(end_ns)
        whole.end(last_ns)

    def _failed(self, key: RequestKey, error: Error) -> None:
        known = self._open.pop(key, None)
        if known is None:
            return
        attributes = {"gptoss.request_id": error.request_id or "", "error.type": error.code}
        span = self._tracer.start_span(
            "generate", _parent(known.trace), SpanKind.SERVER, attributes, start_time=known.arrival_ns
        )
        span.set_status(Status(StatusCode.ERROR, error.code))
        span.end()


def traced(core: EngineCore, url: str) -> TracedCore:
    """`core` with its spans sent to `url` (OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces)."""
    return TracedCore(core, OTLPSpanExporter(endpoint=url))


def _phases(usage: Usage) -> list[tuple[str, int, int]]:
    """Name, begin and end (ns) of the phases that a sequence came to."""
    ends = (
        ("queue", usage.arrival_ns, usage.first_scheduled_ns),
        ("prefill", usage.first_scheduled_ns, usage.first_token_ns),
        ("decode", usage.first_token_ns, usage.last_token_ns),
    )
    return [(name, begin, end) for name, begin, end in ends if begin and end]


def _parent(trace: str) -> Any:
    """The context that a traceparent names; an empty one, which begins a trace, for none or one that is malformed."""
    return TraceContextTextMapPropagator().extract({"traceparent": trace})
