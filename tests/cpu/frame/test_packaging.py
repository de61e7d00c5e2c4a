"""The disk, the import root's links and the wheel hold the same files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINKS = {
    "build_engine": "../build_engine",
    "client": "../client",
    "include": "../plugins/include",
    "model_repository": "../model_repository",
    "ops": "../plugins/ops",
    "reference": "../plugins/reference",
    "runtime": "../runtime",
    "triton_kernels": "../plugins/triton_kernels",
}


def tracked() -> list[str]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in result.stdout.split("\0") if name]


def packaged_name(path: str) -> str | None:
    """The name in the wheel of a tracked file, or None when it does not belong there."""
    for link, target in LINKS.items():
        folder = target[3:] + "/"
        if path.startswith(folder):
            return f"gptoss_trt/{link}/{path.removeprefix(folder)}"
    is_root = path.startswith("gptoss_trt/") and not (ROOT / path).is_symlink()
    return path if is_root else None


def test_links_are_relative_and_whole() -> None:
    found = {path.name: str(path.readlink()) for path in (ROOT / "gptoss_trt").iterdir() if path.is_symlink()}
    assert found == LINKS
    assert all((ROOT / "gptoss_trt" / name).is_dir() for name in LINKS)


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of a wheel built without nvcc, from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():  # deleted and not yet committed
            target.write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, "CUDA_HOME": str(folder / "no-cuda")}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, env=environment, check=True, timeout=280)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel_names: set[str]) -> None:
    wanted = {name for name in map(packaged_name, tracked()) if name}
    wanted -= {name for name in wanted if name.endswith(("/.gitkeep", "CMakeLists.txt"))}
    assert wanted - wheel_names == set()


def test_the_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    wanted = {name for name in map(packaged_name, tracked()) if name}
    extra = {name for name in wheel_names if not name.startswith("gptoss_trt-")} - wanted
    assert extra == set()


def test_no_tracked_file_names_a_private_path() -> None:
    """Absolute paths of a developer's machine do not belong in the project."""
    words = ("/" + "work/", "/" + "root/", "python" + "hosted")
    offenders = []
    for name in tracked():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20 and b"\0" not in path.read_bytes():
            text = path.read_text(encoding="utf-8", errors="replace")
            offenders += [f"{name}: {word}" for word in words if word in text]
    assert offenders == []


def test_tracked_files_are_small() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked() if (ROOT / name).is_file()}
    assert {name: size for name, size in sizes.items() if size > 12 * 2**20} == {}
