"""A short run of the fuzzers that need no server, and that they see what they are for.

The longer one: `make fuzz`, which also damages what goes over the wire to a real server.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
TARGETS = ("frames", "bodies", "answers", "tensors", "engine", "checkpoint", "scheduler")
TURN_S = 3.0
SEED = 20_261


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Any]:
    """The modules of tests/fuzz, which is a folder of scripts and no package."""
    sys.path.insert(0, str(FUZZ))
    import run as fuzz_run  # type: ignore[import-not-found]

    yield fuzz_run
    sys.path.remove(str(FUZZ))


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_refused_and_nothing_worse(fuzz: Any, name: str) -> None:
    counts: dict[str, int] = {}
    faults: dict[Any, Any] = {}
    with fuzz.made([name]) as (target,):
        fuzz.turn(target, SEED, counts, faults, time.monotonic() + TURN_S)
    assert counts[name] >= 1
    assert not faults, "\n".join(map(str, faults.values()))


class Broken:
    """A target with the faults that a run must see."""

    name = "broken"
    allowed: tuple[type[BaseException], ...] = (KeyError,)

    def case(self, generator: random.Random) -> tuple[str, Callable[[], Any]]:
        number = generator.randrange(3)
        return f"number {number}", [self._refuse, self._raise, self._hang][number]

    def _refuse(self) -> None:
        raise KeyError("as it should")

    def _raise(self) -> None:
        [].pop()

    def _hang(self) -> None:
        while True:
            pass


def test_errors_and_hangs_are_faults_and_come_again(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["target"], "LIMIT_S", 0.05)
    seen = [fuzz.run_case(Broken(), 1, number) for number in range(30)]
    kinds = {fault.what.split(":")[0] if fault is not None else None for fault in seen}
    assert kinds == {None, "IndexError", "HangError"}
    again = [fuzz.run_case(Broken(), 1, number) for number in range(30)]
    assert again == seen
    assert any("--only broken --case" in str(fault) for fault in seen)


def test_cases_depend_on_the_seed_alone(fuzz: Any) -> None:
    with fuzz.made(["frames", "bodies"]) as targets:
        for target in targets:
            first, second = ([target.case(random.Random(f"{seed}"))[0] for seed in range(50)] for _ in range(2))
            assert first == second
            assert len(set(first)) > 40
