"""tests/perf/served_trace.py before it serves anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tests" / "perf" / "served_trace.py"


@pytest.mark.parametrize("loads", [("--in-flight=256", "--rates=20,32"), ("--in-flight=0", "--rates=20,20")])
def test_loads_with_the_same_prompts_are_refused(tmp_path: Path, loads: tuple[str, str]) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--out", str(tmp_path / "out"), *loads]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the same prompts" in done.stderr and not (tmp_path / "out").exists()
