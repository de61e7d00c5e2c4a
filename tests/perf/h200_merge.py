"""Puts a run of h200.sh or served_h200.sh into the results files: `python tests/perf/h200_merge.py FOLDER`.

A decode cell was measured twice: at a client, behind prompts that were read (client.jsonl), and at the engine core,
behind keys made of random numbers (core.jsonl). The line of results/h200.jsonl is the slower of the two, with both
times (client_ms, core_ms), and graph_ms and distinct_experts of the core: behind real prompts the hidden states of a
random model resemble each other, so fewer experts may be in use than uniform routing has, and a cell looks too fast.
One sequence uses as many experts whatever it reads: its cell is the client's, of 400 steps where the core has 20, which
begin at the clock that the cell before has left. A prompt's cell is the client's; its experts are not counted. Cells of
a configuration that are there are replaced, as are those of results/triton_h200.jsonl (triton.jsonl) and
results/trace_h200.jsonl (trace.jsonl).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KEY = ("model", "experts", "dense", "kv", "h_scale", "tp", "kind", "context", "batch", "tokens")
FROM_CORE = ("graph_ms", "distinct_experts")
OF_OLD = {"dense": "bf16"}  # of records that do not say
SERVED = {  # of served_h200.sh: results file and what names a cell there
    "triton.jsonl": ("triton_h200.jsonl", ("model", "dense", "way", "concurrency", "input_tokens", "output_tokens")),
    "trace.jsonl": ("trace_h200.jsonl", ("load", "configuration")),
}


def read(path: Path, names: tuple[str, ...] = KEY) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last record of each cell; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {tuple(record.get(name, OF_OLD.get(name)) for name in names): record for record in map(json.loads, lines)}


def write(path: Path, cells: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in cells.values()), encoding="utf-8")
    print(f"{path}: {len(cells)} cells")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="what h200.sh or served_h200.sh was given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files")
    options = parser.parse_args()
    core, merged = read(options.folder / "core.jsonl"), read(options.results / "h200.jsonl")
    client = read(options.folder / "client.jsonl")
    for cell, seen in client.items():
        inside = core.get(cell)
        at_client = inside is None or seen.get("batch") == 1 or seen["ms"] >= inside["ms"]
        record = seen if at_client else inside
        record["client_ms"] = seen["ms"]
        if inside is not None:
            record |= {"core_ms": inside["ms"], **{name: inside[name] for name in FROM_CORE}}
        merged[cell] = record
    if client:
        write(options.results / "h200.jsonl", merged)
    for name, (results, names) in SERVED.items():
        fresh = read(options.folder / name, names)
        if fresh:
            write(options.results / results, read(options.results / results, names) | fresh)


if __name__ == "__main__":
    main()
