"""Runs of h200.sh and served_h200.sh go into the results files: a cell is replaced by its newer one, others stay."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PERF = Path(__file__).parents[2] / "perf"
OLD = {"model": "gpt-oss-20b", "input_tokens": 1024, "output_tokens": 256, "all_tok_s": 1.0, "tokens_a_response": 1.0}


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def merged(folder: Path) -> None:
    subprocess.run(
        [sys.executable, str(PERF / "h200_merge.py"), str(folder), "--results", str(folder / "results")], check=True
    )


def served(way: str, concurrency: int, tok_s: float, **more: Any) -> dict[str, Any]:
    return OLD | {"way": way, "concurrency": concurrency, "tok_s": tok_s} | more


def served_rows(file: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("h200_report", PERF / "h200_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: list[str] = module.served_rows(file)
    return rows


def test_served_cells_are_replaced_by_format_of_dense_products(tmp_path: Path) -> None:
    file = tmp_path / "results" / "triton_h200.jsonl"
    lines(file, served("engine", 1, 10.0), served("tensorrt_llm", 1, 11.0), served("engine", 8, 12.0))
    fp8 = [
        served(way, 1, tok_s, dense="fp8_block128", tpot_ms={"p50": 1e3 / tok_s, "max": 99.0})
        for tok_s in (19.0, 20.0)  # a cell is measured again: its last line stands
        for way in ("engine", "tensorrt_llm")
    ]
    lines(tmp_path / "triton.jsonl", served("engine", 1, 13.0, dense="bf16"), *fp8)
    merged(tmp_path)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["tok_s"] for record in kept] == [13.0, 11.0, 12.0, 20.0, 20.0]
    table = served_rows(file)
    assert table[0] == "| dense BF16, tokens/s | 1 stream | 8 |" and "| dense FP8, tokens/s | 1 stream |" in table
    assert table[2:4] == ["| over gRPC, all streams decoding | 11 |  |", "| at the engine's socket | 13 | 12 |"]
    assert table.count("| at the engine's socket | 20 |") == 1
    # Old records have no times between tokens.
    assert [row for row in table if "ms between" in row] == [
        "| over gRPC, ms between tokens | 50.00 |", "| at the engine's socket, ms between tokens | 50.00 |",
    ]  # fmt: skip


def test_a_run_of_cells_leaves_served_results_alone(tmp_path: Path) -> None:
    alone = {"model": "gpt-oss-20b", "dense": "bf16", "kind": "decode", "context": 1024, "batch": 1}
    eight, prompt = alone | {"batch": 8}, {"model": "gpt-oss-20b", "dense": "bf16", "kind": "prefill", "tokens": 8192}
    lines(tmp_path / "client.jsonl", alone | {"ms": 2.0}, eight | {"ms": 4.0}, prompt | {"ms": 70.0})
    core = {"graph_ms": 2.5, "distinct_experts": 4.0}
    lines(tmp_path / "core.jsonl", alone | {"ms": 3.0} | core, eight | {"ms": 5.0} | core)
    lines(tmp_path / "results" / "h200.jsonl", alone | {"ms": 9.0}, alone | {"batch": 32, "ms": 9.0})
    lines(tmp_path / "results" / "trace_h200.jsonl", {"load": "l", "configuration": "c"})
    merged(tmp_path)
    found = [json.loads(line) for line in (tmp_path / "results" / "h200.jsonl").read_text().splitlines()]
    cells = [(record.get("batch"), record["ms"]) for record in found]
    assert cells == [(1, 2.0), (32, 9.0), (8, 5.0), (None, 70.0)]
    assert found[0]["client_ms"] == 2.0 and found[0]["core_ms"] == 3.0 and found[0]["graph_ms"] == 2.5
    assert (tmp_path / "results" / "trace_h200.jsonl").read_text() == '{"load": "l", "configuration": "c"}\n'
    assert not (tmp_path / "results" / "triton_h200.jsonl").exists()
