"""Plan files on a card: the shipped one gives the built-in rule's bits, and a measured one is written and followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine import tune
from gptoss_trt.build_engine.random_engine import write_random_engine
from gptoss_trt.build_engine.spec import Dense, Formats, Manifest
from gptoss_trt.build_engine.tune_cases import subjects
from gptoss_trt.ops import plan

pytestmark = pytest.mark.gpu
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def built_in() -> Iterator[None]:
    yield
    plan.activate(None)


def engine(folder: Path, dense: Dense) -> Path:
    write_random_engine(folder / "engine", "gpt-oss-20b", Formats("mxfp4", dense, "bf16", "static"), layers=1)
    return folder / "engine"


@pytest.mark.parametrize("dense", ["bf16", "fp8_block128"])
def test_the_shipped_plan_changes_no_bit(tmp_path: Path, dense: Dense) -> None:
    manifest = Manifest.read(engine(tmp_path, dense))
    for subject in subjects(manifest, torch.device("cuda")):
        for tokens in (1, 5, 8, 65, 200, 257, 1024):
            case, found = subject.make(tokens), []
            for table in (None, plan.select(GPU).table):
                plan.activate(table)
                for output, _ in case.outputs:
                    output.zero_()
                case.call("", 0)
                found.append([output.view(torch.uint8).clone() for output, _ in case.outputs])
            plan.activate(None)
            assert all(bool(output.any()) for output in found[0])
            assert all(map(torch.equal, *found)), (subject.op, subject.shape, tokens)


def test_a_measured_plan_is_written_and_followed(tmp_path: Path) -> None:
    folder, rows = engine(tmp_path, "fp8_block128"), []
    tune.tune_engine(folder, rows.append, ops=("dense_fp8",), tokens=(1, 64))
    assert len(rows) == 6 and all(row.seconds[row.chosen] for row in rows)
    selected = plan.select(torch.cuda.get_device_name(), folder)
    assert {row.chosen for row in rows if row.shape == (2880, 4096) and row.tokens == 64} == {
        selected.table["dense_fp8"][2880, 4096].at(64)
    }
