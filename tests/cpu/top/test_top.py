"""`gptoss-trt top` on two pages of a server under load, nine seconds apart, and on pages that are none."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from gptoss_trt.client.protocol import METRICS
from gptoss_trt.client.top import cli
from gptoss_trt.client.top import figures as names
from gptoss_trt.client.top.cli import top
from gptoss_trt.client.top.figures import Figures, History, percentile
from gptoss_trt.client.top.page import Page, PageError
from gptoss_trt.client.top.show import screen

DATA = Path(__file__).parents[2] / "data" / "metrics"
FIRST, SECOND = ((DATA / name).read_text(encoding="utf-8") for name in ("first.txt", "second.txt"))


def both(seconds: float = 10.0) -> Figures:
    history = History()
    history.add(100.0, Page.parse(FIRST))
    history.add(100.0 + seconds, Page.parse(SECOND))
    return history.figures()


def histogram(counts: dict[str, float]) -> Page:
    lines = [f'gptoss_trt_queue_time_seconds_bucket{{model="m",le="{le}"}} {count}' for le, count in counts.items()]
    return Page.parse("\n".join(lines))


def test_a_recorded_page() -> None:
    page = Page.parse(SECOND)
    assert page.value("nv_trt_llm_request_metrics", request_type="max") == 256
    assert page.total("nv_inference_request_success") == sum(
        page.value("nv_inference_request_success", model=model) or 0
        for model in page.label_values("nv_inference_request_success", "model")
    )
    assert [bound for bound, _ in page.buckets("nv_llm_output_token_len")] == [10, 50, 100, 500, 1000, float("inf")]
    assert page.value("no_such_metric") is None and page.total("no_such_metric") is None


def test_labels_may_hold_anything() -> None:
    page = Page.parse('m{a="x,y=\\"1\\"}",b="\\\\n\\n"} 3 1700000000\nm_2 +Inf\n')
    assert page.value("m", a='x,y="1"}', b="\\n\n") == 3
    assert page.value("m_2") == float("inf")


@pytest.mark.parametrize("line", ["<html>", "m{a=1} 2", 'm{a="1"', "m one", "m{} 1 2 3", 'm{a="1" b="2"} 3'])
def test_other_pages_are_refused_with_the_line(line: str) -> None:
    with pytest.raises(PageError, match="line 2"):
        Page.parse(f"# HELP m\n{line}\n")


def test_levels_and_rates() -> None:
    seen = both()
    assert seen.model == "tensorrt_llm"
    assert seen.requests["max"] == 256 and seen.requests["active"] == 62
    assert seen.kv_blocks["max"] == 16384 and seen.kv_blocks["tokens_per"] == 64
    assert seen.output_tokens_per_s == pytest.approx((15992 - 8269) / 10)
    assert seen.finished_per_s == pytest.approx((477 - 251) / 10)
    assert seen.prefix_cache_hit_rate == 0.0
    assert seen.draft_acceptance is None, "nothing was drafted"
    assert seen.failed == 0 and not seen.whole_life


def test_tokens_count_as_they_come_where_the_page_has_them() -> None:
    history = History()
    for moment, page, tokens in ((100.0, FIRST, 500), (110.0, SECOND, 1750)):
        more = f'gptoss_trt_generated_tokens{{model="tensorrt_llm",version="1"}} {tokens}\n'
        history.add(moment, Page.parse(page + more))
    assert history.figures().output_tokens_per_s == pytest.approx(125.0)


def test_percentiles_are_of_what_came_between_the_looks() -> None:
    """The second page's buckets less the first's: 38 gaps to 10 ms, 93 to 20 ms, 164 to 40 ms, of 223."""
    assert both().latency_s["between_tokens"]["p50"] == pytest.approx(0.02 + 0.02 * (223 / 2 - 93) / (164 - 93))


def test_percentiles_in_a_bucket_at_its_ends_and_beyond() -> None:
    page = histogram({"1": 0, "2": 10, "4": 20, "+Inf": 20})
    of = lambda rank: percentile(page, None, "gptoss_trt_queue_time_seconds", "m", rank)  # noqa: E731
    assert of(50) == pytest.approx(2.0) and of(75) == pytest.approx(3.0) and of(5) == pytest.approx(1.1)
    far = histogram({"1": 1, "2": 1, "+Inf": 100})
    assert percentile(far, None, "gptoss_trt_queue_time_seconds", "m", 99) == 2.0
    assert percentile(far, far, "gptoss_trt_queue_time_seconds", "m", 99) is None, "nothing between equal looks"
    assert percentile(far, None, "gptoss_trt_queue_time_seconds", "other", 99) is None


def test_a_server_that_began_anew_starts_a_new_history() -> None:
    history = History()
    history.add(0.0, Page.parse(SECOND))
    history.add(2.0, Page.parse(FIRST))
    seen = history.figures()
    assert seen.output_tokens_per_s is None and seen.whole_life


def test_looks_older_than_a_minute_are_forgotten() -> None:
    history = History()
    for moment in range(0, 200, 2):
        history.add(float(moment), Page.parse(FIRST if moment < 130 else SECOND))
    assert history.figures().latency_s["between_tokens"]["p50"] is None


def test_every_family_is_published() -> None:
    families = [getattr(names, name) for name in ("REQUESTS", "KV_BLOCKS", "BATCHER", "GENERAL", "MEMORY", "INPUT")]
    families += [
        names.OUTPUT,
        names.PREFIX,
        names.SPECULATIVE,
        names.CANCELLED,
        names.GENERATED,
        *names.LATENCIES.values(),
    ]
    assert set(families) <= set(METRICS)
    page = Page.parse(SECOND)
    for name in (names.SUCCEEDED, names.FAILED):
        assert page.label_values(name, "model"), name


def test_the_screen_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(screen(both(), "http://127.0.0.1:8002/metrics", "a note"))
    text = console.export_text()
    assert "…" not in text
    for part in ("active", "out tok/s", "772", "first token", "p99", "of 16,384 blocks of 64 tokens", "a note", "-"):
        assert part in text, part


@pytest.fixture
def page_server() -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """A URL, and the answers that it gives one after another; the last one is repeated."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Quiet: the test says what is wrong."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", answers
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(top, ["--interval", "0.2", *arguments])


def test_once_as_json(page_server: tuple[str, list[tuple[int, str]]]) -> None:
    url, answers = page_server
    answers += [(200, FIRST), (200, SECOND)]
    result = run("--url", url, "--once", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["requests"]["active"] == 62 and shown["whole_life"]
    assert shown["output_tokens_per_s"] > 0


def test_once_as_a_table_also_where_there_is_no_terminal(page_server: tuple[str, list[tuple[int, str]]]) -> None:
    url, answers = page_server
    answers += [(200, FIRST), (200, SECOND)]
    assert "gptoss-trt top" in run("--url", url).stdout


def test_json_lines_until_the_server_goes_away(page_server: tuple[str, list[tuple[int, str]]]) -> None:
    url, answers = page_server
    answers += [(200, FIRST), (200, SECOND), (503, "")]
    result = run("--url", url, "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 and lines[0]["output_tokens_per_s"] is None and lines[1]["output_tokens_per_s"] > 0
    assert result.exit_code == 1 and "status 503" in result.output


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((404, "no"), "status 404"),
        ((200, "<html></html>"), "line 1 is no sample"),
        ((200, "up 1\n"), "has no nv_trt_llm_request_metrics"),
    ],
)
def test_what_is_no_page_of_ours_is_said(
    page_server: tuple[str, list[tuple[int, str]]], answer: tuple[int, str], text: str
) -> None:
    url, answers = page_server
    answers.append(answer)
    result = run("--url", url, "--once")
    assert result.exit_code == 1 and text in result.output


def test_a_model_that_publishes_nothing_is_said(page_server: tuple[str, list[tuple[int, str]]]) -> None:
    url, answers = page_server
    answers.append((200, FIRST))
    assert "those that do: tensorrt_llm" in run("--url", url, "--once", "--model", "chat").output


def test_the_live_view_waits_for_a_server_that_went_away(
    page_server: tuple[str, list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers = page_server
    answers += [(200, FIRST), (503, ""), (200, SECOND)]
    console = Console(width=80, height=30, force_terminal=True, file=io.StringIO())
    drawn: list[str] = []
    naps = iter(range(3))

    def nap(seconds: float) -> None:
        drawn.append(console.file.getvalue())  # type: ignore[attr-defined]
        if next(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", nap)
    with httpx.Client() as client, pytest.raises(KeyboardInterrupt):
        cli._follow_live(client, url, History(), 2.0, console)
    first, gone, back = (drawn[0], drawn[1][len(drawn[0]) :], drawn[2][len(drawn[1]) :])
    assert "first token" in first and "status 503" not in first
    assert "first token" in gone and "status 503" in gone, "the last figures stay"
    assert "status 503" not in back


def test_a_server_that_is_not_there_is_said() -> None:
    result = run("--url", "http://127.0.0.1:1/metrics", "--once")
    assert result.exit_code == 1 and "does not answer" in result.output
