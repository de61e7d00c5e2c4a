"""Puts a run of h200.sh into the results file: `python tests/perf/h200_merge.py FOLDER`.

A decode cell was measured twice: at a client, behind prompts that were read (client.jsonl), and at the engine core,
behind keys made of random numbers (core.jsonl). The line of results/h200.jsonl is the slower of the two, with both
times (client_ms, core_ms), and graph_ms and distinct_experts of the core: behind real prompts the hidden states of a
random model resemble each other, so fewer experts may be in use than uniform routing has, and a cell looks too fast.
A prompt's cell is the client's; its experts are not counted. Cells of a configuration that are there are replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200.jsonl"
KEY = ("model", "experts", "dense", "kv", "h_scale", "tp", "kind", "context", "batch", "tokens")
FROM_CORE = ("graph_ms", "distinct_experts")


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in KEY)


def read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {key(record): record for record in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="what h200.sh was given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    core, merged = read(options.folder / "core.jsonl"), read(options.results)
    for cell, seen in read(options.folder / "client.jsonl").items():
        inside = core.get(cell)
        record = seen if inside is None or seen["ms"] >= inside["ms"] else inside
        record["client_ms"] = seen["ms"]
        if inside is not None:
            record |= {"core_ms": inside["ms"], **{name: inside[name] for name in FROM_CORE}}
        merged[cell] = record
    options.results.write_text("".join(json.dumps(record) + "\n" for record in merged.values()), encoding="utf-8")
    print(f"{options.results}: {len(merged)} cells")


if __name__ == "__main__":
    main()
