"""What is fuzzed: a target makes a case from a generator and runs it; anything but its own errors is a fault.

Invariant: a case depends on (seed, target, number) alone. A case that runs longer than the limit is a hang. Must not
know any target.
"""

from __future__ import annotations

import contextlib
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

LIMIT_S = 20.0  # a case takes milliseconds; this machine may be busy


class HangError(BaseException):
    """A case that did not end; no handler of the code under test may swallow it."""


class FaultError(Exception):
    """What a target itself recognises as a fault; the text says which."""


class Target(Protocol):
    """Something to fuzz. `allowed` are the errors by which it may refuse an input."""

    name: str
    allowed: tuple[type[BaseException], ...]

    def case(self, generator: random.Random) -> tuple[str, Callable[[], Any]]:
        """A short description of the input, and what runs it."""


@dataclass(frozen=True)
class Fault:
    """One fault: how to have it again, and what it was."""

    target: str
    seed: int
    number: int
    what: str
    where: str
    given: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Faults of one cause share it: the target, the kind of error and the line that raised it."""
        return self.target, self.what.split(":")[0], self.where

    def __str__(self) -> str:
        return (
            f"{self.target} case {self.number}: {self.what}\n    at {self.where}\n    input: {self.given}\n"
            f"    again: python tests/fuzz/run.py --seed {self.seed} --only {self.target} --case {self.number}"
        )


def run_case(target: Target, seed: int, number: int) -> Fault | None:
    """Runs one case; None when the input was taken or refused as it should be."""
    generator = random.Random(f"{seed}:{target.name}:{number}")
    given, run = target.case(generator)
    try:
        with _limited():
            run()
    except target.allowed:
        return None
    except (Exception, HangError) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/fuzz/" not in frame.filename]
        last = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), None)
        where = f"{_short(last.filename)}:{last.lineno} {last.name}" if last is not None else "the target itself"
        return Fault(target.name, seed, number, f"{type(error).__name__}: {error}"[:300], where, given[:600])
    return None


def _short(filename: str) -> str:
    root = Path(__file__).resolve().parents[2]
    path = Path(filename).resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not done in {LIMIT_S:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
