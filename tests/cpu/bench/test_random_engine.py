"""`bench random-engine`: the directory it writes loads, answers and verifies like a built one."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from gptoss_trt.build_engine.inspection import verify
from gptoss_trt.build_engine.random_engine import random_engine
from gptoss_trt.runtime.engine.messages import Finished, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import load_core
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.model.loader import load_weights


def test_an_engine_without_files_is_loaded_and_answers(tmp_path: Path) -> None:
    result = CliRunner().invoke(random_engine, [str(tmp_path / "engine"), "--model", "tiny", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert verify(tmp_path / "engine") == []
    core = load_core(tmp_path / "engine", EngineOptions(device="cpu", threads=1))
    core.submit((0, "a"), Submit("a", (1, 2, 3), 5), 0)
    events = []
    while core.has_work():
        events += [event for _, event in core.step()]
    assert sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) == 5
    assert isinstance(events[-1], Finished)


def test_the_seed_is_the_engine_s(tmp_path: Path) -> None:
    for seed in ("3", "4"):
        assert (
            CliRunner().invoke(random_engine, [str(tmp_path / seed), "--model", "tiny", "--seed", seed]).exit_code == 0
        )
    name = "layers.0.attention.qkv.weight"
    first, again, other = (
        load_weights(tmp_path / seed, 0, torch.device("cpu"), 1)[name] for seed in ("3", "3", "4")
    )  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_engine_that_is_there_is_kept(tmp_path: Path) -> None:
    assert CliRunner().invoke(random_engine, [str(tmp_path / "e"), "--model", "tiny"]).exit_code == 0
    again = CliRunner().invoke(random_engine, [str(tmp_path / "e"), "--model", "tiny", "--seed", "9"])
    assert again.exit_code == 1
    assert "--force" in again.output
