"""Spans of the engine: phases of finished sequences, errors, parents; nothing of the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.messages import Submit
from gptoss_trt.runtime.engine.script import Fault, Script, ScriptedEngine
from gptoss_trt.runtime.engine.scripted import ScriptedCore
from gptoss_trt.runtime.engine.tracing import TracedCore

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = (7001, 7002)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    made = InMemorySpanExporter()
    yield made
    made.shutdown()


def spans_of(exporter: InMemorySpanExporter, plan: ScriptedEngine, submit: Submit) -> tuple[ReadableSpan, ...]:
    core = TracedCore(ScriptedCore(plan), exporter)
    key: RequestKey = (1, submit.request_id)
    core.submit(key, submit, 1_000_000_000)
    while core.has_work():
        core.step()
    core.close()
    return tuple(exporter.get_finished_spans())


def test_a_sequence_has_a_span_with_its_phases(exporter: InMemorySpanExporter) -> None:
    plan = ScriptedEngine(step_ms=0, default=Script(tokens=(1, 2, 3), end=()))
    submit = Submit("r-1", PROMPT, 3, n=2, trace=f"00-{TRACE}-{PARENT}-01")
    spans = spans_of(exporter, plan, submit)
    whole = [span for span in spans if span.name == "generate"]
    assert [span.attributes["gptoss.sequence"] for span in whole if span.attributes] == [0, 1]
    for span in whole:
        assert span.context.trace_id == int(TRACE, 16)
        assert span.parent is not None and span.parent.span_id == int(PARENT, 16)
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
        assert span.attributes["gptoss.finish_reason"] == "length"
        children = [child for child in spans if child.parent and child.parent.span_id == span.context.span_id]
        assert [child.name for child in children] == ["queue", "prefill", "decode"]
        times = [(child.start_time or 0, child.end_time or 0) for child in children]
        assert times[0][0] == span.start_time and times[-1][1] == span.end_time
        assert all(before[1] == after[0] for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("trace", ["", "no traceparent"])
def test_without_a_parent_a_trace_begins(exporter: InMemorySpanExporter, trace: str) -> None:
    plan = ScriptedEngine(step_ms=0, default=Script(tokens=(1,), end=()))
    spans = spans_of(exporter, plan, Submit("r", PROMPT, 1, trace=trace))
    assert [span.name for span in spans if span.parent is None] == ["generate"]


def test_an_error_is_a_span_of_its_own_kind(exporter: InMemorySpanExporter) -> None:
    plan = ScriptedEngine(step_ms=0, default=Script(tokens=(1, 2), fault=Fault("error", 1, message="secret words")))
    (span,) = spans_of(exporter, plan, Submit("r", PROMPT, 5))
    assert span.attributes is not None and span.attributes["error.type"] == "INTERNAL"
    assert not span.status.is_ok
    # Not all of the span: its times and ids may have any digits.
    told = (
        f"{span.name} {dict(span.attributes)} {span.status.description} {[event.attributes for event in span.events]}"
    )
    assert "secret" not in span.to_json() and "7001" not in told
