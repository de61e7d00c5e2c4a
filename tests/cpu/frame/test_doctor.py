"""`gptoss-trt doctor` looks where the engine looks: the library that was built, and a torch that can use the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gptoss_trt.ops import library
from gptoss_trt.runtime.launch import doctor, doctor_cli


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where a library is looked for: two files that are not there yet."""
    found = (tmp_path / "wheel.so", tmp_path / "build.so")
    monkeypatch.setattr(library, "SEARCH_PATHS", found)
    library.load.cache_clear()
    return found


def test_a_library_that_is_nowhere_is_to_be_built(places: tuple[Path, Path]) -> None:
    finding = doctor.library_finding()
    assert (finding.status, finding.action) == ("note", "make library")


@pytest.mark.parametrize("place", [0, 1])
def test_a_library_in_either_place_is_loaded_and_one_that_does_not_load_is_named(
    places: tuple[Path, Path], place: int
) -> None:
    places[place].write_bytes(b"no library")
    finding = doctor.library_finding()
    assert finding.status == "note" and str(places[place]) in finding.detail and "cannot be loaded" in finding.detail


@pytest.mark.parametrize(
    ("card", "usable", "status", "words"),
    [
        (None, False, "note", "no NVIDIA GPU"),
        ("NVIDIA A10, 580.1, 24000 MiB", True, "note", "A10"),
        ("NVIDIA H200, 580.1, 143771 MiB", False, "note", "cannot use it"),
        ("NVIDIA H200, 580.1, 143771 MiB", True, "ok", "H200"),
    ],
)
def test_a_card_is_ok_only_when_torch_can_use_it(
    monkeypatch: pytest.MonkeyPatch, card: str | None, usable: bool, status: str, words: str
) -> None:
    monkeypatch.setattr(doctor, "_first_line", lambda command: card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    finding = doctor.gpu_finding()
    assert finding.status == status and words in finding.detail


def test_extras_in_square_brackets_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.Finding("packages", "missing", "not installed: torch", "pip install 'gptoss-trt[serve]'")
    monkeypatch.setattr(doctor_cli, "examine", lambda: iter([missing]))
    result = CliRunner().invoke(doctor_cli.doctor, env={"COLUMNS": "120"}, standalone_mode=False)
    assert "pip install 'gptoss-trt[serve]'" in result.output
