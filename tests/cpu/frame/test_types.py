"""mypy is strict on every shipped package: an error planted in each is reported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("build_engine", "client", "runtime", "plugins/ops", "plugins/reference", "plugins/triton_kernels")
PLANTED = "def planted(x):\n    return x\n\n\nvalue: int = 'text'\n"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """mypy's output over a copy of the tree's skeleton with one bad module in each package."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "gptoss_trt").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(ROOT / "gptoss_trt" / name, tree / "gptoss_trt")
    for link in (ROOT / "gptoss_trt").iterdir():
        if link.is_symlink() and link.name not in ("include", "model_repository"):
            (tree / "gptoss_trt" / link.name).symlink_to(link.readlink())
    for package in PACKAGES:
        folder = tree / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "planted.py").write_text(PLANTED)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_planted_error_is_reported(report: str, package: str) -> None:
    where = f"gptoss_trt/{package.removeprefix('plugins/')}/planted.py"
    assert f"{where}:1: error: Function is missing a type annotation" in report
    assert f"{where}:5: error: Incompatible types in assignment" in report
