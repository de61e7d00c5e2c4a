"""tests/perf/dashboard_picture.py asks as Grafana does, and names the panels that have no answer."""

from __future__ import annotations

import http.server
import importlib.util
import json
import math
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "perf" / "dashboard_picture.py"


@pytest.fixture(scope="module")
def picture() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("dashboard_picture", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class FakePrometheus(http.server.ThreadingHTTPServer):
    """Answers a query with one series of ones, or as `answers` says for those that hold a text; 400 for None."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.answers: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        asked = dict(urllib.parse.parse_qsl(address.query))
        status, data = 200, [{"model": "tensorrt_llm"}, {"model": "other"}, {}]
        assert isinstance(self.server, FakePrometheus)
        if address.path == "/api/v1/query_range":
            query, values = asked["query"], [[float(asked["start"]), "1"]]
            self.server.queries.append(query)
            data = {"result": [{"metric": {"code": "INTERNAL"}, "values": values}]}
            for text, answer in self.server.answers.items():
                if text in query:
                    status, data = (400 if answer is None else 200), {"result": answer}
        body = json.dumps({"data": data}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    server = FakePrometheus()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(picture: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dashboard_picture.py", "--prometheus", url, "--scrape-seconds", "2"])
    return int(picture.main())


def test_every_query_is_asked_with_its_variables(
    picture: ModuleType, prometheus: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(picture, monkeypatch, prometheus.url) == 0
    dashboard = json.loads(picture.DASHBOARD.read_text(encoding="utf-8"))
    forms = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expected = [form.replace("$model", "other").replace("$__rate_interval", "8s") for form in forms]
    assert prometheus.queries == expected


def test_a_panel_without_an_answer_is_named(
    picture: ModuleType,
    prometheus: FakePrometheus,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nan = [{"metric": {}, "values": [[0, "NaN"]]}]
    prometheus.answers = {"gptoss_trt_preemptions": [], "iteration_counter": None, "speculative_tokens": nan}
    prometheus.answers["gptoss_trt_errors"] = []  # asked with > 0: nothing has happened
    assert run(picture, monkeypatch, prometheus.url) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r":? .*query (\w) (\w+).*", r" \1 \2", line.split(", ", 1)[1]) for line in lines] == [
        "Steps A failed",
        "Draft A returned",
        "Cancelled, B returned",
    ]


def test_no_server_is_an_error(
    picture: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(picture, monkeypatch, "http://127.0.0.1:1") == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().err


def test_the_rate_looks_back_over_four_scrapes(picture: ModuleType) -> None:
    window = picture.Window.last(minutes=3, scrape_s=5, end=1003.0)
    assert (window.start, window.end, window.step, window.rate) == (820, 1000, 5, 20)
    assert window.times()[0] == 820 and window.times()[-1] == 1000 and len(window.times()) == 37
    assert picture.Window.last(minutes=600, scrape_s=5, end=6e4).rate == 65  # a point a minute


def test_steps_without_a_value_are_gaps(picture: ModuleType, prometheus: FakePrometheus) -> None:
    window = picture.Window(start=100.0, end=104.0, step=2.0, rate=8.0)
    prometheus.answers = {"up": [{"metric": {"code": "X", "model": "m"}, "values": [[100, "3"], [104, "5"]]}]}
    (line,) = picture.Prometheus(prometheus.url).lines("up", "{{model}} {{code}}{{none}}", window)
    assert line.legend == "m X" and line.values[::2] == [3, 5] and math.isnan(line.values[1])


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 0.0415, "41.5 ms"),
        ("s", 2.5e-5, "25 µs"),
        ("s", 90, "1.5 mins"),
        ("s", 0, "0 s"),
        ("ms", 1500, "1.5 s"),
        ("short", 1234, "1.23 K"),
        ("short", 0.25, "0.25"),
        ("short", 0, "0"),
        ("bytes", 3 << 29, "1.5 GiB"),
        ("bytes", 0, "0 B"),
        ("percentunit", 0.961, "96.1%"),
        ("reqps", 0.5, "0.5 req/s"),
    ],
)
def test_units(picture: ModuleType, unit: str, value: float, text: str) -> None:
    assert picture.UNITS[unit](value) == text


def test_the_dashboard_s_units_are_known(picture: ModuleType) -> None:
    dashboard = json.loads(picture.DASHBOARD.read_text(encoding="utf-8"))
    assert {picture.unit_of(panel) for panel in dashboard["panels"]} <= set(picture.UNITS)
