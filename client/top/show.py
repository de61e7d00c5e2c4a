"""Figures as a screen of a terminal.

Invariant: a figure that is None is shown as `-`. Must not know where figures come from.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptoss_trt.client.top.figures import PERCENTILES, Figures

BAR_COLUMNS = 30
CELL_COLUMNS = 11
LATENCY_TITLES = {"ttft": "first token", "between_tokens": "between tokens", "queue": "queue"}


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def milliseconds(value_s: float | None) -> str:
    """Milliseconds with three digits at least; from 10 s on seconds."""
    if value_s is None:
        return "-"
    return f"{value_s:.1f} s" if value_s >= 10 else f"{1000 * value_s:.{0 if value_s >= 0.1 else 1}f} ms"


def mebibytes(value_bytes: float | None) -> str:
    return "-" if value_bytes is None else f"{value_bytes / (1 << 20):,.0f} MiB"


def screen(figures: Figures, source: str, note: str = "") -> RenderableType:
    """The whole view; `note` is a line about the connection."""
    title = Text.assemble(("gptoss-trt top", "bold"), f"  {figures.model} at {source}")
    parts: list[RenderableType] = [title]
    for part in (_requests, _rates, _blocks, _latencies, _counters):
        parts += [Text(), part(figures)]
    if note:
        parts.append(Text(note, style="bold red"))
    return Group(*parts)


def _grid(*cells: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in cells:
        table.add_column(justify="right", no_wrap=True, min_width=CELL_COLUMNS)
    table.add_row(*(Text(name, style="dim") for name, _ in cells))
    table.add_row(*(value for _, value in cells))
    return table


def _requests(figures: Figures) -> Table:
    titles = {"context": "prefill", "max": "max batch"}
    names = ("active", "scheduled", "context", "waiting", "paused", "max")
    return _grid(*((titles.get(name, name), number(figures.requests[name])) for name in names))


def _rates(figures: Figures) -> Table:
    return _grid(
        ("in tok/s", number(figures.input_tokens_per_s)),
        ("out tok/s", number(figures.output_tokens_per_s)),
        ("done/s", number(figures.finished_per_s, 1)),
        ("steps/s", number(figures.steps_per_s, 1)),
        ("CPU mem", mebibytes(figures.memory_bytes["cpu"])),
        ("GPU mem", mebibytes(figures.memory_bytes["gpu"])),
    )


def _blocks(figures: Figures) -> Table:
    blocks = figures.kv_blocks
    used, most = blocks["used"], blocks["max"]
    table = Table.grid(padding=(0, 2))
    text = f"{number(used)} of {number(most)} blocks of {number(blocks['tokens_per'])} tokens"
    table.add_row(
        Text("KV", style="dim"), ProgressBar(total=most or 1.0, completed=used or 0.0, width=BAR_COLUMNS), text
    )
    return table


def _latencies(figures: Figures) -> Table:
    span = "since the start" if figures.whole_life else "last minute"
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column(f"latency, {span}", style="dim", no_wrap=True)
    for rank in PERCENTILES:
        table.add_column(f"p{rank}", justify="right", no_wrap=True, min_width=10)
    for name, title in LATENCY_TITLES.items():
        table.add_row(title, *(milliseconds(figures.latency_s[name][f"p{rank}"]) for rank in PERCENTILES))
    return table


def _counters(figures: Figures) -> Table:
    return _grid(
        ("prefix hits", share(figures.prefix_cache_hit_rate)),
        ("KV reused", number(figures.kv_blocks["reused"])),
        ("drafts ok", share(figures.draft_acceptance)),
        ("cancelled", number(figures.cancelled)),
        ("ok", number(figures.succeeded)),
        ("failed", number(figures.failed)),
    )
