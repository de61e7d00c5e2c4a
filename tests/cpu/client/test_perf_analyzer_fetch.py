"""Fetching perf_analyzer: a wheel unpacked into a cache, libraries linked, and every reason why it cannot be had."""

import importlib.metadata
import os
import platform
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from gptoss_trt.client.bench import perf_analyzer
from gptoss_trt.client.bench.perf_analyzer import MEMBER, UnavailableError, command, fetch, libraries


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: `run.member` is what the wheel holds (None: the download fails)."""

    def run(line, **_options):
        run.lines.append(line)
        if run.member is None:
            return SimpleNamespace(returncode=1, stderr="no network")
        folder = line[line.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/tritonclient.whl", "w") as wheel:
            wheel.writestr(run.member, b'#!/bin/sh\necho ran "$@"\n')
        return SimpleNamespace(returncode=0, stderr="")

    run.lines, run.member = [], MEMBER
    monkeypatch.setattr(perf_analyzer.subprocess, "run", run)
    return run


@pytest.fixture
def pytriton(monkeypatch, tmp_path):
    """A folder as nvidia-pytriton's wheel has it."""
    folder = tmp_path / "site"
    (folder / "nvidia_pytriton.libs").mkdir(parents=True)
    for name in ("libb64-98cb6333.so.0d", "libcudart-09529672.so.12.6.77"):
        (folder / "nvidia_pytriton.libs" / name).touch()
    found = SimpleNamespace(locate_file=lambda name: folder / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: found)
    return folder / "nvidia_pytriton.libs"


def test_the_binary_is_fetched_once(pip, tmp_path):
    binary = fetch(tmp_path)
    assert os.access(binary, os.X_OK)
    assert fetch(tmp_path) == binary
    assert len(pip.lines) == 1
    assert [entry.name for entry in binary.parent.iterdir()] == ["perf_analyzer"]
    assert "tritonclient==2.51.0" in pip.lines[0]


def test_a_failed_download_leaves_nothing_and_says_why(pip, tmp_path):
    pip.member = None
    with pytest.raises(UnavailableError, match="no network"):
        fetch(tmp_path)
    pip.member = "something/else"
    with pytest.raises(UnavailableError, match="holds no"):
        fetch(tmp_path)
    assert list((tmp_path / "2.51.0").iterdir()) == []


def test_another_machine_is_refused_by_name(pip, monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnavailableError, match="aarch64"):
        fetch(tmp_path)


def test_libraries_are_linked_and_follow_a_new_install(pytriton, tmp_path):
    links = libraries(tmp_path)
    assert (links / "libb64.so.0d").readlink() == pytriton / "libb64-98cb6333.so.0d"
    (pytriton / "libb64-98cb6333.so.0d").rename(pytriton / "libb64-11111111.so.0d")
    assert (libraries(tmp_path) / "libb64.so.0d").readlink() == pytriton / "libb64-11111111.so.0d"
    (pytriton / "libcudart-09529672.so.12.6.77").unlink()
    with pytest.raises(UnavailableError, match=r"needs libcudart\.so\.12"):
        libraries(tmp_path)


def test_without_pytriton_the_package_is_named(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UnavailableError, match=r"gptoss-trt\[pypi-server\]"):
        libraries(tmp_path)


def test_the_command_runs_with_the_libraries_first(pip, pytriton, monkeypatch, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    line, environment = command(["-m", "x"], tmp_path)
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path / '2.51.0' / 'lib'}:/other"
    monkeypatch.undo()
    assert subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout == "ran -m x\n"
