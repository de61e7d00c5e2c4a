"""Puts a run of h200.sh into the results file: `python tests/perf/h200_merge.py FOLDER`.

A line of results/h200.jsonl is a cell as the client saw it (client.jsonl), with graph_ms and distinct_experts of that
cell in core.jsonl, which a client cannot see; `graph_share` is graph_ms / ms. Cells of the same configuration that are
there already are replaced.
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
    for cell, record in read(options.folder / "client.jsonl").items():
        for name in FROM_CORE:
            record[name] = core[cell][name] if cell in core else None
        if record["graph_ms"] is not None:
            record["graph_share"] = round(record["graph_ms"] / record["ms"], 3)
        merged[cell] = record
    options.results.write_text("".join(json.dumps(record) + "\n" for record in merged.values()), encoding="utf-8")
    print(f"{options.results}: {len(merged)} cells")


if __name__ == "__main__":
    main()
