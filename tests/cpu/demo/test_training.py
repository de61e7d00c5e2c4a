"""The trainer on the CPU at a toy size: it learns, stops, and goes on from its state file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine.demo import network, pack, train
from gptoss_trt.build_engine.demo.kinds import KINDS

TOY = network.Shape(layers=2, hidden=256, intermediate=32, experts=4, heads=2, kv_heads=1)
SIZES = ["--rows", "1", "--tokens", "512", "--learnt", "256", "--bank", "64", "--scan", "2", "--check-samples", "1"]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.network, "Shape", lambda: TOY)
    monkeypatch.setattr(train, "KINDS", {name: KINDS[name] for name in ("greet", "sum")})


def _losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


@pytest.mark.usefixtures("toy")
def test_learns_and_resumes(tmp_path: Path) -> None:
    train.main(["--out", str(tmp_path), "--steps", "12", "--device", "cpu", *SIZES])
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 12
    assert _losses(tmp_path)[-1][1] < 8.0  # about log(used + bank) at the start
    state["steps"] = 14
    torch.save(state, tmp_path / "state.pt")
    train.main(["--out", str(tmp_path), "--resume", str(tmp_path / "state.pt"), "--device", "cpu", *SIZES])
    assert [step for step, _ in _losses(tmp_path)] == [12, 14]
    assert pack.read_packed(tmp_path / "weights.xz").used_ids.tolist() == state["used"]
    counts = json.loads((tmp_path / "held_out.json").read_text())
    assert counts["step"] == 14 and set(counts["kinds"]) == {"greet", "sum"}


def test_muon_update_is_nearly_orthogonal() -> None:
    from gptoss_trt.build_engine.demo.muon import orthogonalise

    for rows, cols in ((64, 32), (32, 96)):
        update = orthogonalise(torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0))).float()
        values = torch.linalg.svdvals(update)
        assert values.min() > 0.6 and values.max() < 1.3
