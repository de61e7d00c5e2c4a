"""Which plan an engine follows: its own, the one of its GPU, or none; and where that is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gptoss_trt.ops import plan
from gptoss_trt.ops.library import ABI_VERSION
from gptoss_trt.runtime.engine import model_core
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.kernel_plan import use_plan
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.launch import doctor

QKV = (5120, 2880)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    plan.activate(None)


def put(engine: Path, text: str) -> None:
    path = plan.engine_file(engine, "NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_gpus_plan_is_followed_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        use_plan(tmp_path, "cuda")
    assert caplog.messages == ["plan of kernels: shipped for NVIDIA H200"]
    assert plan.choices("dense_fp8", QKV) is not None


def test_a_gpu_without_one_has_the_built_in_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_plan(tmp_path, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 PCIe")
    with caplog.at_level(logging.INFO):
        use_plan(tmp_path, "cuda")
    assert caplog.messages == ["plan of kernels: built-in rule (none shipped for NVIDIA H100 PCIe)"]
    assert plan.choices("dense_fp8", QKV) is None
    finding = doctor.plan_finding()
    assert (finding.status, finding.action) == ("note", "gptoss-trt build ENGINE_DIR --tune measures one")


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", True)])
def test_a_cpu_and_deterministic_engines_follow_none(tmp_path: Path, device: str, deterministic: bool) -> None:
    put(tmp_path, "not read")
    plan.activate(plan.select("NVIDIA H200").table)
    use_plan(tmp_path, device, deterministic=deterministic)
    assert plan.choices("dense_fp8", QKV) is None


def test_a_bad_plan_of_the_engine_stops_its_load(tmp_path: Path) -> None:
    put(tmp_path, f'{{"version": 1, "gpu": "NVIDIA H200", "abi": {ABI_VERSION}, "ops": {{"rope": {{}}}}}}')
    with pytest.raises(EngineLoadError, match="unknown op 'rope'"):
        model_core._choose_kernels(tmp_path, EngineOptions(), "cuda")


def test_a_draft_engines_plan_holds_for_shapes_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It goes before the plan that is shipped, and behind the target's."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    head = f'{{"version": 1, "gpu": "NVIDIA H200", "abi": {ABI_VERSION}, "ops": {{"dense_fp8": '
    put(target, head + '{"640x128": [[null, "64/2"]]}}}')
    put(draft, head + '{"640x128": [[null, "64/1"]], "5120x2880": [[null, "256/1"]], "96x64": [[null, "64/3"]]}}}')
    options = EngineOptions(speculation="draft", draft_engine=str(draft))
    with caplog.at_level(logging.INFO):
        model_core._choose_kernels(target, options, "cuda")
    names = {shape: plan.choices("dense_fp8", shape) for shape in ((640, 128), QKV, (96, 64))}
    assert [found and found.at(1) for found in names.values()] == ["64/2", "256/1", "64/3"]
    assert f"{target}/tune/NVIDIA_H200.json; {draft}/tune/NVIDIA_H200.json; shipped for" in caplog.text


def test_doctor_names_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.plan_finding() == doctor.Finding("kernel plan", "ok", "shipped for NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.plan_finding().detail == "none needed without a GPU"
