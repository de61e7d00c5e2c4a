"""One measured cell as the record that results files hold, and as a line for people.

Invariant: the keys and their words are the same for every cell; a rate or cost that was not measured is null. Must not
know how a cell is measured.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gptoss_trt.build_engine.spec import Formats

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Setting:
    """What all cells of a run share."""

    model: str
    formats: Formats
    card: str
    commit: str
    usd_per_hour: float
    on_gpu: bool


@dataclass(frozen=True)
class Cell:
    """One measurement: milliseconds of a decode step or of a prompt, the graph's own time where it was measured, the
    mean number of distinct experts a layer likewise, the bound's milliseconds, and what else was noted."""

    kind: Kind
    context: int
    tokens: int  # of a step: the batch in decode, the prompt in prefill
    ms: float
    bound_ms: float
    graph_ms: float | None
    distinct_experts: float | None
    notes: dict[str, Any]


def record(setting: Setting, cell: Cell) -> dict[str, Any]:
    """The JSON object of a cell."""
    formats, tok_s = setting.formats, cell.tokens / cell.ms * 1e3
    return {
        "card": setting.card,
        "commit": setting.commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "model": setting.model,
        "experts": formats.experts,
        "dense": formats.dense,
        "kv": formats.kv,
        "weight_layout": formats.weight_layout,
        "h_scale": formats.h_scale,
        "tp": 1,
        "kind": cell.kind,
        "context": cell.context,
        ("batch" if cell.kind == "decode" else "tokens"): cell.tokens,
        "ms": round(cell.ms, 4),
        "graph_ms": None if cell.graph_ms is None else round(cell.graph_ms, 4),
        "tok_s": round(tok_s, 1),
        "distinct_experts": None if cell.distinct_experts is None else round(cell.distinct_experts, 2),
        "share_of_bound": round(cell.bound_ms / cell.ms, 4),
        "usd_per_mtok": round(setting.usd_per_hour / 3600 / tok_s * 1e6, 4),
        **cell.notes,
    }


def line(values: dict[str, Any], as_json: bool, on_gpu: bool) -> str:
    """A record as JSON, or as one line to read; the card's bound and price are left out of a CPU's."""
    if as_json:
        return json.dumps(values)
    size = f"batch {values['batch']}" if values["kind"] == "decode" else f"{values['tokens']} tokens"
    graph = "" if values["graph_ms"] is None else f" (graph {values['graph_ms']:.3f})"
    text = f"{values['model']} {values['kind']} {size} at {values['context']}: {values['ms']:.3f} ms{graph}"
    text += f", {values['tok_s']:,.0f} tokens/s"
    if on_gpu:
        text += f", {100 * values['share_of_bound']:.0f}% of the bound, {values['usd_per_mtok']:.3f} USD/Mtok"
    return text


def card_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def source_commit() -> str:
    """The commit of the clone that this module runs from, "unknown" outside one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"
