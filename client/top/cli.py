"""The `gptoss-trt top` command: looks at a metrics page again and again, and shows what changed.

Invariant: stdout holds the view or JSON lines, nothing else; a server that goes away is said and waited for in the live
view, and an error in --once. Must not know how figures are worked out.
"""

from __future__ import annotations

import json
import time

import click
import httpx
from rich.console import Console
from rich.live import Live

from gptoss_trt.client.top.figures import Figures, History
from gptoss_trt.client.top.page import Page, PageError
from gptoss_trt.client.top.show import screen

DEFAULT_URL = "http://127.0.0.1:8002/metrics"
TIMEOUT_S = 5.0
EPILOG = """\b
Examples:
  gptoss-trt top
  gptoss-trt top --url http://127.0.0.1:9002/metrics --interval 5
  gptoss-trt top --once --json | jq .requests.waiting

active: requests in the engine; of these, scheduled are in its steps, prefill still read their prompt, waiting are in
the queue, paused gave their KV blocks back. max batch: sequences in one step. prefix hits: share of prompt tokens
found in the prefix cache. KV reused: cached blocks that a prompt used again. in tok/s and done/s count a request at its
end.

Percentiles are of the last minute. --once takes two looks, an interval apart; its percentiles are of the server's whole
life.
"""


class NoPageError(Exception):
    """No metrics page could be had; the text says why."""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server's metrics page.")
@click.option("--model", help="Model whose engine is shown.  [default: the first on the page]")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.2), default=2.0, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Show one view and end.")
@click.option("--json", "as_json", is_flag=True, help="A JSON line for each view.")
def top(url: str, model: str | None, interval_s: float, once: bool, as_json: bool) -> int:
    """Show requests, queue, KV blocks, tokens/s and latency of a server, live."""
    history = History(model)
    console = Console()
    try:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            if once or (not as_json and not console.is_terminal):
                figures = _two_looks(client, url, history, interval_s)
                if as_json:
                    click.echo(json.dumps(figures.as_dict()))
                else:
                    console.print(screen(figures, url))
            elif as_json:
                _follow_json(client, url, history, interval_s)
            else:
                _follow_live(client, url, history, interval_s, console)
    except (NoPageError, LookupError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        return 0
    return 0


def look(client: httpx.Client, url: str) -> Page:
    """One look at the page. Raises NoPageError."""
    try:
        answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoPageError(f"{url} does not answer: {error}; is the server up, and is this its metrics port?") from error
    if answer.status_code != httpx.codes.OK:
        raise NoPageError(
            f"{url} answers with status {answer.status_code}; the page is at /metrics of the metrics port"
        )
    try:
        return Page.parse(answer.text)
    except PageError as error:
        raise NoPageError(f"{url} is no metrics page: {error}") from error


def _two_looks(client: httpx.Client, url: str, history: History, interval_s: float) -> Figures:
    history.add(time.monotonic(), look(client, url))
    time.sleep(interval_s)
    history.add(time.monotonic(), look(client, url))
    return history.figures(whole_life=True)


def _follow_json(client: httpx.Client, url: str, history: History, interval_s: float) -> None:
    while True:
        history.add(time.monotonic(), look(client, url))
        click.echo(json.dumps({"time": round(time.time(), 3), **history.figures().as_dict()}))
        time.sleep(interval_s)


def _follow_live(client: httpx.Client, url: str, history: History, interval_s: float, console: Console) -> None:
    """Redraws until Ctrl-C. The first look must succeed; later ones that fail are noted under the last figures."""
    history.add(time.monotonic(), look(client, url))
    figures, note = history.figures(), ""
    with Live(screen(figures, url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(figures, url, note), refresh=True)
            time.sleep(interval_s)
            try:
                history.add(time.monotonic(), look(client, url))
                figures, note = history.figures(), ""
            except (NoPageError, LookupError) as error:
                note = f"{time.strftime('%H:%M:%S')}  {error}"
