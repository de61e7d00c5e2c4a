"""The test runner's rules: a skip outside the gpu tier, an empty tier and a crash of pytest are failures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("runner", ROOT / "tests" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runner"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report by pytest itself, with every outcome once."""
    folder = tmp_path_factory.mktemp("outcomes")
    (folder / "test_outcomes.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_skips(): pytest.skip('no card')\n"
        "@pytest.mark.xfail(strict=True)\ndef test_expected(): assert False\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError\n"
        "def test_error(broken): pass\n"
    )
    path = folder / "report.xml"
    pytest.main([str(folder), "-q", "-p", "no:cacheprovider", f"--junitxml={path}", "--rootdir", str(folder)])
    return path


def test_outcomes_are_counted(runner: ModuleType, report: Path) -> None:
    tally = runner.read_report(report)
    assert dict(tally.counts) == {"passed": 1, "failed": 2, "skipped": 1, "xfailed": 1}
    assert [name.split("::")[1] for name in tally.skipped] == ["test_skips"]


def test_a_skip_counts_against_every_tier_but_the_gpus(runner: ModuleType, report: Path) -> None:
    tally = runner.read_report(report)
    assert len(runner.problems_of("server", tally, 1)) == 1
    assert runner.problems_of("gpu", tally, 1) == []


def test_an_empty_tier_and_a_crash_are_problems(runner: ModuleType) -> None:
    assert runner.problems_of("server", runner.Tally(), 5) == ["the server tier ran nothing"]
    assert runner.problems_of("gpu", runner.Tally(), 5) == []
    assert runner.problems_of("gpu", runner.Tally(), 3) == ["the gpu tier ended with pytest's status 3"]
