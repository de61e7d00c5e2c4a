"""Runs every tier that needs no GPU, and fails on what a plain pytest run would let pass.

A skip outside the gpu tier is a failure, and so is a cpu, interpret or server tier that ran nothing. Arguments go to
pytest. Closes with one line: `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "build" / "tests"
WORKERS = str(min(os.cpu_count() or 1, 4))
# The server tier measures times and owns ports, so it runs alone; the others share the cores.
TIERS = {
    "cpu": ("-n", WORKERS, "--dist", "worksteal"),
    "interpret": ("-n", WORKERS, "--dist", "worksteal"),
    "server": (),
    "gpu": (),
}
MUST_RUN = ("cpu", "interpret", "server")
EXIT_NO_TESTS = 5


@dataclass
class Tally:
    """Outcomes of one tier, read from pytest's JUnit report."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)

    @property
    def ran(self) -> int:
        return self.counts["passed"] + self.counts["failed"]


def read_report(path: Path) -> Tally:
    """Counts the test cases of a report; an expected failure counts as itself, not as a skip."""
    tally = Tally()
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag: child for child in case}
        skip = outcomes.get("skipped")
        if "failure" in outcomes or "error" in outcomes:
            tally.counts["failed"] += 1
        elif skip is not None and skip.get("type") == "pytest.xfail":
            tally.counts["xfailed"] += 1
        elif skip is not None:
            tally.counts["skipped"] += 1
            tally.skipped.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            tally.counts["passed"] += 1
    return tally


def run_tier(tier: str, options: tuple[str, ...]) -> tuple[Tally, int]:
    """Runs one tier in a process of its own; returns its outcomes and pytest's exit status."""
    report = REPORTS / f"{tier}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"tests/{tier}", "-q", "--durations=10", f"--junitxml={report}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    status = subprocess.run([*command, *options, *sys.argv[1:]], cwd=ROOT, env=environment, check=False).returncode
    return (read_report(report) if report.exists() else Tally()), status


def problems_of(tier: str, tally: Tally, status: int) -> list[str]:
    """What is wrong with a tier beyond its failed tests."""
    found = [f"skipped outside the gpu tier: {name}" for name in tally.skipped if tier != "gpu"]
    if tier in MUST_RUN and not tally.ran:
        found.append(f"the {tier} tier ran nothing")
    if status not in (0, EXIT_NO_TESTS) and not tally.counts["failed"]:
        found.append(f"the {tier} tier ended with pytest's status {status}")
    return found


def main() -> int:
    """Runs the tiers one after another; returns 0 when all of it held."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    total: Counter[str] = Counter()
    problems: list[str] = []
    lines = []
    for tier, options in TIERS.items():
        begun = time.monotonic()
        tally, status = run_tier(tier, options)
        total += tally.counts
        problems += problems_of(tier, tally, status)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.counts.items())) or "nothing ran"
        lines.append(f"{tier}: {told} in {time.monotonic() - begun:.0f} s")
    print("\n".join([*lines, *(f"FAILED {problem}" for problem in problems)]))
    failed = total["failed"] + len(problems)
    print(f"took {time.monotonic() - start:.0f} s")
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
