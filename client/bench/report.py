"""A benchmark's results as JSON lines, as tables and as a text report.

Invariant: tables and lines show the same figures; errors always have a column. Must not know how they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gptoss_trt.client.bench.measure import PERCENTILES

Line = dict[str, Any]
RANKS = tuple(f"p{rank}" for rank in PERCENTILES)
REPORT_COLUMNS = 100


def json_line(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False)


def _number(value: Any, digits: int = 1) -> str:
    """Text of a figure; from a thousand on without decimals."""
    return "-" if value is None else f"{value:,.{0 if abs(value) >= 1000 else digits}f}"


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for position, header in enumerate(headers):
        result.add_column(header, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def throughput_table(lines: Sequence[Line]) -> Table:
    """A row a level: requests, errors, rates; goodput and costs where they were asked for."""
    optional = {"goodput_s": "good\nreq/s", "usd_per_m_input": "USD/M\nin", "usd_per_m_output": "USD/M\nout"}
    shown = [name for name in optional if any(name in line for line in lines)]
    headers = ["load", "requests", "errors", "in\ntok/s", "out\ntok/s", "req/s", *(optional[name] for name in shown)]
    rows = [
        [
            line["load"],
            str(line["requests"]),
            str(sum(line["errors"].values())),
            _number(line["input_tok_s"]),
            _number(line["output_tok_s"]),
            _number(line["requests_s"], 2),
            *(_number(line.get(name), 3) for name in shown),
        ]
        for line in lines
    ]
    return _table("throughput", headers, rows)


def latency_table(lines: Sequence[Line]) -> Table:
    """A row a level: percentiles of TTFT (first token), TPOT (between tokens) and E2E (the whole answer), in ms."""
    measures = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
    headers = ["load", *(f"{name}\n{rank}" for name in measures.values() for rank in RANKS)]
    rows = [
        [line["load"], *(_number(line[measure].get(rank)) for measure in measures for rank in RANKS)] for line in lines
    ]
    return _table("latency, ms: first token, between tokens, whole answer", headers, rows)


def print_tables(lines: Sequence[Line], console: Console) -> None:
    """Both tables, then one line for each level that had errors."""
    console.print(throughput_table(lines))
    console.print(latency_table(lines))
    for line in lines:
        if line["errors"]:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(line["errors"].items()))
            console.print(f"{line['load']}: {counts}; first: {line['first_error']}", markup=False, highlight=False)


def write_report(path: Path, settings: Line, lines: Sequence[Line]) -> None:
    """A text file with the settings, the tables and the errors."""
    with path.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=REPORT_COLUMNS, color_system=None, force_terminal=False)
        for name, value in settings.items():
            console.print(f"{name}: {value}", markup=False, highlight=False)
        console.print()
        print_tables(lines, console)
