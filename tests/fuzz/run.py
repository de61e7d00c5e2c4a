"""Fuzzes for a given time and says every fault once, with the command that has it again.

    python tests/fuzz/run.py --seconds 600
    python tests/fuzz/run.py --only engine --seed 7 --case 1234

Exit status 1 if there was a fault. Targets: frames, bodies, answers, tensors, engine, checkpoint, scheduler, wire.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from local_targets import Bodies, Checkpoints, Engines, Frames, Schedules
from serving_targets import Answers, Tensors
from target import Fault, Target, run_case
from wire_target import Wire

TARGETS = ("frames", "bodies", "answers", "tensors", "engine", "checkpoint", "scheduler", "wire")
TURN_S = 2.0  # a target's turn
PLAIN: dict[str, Callable[[], Target]] = {
    "frames": Frames, "bodies": Bodies, "answers": Answers, "tensors": Tensors, "scheduler": Schedules
}  # fmt: skip


def main() -> int:
    """Runs the fuzzers; returns the exit status."""
    options = parse()
    faults: dict[tuple[str, str, str], Fault] = {}
    counts: dict[str, int] = {}
    with made(options.only or TARGETS) as targets:
        if options.case is not None:
            (target,) = targets
            fault = run_case(target, options.seed, options.case)
            print(fault or f"{target.name} case {options.case}: no fault")
            return 1 if fault else 0
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            for target in targets:
                turn(target, options.seed, counts, faults, min(until, time.monotonic() + TURN_S))
    cases = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"fuzz: {sum(counts.values())} cases ({cases}), {len(faults)} faults")
    return 1 if faults else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=TARGETS)
    parser.add_argument("--case", type=int, help="one case of the one target in --only")
    options = parser.parse_args()
    if options.case is not None and len(options.only or ()) != 1:
        parser.error("--case needs one --only")
    return options


def turn(
    target: Target, seed: int, counts: dict[str, int], faults: dict[tuple[str, str, str], Fault], until: float
) -> None:
    """Runs cases of one target until a moment, one at least; prints a fault that was not there before."""
    while True:
        number = counts.get(target.name, 0)
        counts[target.name] = number + 1
        fault = run_case(target, seed, number)
        if fault is not None and fault.key not in faults:
            faults[fault.key] = fault
            print(fault, flush=True)
        if time.monotonic() >= until:
            return


@contextlib.contextmanager
def made(names: list[str] | tuple[str, ...]) -> Iterator[list[Target]]:
    """The targets of these names; their files and the server go at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        targets: list[Target] = []
        for name in names:
            if name == "wire":
                wire = Wire()
                stack.callback(wire.close)
                targets.append(wire)
            elif name in ("engine", "checkpoint"):
                targets.append((Engines if name == "engine" else Checkpoints)(folder / name))
            else:
                targets.append(PLAIN[name]())
        yield targets


if __name__ == "__main__":
    sys.exit(main())
