"""tests/gpu/sanitize.py with a stand-in for compute-sanitizer: verdicts, findings, and an end for what does not end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "gpu" / "sanitize.py"
TOOL = """#!/bin/sh
for group; do :; done  # the last argument
echo "========= COMPUTE-SANITIZER"
case $2-$group in
  racecheck-norms) echo "========= Error: Race reported in some kernel"; echo "========= SUMMARY: 1 hazard"; exit 99 ;;
  memcheck-steps) echo "RuntimeError: of the group itself"; exit 1 ;;
  racecheck-steps) echo "the first case"; echo $$ > "$STAND_IN/pid"; sleep 600 ;;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compute-sanitizer"
    path.write_text(TOOL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return path


def sanitize(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_verdicts_come_with_what_was_found(tool: Path, tmp_path: Path) -> None:
    tools = ("--tools", "memcheck,racecheck", "--logs", str(tmp_path / "logs"))
    done = sanitize("--groups", "norms,steps", "--seconds", "2", "--jobs", "4", *tools)
    verdicts = {tuple(line.split()[:2]): line for line in done.stdout.splitlines() if line[:1].strip()}
    assert "clean" in verdicts["memcheck", "norms"]
    assert "ERRORS" in verdicts["racecheck", "norms"] and "Race reported in some kernel" in done.stdout
    assert "exit 1" in verdicts["memcheck", "steps"] and "of the group itself" in done.stdout
    assert "OUT OF TIME" in verdicts["racecheck", "steps"] and "the first case" in done.stdout
    assert done.returncode == 1
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_groups_beyond_the_time_are_named(tool: Path, tmp_path: Path) -> None:
    logs = ("--logs", str(tmp_path / "logs"))
    done = sanitize("--groups", "steps,norms", "--tools", "racecheck", "--seconds", "1", "--jobs", "1", *logs)
    assert done.returncode == 1 and "norms" in done.stdout and "NOT BEGUN" in done.stdout


def test_all_clean_is_0_and_an_unknown_group_is_refused(tool: Path, tmp_path: Path) -> None:
    assert sanitize("--groups", "norms", "--tools", "memcheck", "--logs", str(tmp_path / "logs")).returncode == 0
    refused = sanitize("--groups", "nrms")
    assert refused.returncode == 2 and "nrms" in refused.stderr and "experts_tiles-down" in refused.stderr
