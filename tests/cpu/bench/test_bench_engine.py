"""`bench engine` and `bench ops` on a CPU with the tiny model: records, refusals, cells that fail."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.client.bench.cli import bench
from gptoss_trt.runtime.bench.cells import Bench
from gptoss_trt.runtime.bench.op_cases import Cases
from gptoss_trt.runtime.bench.record import Cell, Setting, line, record

FIELDS = {
    "card", "commit", "date", "model", "experts", "dense", "kv", "weight_layout", "h_scale", "tp", "kind", "context",
    "ms", "graph_ms", "tok_s", "distinct_experts", "share_of_bound", "usd_per_mtok",
}  # fmt: skip
TINY = ("engine", "--model", "tiny", "--random", "--device", "cpu", "--block-tokens", "16", "--quick", "--steps", "3")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, [*arguments], catch_exceptions=False)


def records(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_operators_of_a_cpu_need_no_triton(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['triton'] = None; from gptoss_trt.client.cli import main; main()"
    arguments = ("bench", "ops", "--model", "tiny", "--device", "cpu", "--batch", "2", "--op", "attention_decode")
    command = [sys.executable, "-c", hidden, *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, check=True).stdout
    assert json.loads(printed.splitlines()[0])["op"] == "attention_decode"


def test_every_cell_is_one_record(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    result = run(*TINY, "--decode", "40:1,3", "--prefill", "20", "--json", "--commit", "abc", "--out", str(out))
    assert result.exit_code == 0, result.output
    first, second, third = records(result)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [first, second, third]
    assert set(first) >= FIELDS | {"batch"} and set(third) >= FIELDS | {"tokens"}
    assert (first["batch"], second["batch"], third["tokens"]) == (1, 3, 20)
    assert first["commit"] == "abc" and first["graph_ms"] is None and first["kv_fill"] == "random"
    assert first["distinct_experts"] == 4.0
    for values in (first, second, third):
        count = values.get("batch", values.get("tokens"))
        assert values["tok_s"] == pytest.approx(count / values["ms"] * 1e3, rel=1e-2)  # type: ignore[operator]
        cost = 3.0 / 3600 / values["tok_s"] * 1e6  # type: ignore[operator]
        assert values["usd_per_mtok"] == pytest.approx(cost, rel=1e-2)


def test_cells_at_the_client_of_an_engine_process(tmp_path: Path) -> None:
    result = run(
        *TINY, "--decode", "30:1,2", "--prefill", "20", "--json", "--at", "client", "--serial", "--deterministic"
    )
    assert result.exit_code == 0, result.output
    alone, decode, prefill = records(result)
    assert set(decode) >= FIELDS | {"batch"} and set(prefill) >= FIELDS | {"tokens"}
    for values in (alone, decode, prefill):
        assert values["measured_at"] == "client process" and values["run_ahead"] is False
        assert values["deterministic"] is True
        assert values["graph_ms"] is None and values["distinct_experts"] is None
        assert values["ms"] > 0  # type: ignore[operator]
    assert alone["steps"] >= 12 and 3 <= decode["steps"] < 12  # type: ignore[operator]


def test_fp8_storages_and_people_s_lines() -> None:
    result = run(*TINY, "--decode", "20:2", "--experts", "fp8_block128", "--dense", "fp8_block128", "--layers", "3")
    assert result.exit_code == 0, result.output
    assert "tiny decode batch 2 at 20" in result.stdout and "tokens/s" in result.stdout


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_line_to_read_has_bound_and_price_of_a_card_only(on_gpu: bool) -> None:
    setting = Setting("gpt-oss-20b", Formats("mxfp4", "bf16", "bf16", "static"), "card", "abc", 3.0, on_gpu)
    values = record(setting, Cell("decode", 1024, 64, 5.0, 4.0, None, None, {}))
    text = line(values, False, on_gpu)
    assert "12,800 tokens/s" in text
    assert ("80% of the bound" in text, "USD/Mtok" in text) == (on_gpu, on_gpu)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("engine", "--model", "tiny"), "either --random or --engine"),
        ((*TINY, "--decode", "1024"), "not a context and batch sizes"),
        ((*TINY, "--prefill", "0,4"), "the least is 1"),
        ((*TINY, "--prefill", "a"), "not a list of numbers"),
        (("ops", "--op", "moe_rout"), "no case for operator 'moe_rout'"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and text in result.output


def test_a_cell_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Bench, context: int, batch: int) -> object:
        raise RuntimeError(f"no memory for {batch} at {context}")

    monkeypatch.setattr(Bench, "decode", broken)
    result = run(*TINY, "--decode", "20:2", "--prefill", "10", "--json")
    assert result.exit_code == 1
    assert [values["kind"] for values in records(result)] == ["prefill"]
    assert "no memory for 2 at 20" in result.stderr and "1 cells failed" in result.stderr


def test_a_cell_behind_the_models_context_is_named() -> None:
    result = run(*TINY, "--decode", "5000:2", "--prefill", "5000", "--json")
    assert result.exit_code == 1 and "2 cells failed" in result.stderr
    for what in ("decode of 2 at 5000", "prefill of 5000"):
        assert f"{what}: RuntimeError: prompt of 5000 tokens: INVALID_ARGUMENT" in result.stderr
    assert result.stderr.count("the context is 4096 tokens") == 2


def test_every_op_has_a_case(tmp_path: Path) -> None:
    out = tmp_path / "ops.jsonl"
    result = run("ops", "--model", "tiny", "--device", "cpu", "--batch", "2", "--prefill", "5", "--context", "70",
                 "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    found = {values["op"] for values in records(result)}
    assert found == {
        "embedding", "rmsnorm_quant", "dense", "kv_slots", "rope_kv_append", "attention_decode", "attention_prefill",
        "moe_route", "rmsnorm_route", "moe_gate_up", "moe_down", "moe_combine_norm",
        "sample", "feed",
    }  # fmt: skip
    for values in records(result):
        assert values["us"] > 0 and values["implementation"] == "cpu"  # type: ignore[operator]
        assert values["context"] == (70 if values["kind"] == "decode" else 5)
        assert (values["experts"], values["dense"], values["h_scale"]) == ("mxfp4", "bf16", "static")


def test_dense_fp8_has_the_ops_that_its_steps_call() -> None:
    result = run("ops", "--model", "tiny", "--device", "cpu", "--batch", "2", "--prefill", "5", "--context", "70",
                 "--dense", "fp8_block128", "--op", "rope_kv_append", "--op", "attention_decode",
                 "--op", "attention_prefill")  # fmt: skip
    assert result.exit_code == 0, result.output
    counts = Counter(values["op"] for values in records(result))
    plain = {"rope_kv_append": 2, "attention_decode": 2, "attention_prefill": 2}
    together = {"dense_fp8_rope_kv_append": 2, "attention_decode_quant": 2, "attention_prefill_quant": 2}
    assert counts == {**plain, **together}


@pytest.mark.parametrize(
    ("experts", "h_scale"), [("mxfp4", "static"), ("fp8_block128", "static"), ("mxfp4", "block128")]
)
def test_many_tokens_go_to_what_a_step_of_them_calls(experts: str, h_scale: str) -> None:
    """Copies of experts, the residual that has attention's part already, the product that adds to it."""
    result = run("ops", "--model", "tiny", "--device", "cpu", "--batch", "2", "--prefill", "520", "--experts", experts,
                 "--dense", "fp8_block128", "--h-scale", h_scale, "--op", "moe_gate_up", "--op", "moe_down",
                 "--op", "rmsnorm_route", "--op", "dense")  # fmt: skip
    assert result.exit_code == 0, result.output
    few, many = ([r for r in records(result) if r["kind"] == kind] for kind in ("decode", "prefill"))
    assert not any("copies" in str(r["what"]) for r in few) and all(r["op"] != "dense_fp8_add" for r in few)
    copied = [r["op"] for r in many if "copies" in str(r["what"])]
    assert copied == (["moe_gate_up", "moe_down"] if h_scale == "static" else [])
    assert sum(r["op"] in ("moe_gate_up", "moe_down") for r in many) == 2 + len(copied)
    assert [r["what"] for r in [*few, *many] if r["op"] == "rmsnorm_route"] == ["", "without delta"]
    assert any(r["op"] == "dense_fp8_add" for r in many)


def test_copies_are_products_of_the_same_values() -> None:
    """A case from FP8 copies writes what the one from the storage as loaded does."""
    cases = Cases(model_config("tiny"), Formats(), torch.device("cpu"), 0)
    written = []
    for copied in (False, True):
        torch.manual_seed(1)
        case = cases._experts(300, False, copied)
        case.call(0)
        written.append(inspect.getclosurevars(case.call).nonlocals["out"].clone())
    assert torch.equal(*written)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--engine", "nowhere"), 1, "Error: nowhere is not an engine directory"),
        (("--engine", "nowhere", "--at", "client"), 1, "nowhere"),
        (("--random", "--model", "tiny", "--device", "cuda"), 2, "--device is cuda, but torch"),
    ],
)
def test_what_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("engine", *arguments, "--decode", "20:1", "--quick")
    assert result.exit_code == status and message in result.output, result.output
