"""`build --tune`: times the choices that plan files (ops/plan.py) know for an engine's shapes, and takes the fastest.

Invariant: every candidate is called as serving calls it, through the op under a trial plan, and its result is compared
with the base's first. A choice changes only for what is faster by more than TIE. Must not know the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gptoss_trt.build_engine.spec import Manifest
from gptoss_trt.build_engine.tune_cases import Case, Subject, subjects
from gptoss_trt.build_engine.tune_gpu import TuneError, require_gpu
from gptoss_trt.ops import plan
from gptoss_trt.ops.gpu_clock import graph_seconds
from gptoss_trt.ops.library import ABI_VERSION, LibraryError
from gptoss_trt.ops.plan import Choices, Plan, Shape
from gptoss_trt.reference.tolerance import worst

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = tuple(1 << power for power in range(14))  # 1 to 8,192
TIE = 0.02
REPEATS = 6
CALLS = 24  # in a graph, at least, where they are short
LONG_TOKENS, LONG_CALLS = 1024, 4


@dataclass(frozen=True)
class Row:
    """One line of the report: seconds of the candidates, None for one that the library refused or whose result was
    another."""

    op: str
    shape: Shape
    tokens: int
    base: str
    seconds: dict[str, float | None]
    chosen: str

    def __str__(self) -> str:
        parts = []
        for name, seconds in self.seconds.items():
            mark = "*" if name == self.chosen else " "
            parts.append(f"{mark}{name} {'-' if seconds is None else format(seconds * 1e6, '.1f')}")
        changed = "" if self.chosen == self.base else f"  (was {self.base})"
        return f"{self.op:13} {plan.shape_text(self.shape):20} {self.tokens:5}  " + "  ".join(parts) + changed


Timer = Callable[[Callable[[int], object], int, int], float]  # (call(copy), copies, calls) -> seconds of a call
Report = Callable[[Row], None]


def tune_engine(
    engine_dir: Path, report: Report, *, ops: Sequence[str] = tuple(plan.OPS), tokens: Sequence[int] = TOKENS
) -> Path:
    """Tunes `ops` at `tokens` on this GPU and writes the engine's plan file, which keeps what it held of other shapes
    of this GPU. Returns its path. Raises TuneError, SpecError, PlanError."""
    gpu, device = require_gpu(), torch.device("cuda")
    manifest = Manifest.read(engine_dir)
    if manifest.mapping.world > 1:
        raise TuneError(f"{engine_dir} is cut for {manifest.mapping.world} ranks; engines of one rank are tuned")

    def timer(call: Callable[[int], object], copies: int, calls: int) -> float:
        return graph_seconds(device, call, copies, calls, REPEATS)

    path = plan.engine_file(engine_dir, gpu)
    old = Plan.read(path) if path.is_file() else None
    shipped = plan.shipped(gpu)
    before = plan.active()
    try:
        table = tune(subjects(manifest, device, ops), {} if shipped is None else shipped.ops, timer, report, tokens)
    finally:
        plan.activate(before)
    if old is not None and old.unfit(gpu) is None:
        table = {op: {**old.ops.get(op, {}), **table.get(op, {})} for op in plan.OPS if op in {*old.ops, *table}}
    Plan(gpu, ABI_VERSION, table).write(path)
    return path


def tune(
    subjects: Sequence[Subject], shipped: plan.Table, timer: Timer, report: Report, tokens: Sequence[int]
) -> dict[str, dict[Shape, Choices]]:
    """The table of the fastest choices of `subjects`, where nothing is faster those of `shipped` or, for a shape that
    it lacks, of the built-in rule. Raises TuneError where a base cannot be run."""
    table: dict[str, dict[Shape, Choices]] = {}
    for subject in subjects:
        base = shipped.get(subject.op, {}).get(subject.shape, subject.built_in)
        winners = []
        for count in sorted(set(tokens)):
            if count > subject.most_tokens:
                continue
            row = _measure(subject, base.at(count), count, timer)
            report(row)
            winners.append((count, row.chosen))
        table.setdefault(subject.op, {})[subject.shape] = merged(base, winners)
    return table


def choose(base: str, seconds: dict[str, float | None]) -> str:
    """The fastest, or `base` where that is within TIE of it."""
    measured = {name: value for name, value in seconds.items() if value is not None}
    best = min(measured, key=measured.__getitem__)
    return base if measured[base] <= measured[best] * (1 + TIE) else best


def merged(base: Choices, winners: Sequence[tuple[int, str]]) -> Choices:
    """`base` with each other winner from behind half of its number of tokens (or the measured one before) up to it.
    Tiles hold for all larger steps or not at all, because a copy is made for them: up to where the base has them."""
    spans: list[tuple[int, int, str]] = []
    before = 0
    for number, (tokens, name) in enumerate(winners):
        goes_on = bool(spans) and spans[-1][1:] == (before, name)
        if goes_on or name != base.at(tokens):
            open_end = base.names[-1] == "tiles" and {name for _, name in winners[number:]} == {"tiles"}
            spans.append((max(before, tokens // 2), max(tokens, base.up_to[-1]) if open_end else tokens, name))
        before = tokens

    def at(tokens: int) -> str:
        return next((name for above, most, name in spans if above < tokens <= most), base.at(tokens))

    ends = sorted({*base.up_to, *(end for above, most, _ in spans for end in (above, most) if end > 0)})
    names = [at(end) for end in ends] + [base.names[-1]]
    for i in range(len(ends)):
        if names[i] == "tiles" and set(names[i:]) != {"tiles"}:
            names[i] = "prefill"  # what runs without a copy
    kept = [i for i in range(len(ends)) if names[i] != names[i + 1]]
    return Choices(tuple(ends[i] for i in kept), (*(names[i] for i in kept), names[-1]))


def _measure(subject: Subject, base: str, tokens: int, timer: Timer) -> Row:
    """Times the base and every candidate whose result agrees with it."""
    case = subject.make(tokens)
    calls = LONG_CALLS if tokens >= LONG_TOKENS else max(CALLS, case.copies)
    seconds: dict[str, float | None] = {}
    wanted: list[torch.Tensor] = []
    for name in dict.fromkeys((base, *subject.candidates(tokens))):
        seconds[name] = None
        for output, _ in case.outputs:
            output.zero_()
        with _trial(subject, name):
            try:
                case.call(name, 0)
                if name == base:
                    wanted = [output.clone() for output, _ in case.outputs]
                elif not _agrees(case, wanted):
                    continue
                seconds[name] = timer(lambda copy, name=name: case.call(name, copy), case.copies, calls)  # type: ignore[misc]
            except LibraryError as error:
                if name == base:
                    raise TuneError(f"{subject.op} {plan.shape_text(subject.shape)}: {error}") from error
    return Row(subject.op, subject.shape, tokens, base, seconds, choose(base, seconds))


@contextmanager
def _trial(subject: Subject, name: str) -> Iterator[None]:
    plan.activate({subject.op: {subject.shape: Choices((), (name,))}})
    try:
        yield
    finally:
        plan.activate(None)


def _agrees(case: Case, wanted: Sequence[torch.Tensor]) -> bool:
    return all(
        bool(output.isfinite().all() if output.is_floating_point() and output.itemsize > 1 else True)
        and worst(tolerance, output, expected) <= 1
        for (output, tolerance), expected in zip(case.outputs, wanted, strict=True)
    )
