"""`gptoss-trt doctor`: the findings as a table, or as JSON."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptoss_trt.runtime.launch.doctor import Finding, examine

COLOURS = {"ok": "green", "note": "yellow", "missing": "red"}
EPILOG = """\b
Examples:
  gptoss-trt doctor
  gptoss-trt doctor --json | jq '.[] | select(.status != "ok")'
\b
Exit status 1 when something that `serve` needs is missing.
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as a JSON list.")
def doctor(as_json: bool) -> int:
    """Say what this machine can and cannot do, and what to do about it."""
    findings = list(examine())
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        Console().print(_table(findings))
    return 1 if any(finding.status == "missing" for finding in findings) else 0


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.status]
        # Text, not markup: the extras of `pip install 'gptoss-trt[serve]'` would be taken for a style.
        table.add_row(Text(finding.status, colour), *map(Text, (finding.name, finding.detail, finding.action)))
    return table
