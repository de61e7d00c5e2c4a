"""Runs every tier that needs no GPU, and fails on what a plain pytest run would let pass.

A skip outside the gpu tier is a failure, and so is a server or interpret tier that ran nothing. Closes with one line:
`N passed, N failed, N skipped`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TIERS = ("cpu", "interpret", "server")
MUST_RUN = ("cpu", "interpret", "server")


class Tally:
    """A pytest plugin that counts outcomes by tier (the first folder below tests/)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.unexpected_skips: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = Path(report.nodeid.split("::")[0]).parts[1]
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.counts[tier, outcome] += 1
            if outcome == "skipped" and tier != "gpu":
                self.unexpected_skips.append(report.nodeid)
        elif report.when == "teardown" and report.failed:
            self.counts[tier, "failed"] += 1

    def total(self, outcome: str) -> int:
        return sum(count for (_, kind), count in self.counts.items() if kind == outcome)

    def ran(self, tier: str) -> int:
        return self.counts[tier, "passed"] + self.counts[tier, "failed"]


def main() -> int:
    """Runs the tiers one after another in this process; returns 0 when all of it held."""
    os.chdir(ROOT)
    tally = Tally()
    start = time.monotonic()
    tiers = [tier for tier in (*TIERS, "gpu") if (ROOT / "tests" / tier).is_dir()]
    code = pytest.main([*(f"tests/{tier}" for tier in tiers), "-q", "--durations=15", *sys.argv[1:]], plugins=[tally])
    problems = [f"skipped outside the gpu tier: {node}" for node in tally.unexpected_skips]
    problems += [f"the {tier} tier ran nothing" for tier in MUST_RUN if not tally.ran(tier)]
    for problem in problems:
        print(f"FAILED {problem}")
    for tier in tiers:
        outcomes = {kind: count for (name, kind), count in sorted(tally.counts.items()) if name == tier}
        print(f"{tier}: {', '.join(f'{count} {kind}' for kind, count in outcomes.items()) or 'nothing ran'}")
    failed = tally.total("failed") + len(problems)
    print(f"took {time.monotonic() - start:.0f} s")
    print(f"{tally.total('passed')} passed, {failed} failed, {tally.total('skipped')} skipped")
    return 1 if failed or code not in (pytest.ExitCode.OK,) else 0


if __name__ == "__main__":
    sys.exit(main())
