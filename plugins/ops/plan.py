"""Plan files: which kernel, and which tiles of it, an op takes for a shape and a number of tokens on one GPU.

Invariant: a choice depends on shapes alone and on what was loaded before the first call, so a captured graph fixes it;
a shape that no plan names has the built-in rule of its op. Must not know tensors or how plans are measured.

A file is JSON: {"version", "gpu" (its name as the driver says it), "abi" (of the library that was measured), "ops":
{op: {shape: [[tokens, choice], ..., [null, choice]]}}}; a choice holds up to its number of tokens, the last for all
more. Shapes: dense and dense_fp8 NxK, rmsnorm_route EXPERTSxHIDDEN, experts "STORAGE EXPERTSxHIDDENxINTERMEDIATE".
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_trt.ops.library import ABI_VERSION

FOLDER = "tune"  # of an engine directory: a plan for each card
VERSION = 1
SHIPPED = Path(__file__).resolve().parent / "plans"
BUILT_IN = "built-in rule"

Shape = tuple[int | str, ...]


class PlanError(ValueError):
    """A plan file that is not one; the text names the file and what in it."""


@dataclass(frozen=True)
class Choices:
    """Names by number of tokens: names[i] holds up to up_to[i] tokens, the last for all more."""

    up_to: tuple[int, ...]
    names: tuple[str, ...]

    def at(self, tokens: int) -> str:
        return self.names[bisect_left(self.up_to, tokens)]

    def least(self, name: str) -> int | None:
        """The least number of tokens, from 1, with this choice."""
        if name not in self.names:
            return None
        first = self.names.index(name)
        return 1 if first == 0 else self.up_to[first - 1] + 1


@dataclass(frozen=True)
class Op:
    """What a file may say of an op: its shapes, its choices and up to how many tokens the library takes them."""

    shape: re.Pattern[str]
    choices: re.Pattern[str]
    words: str  # the choices, for people
    most: Mapping[str, int]


_NK = re.compile(r"([1-9]\d*)x([1-9]\d*)")
OPS = {
    # few: dense_few of the library; triton: cuBLAS, or Triton for the lm head of few tokens.
    "dense": Op(_NK, re.compile("few|triton"), "few, triton", {"few": 16}),
    # ROWS/PARTS: tile_tokens and parts of gptoss_trt_dense_fp8_args; auto: the library's own.
    "dense_fp8": Op(
        _NK, re.compile("few|auto|(64|128)/[1-8]|256/1"), "few, auto, 64/PARTS, 128/PARTS, 256/1", {"few": 16}
    ),
    # Both products: gptoss_trt_moe_plan on packed weights, or FP8 tiles (prefill where there is no such copy).
    "experts": Op(
        re.compile(r"(mxfp4|fp8) ([1-9]\d*)x([1-9]\d*)x([1-9]\d*)"),
        re.compile("auto|decode|prefill|tiles"), "auto, decode, prefill, tiles", {},
    ),
    # cluster: one kernel; pieces: norm, cuBLAS, choice and sorting, or a kernel for the first three, and sorting.
    "rmsnorm_route": Op(_NK, re.compile("triton|cluster|pieces"), "triton, cluster, pieces", {"cluster": 512}),
}  # fmt: skip

Table = Mapping[str, Mapping[Shape, Choices]]


@dataclass(frozen=True)
class Plan:
    """One plan file."""

    gpu: str
    abi: int
    ops: Table

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises PlanError for anything in the file that this version does not know, OSError when it cannot be read."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{path} is not JSON: {error}") from error
        try:
            return _plan(raw)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def to_json(self) -> str:
        """A line for each shape."""
        ops = []
        for op, shapes in self.ops.items():
            lines = [f'   "{shape_text(shape)}": {json.dumps(_pairs(choices))}' for shape, choices in shapes.items()]
            ops.append(f'  "{op}": {{\n' + ",\n".join(lines) + "\n  }")
        head = f' "version": {VERSION},\n "gpu": {json.dumps(self.gpu)},\n "abi": {self.abi},\n'
        return "{\n" + head + ' "ops": {\n' + ",\n".join(ops) + "\n }\n}\n"

    def write(self, path: Path) -> None:
        """In one step: a reader sees the old file or the new one."""
        path.parent.mkdir(exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(self.to_json(), encoding="utf-8")
        beside.replace(path)

    def unfit(self, gpu: str) -> str | None:
        """Why it does not hold for this GPU and library, or None."""
        if self.gpu != gpu:
            return f"it is of {self.gpu}, not of {gpu}"
        if self.abi != ABI_VERSION:
            return f"it is of library ABI {self.abi}, not {ABI_VERSION}"
        return None


@dataclass(frozen=True)
class Selected:
    """The table that holds for a GPU, and where it came from in words."""

    table: Table
    text: str

    @property
    def is_built_in(self) -> bool:
        return not self.table


_NONE: dict[str, dict[Shape, Choices]] = {op: {} for op in OPS}
_active: Table = _NONE


def engine_file(engine_dir: Path, gpu: str) -> Path:
    """Where an engine's plan for a GPU stands."""
    return engine_dir / FOLDER / _file_name(gpu)


def engine_files(engine_dir: Path) -> list[Path]:
    """An engine's plans, of all GPUs."""
    return sorted((engine_dir / FOLDER).glob("*.json"))


def _file_name(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu) + ".json"


def shipped(gpu: str) -> Plan | None:
    """The package's plan for a GPU, if there is one for it and this library."""
    path = SHIPPED / _file_name(gpu)
    plan = Plan.read(path) if path.is_file() else None
    return plan if plan is not None and plan.unfit(gpu) is None else None


def select(gpu: str, *engine_dirs: Path) -> Selected:
    """Shape by shape the plan of the first of the engines that names it, else the shipped one, else (no entry) the
    built-in rule. Raises PlanError; a plan of another GPU or library is passed over, and the text says so."""
    tables, words = [], []
    for file in (engine_file(folder, gpu) for folder in engine_dirs):
        if not file.is_file():
            continue
        own = Plan.read(file)
        reason = own.unfit(gpu)
        if reason is None:
            tables.append(own.ops)
        words.append(str(file) if reason is None else f"{file} not used: {reason}")
    packaged = shipped(gpu)
    if packaged is not None:
        tables.append(packaged.ops)
        words.append(f"shipped for {gpu}")
    else:
        words.append(f"{BUILT_IN} (none shipped for {gpu})")
    table = {op: {s: c for one in reversed(tables) for s, c in one.get(op, {}).items()} for op in OPS} if tables else {}
    return Selected(table, "; ".join(words))


def activate(table: Table | None) -> None:
    """Makes a table the one of this process, None or an empty one the built-in rule; comes before a model is loaded."""
    global _active  # noqa: PLW0603 (one GPU, one plan a process; the ops look here)
    _active = {**_NONE, **(table or {})}


def active() -> Table:
    return _active


def choices(op: str, shape: Shape) -> Choices | None:
    """The active plan's choices, None where the built-in rule holds."""
    return _active[op].get(shape)


def shape_text(shape: Shape) -> str:
    words = [str(size) for size in shape if isinstance(size, str)]
    return " ".join([*words, "x".join(str(size) for size in shape if isinstance(size, int))])


def _pairs(choices: Choices) -> list[tuple[int | None, str]]:
    return list(zip((*choices.up_to, None), choices.names, strict=True))


def _object(raw: Any, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise PlanError(f"{what} is {type(raw).__name__}, not an object")
    return raw


def _plan(raw: Any) -> Plan:
    fields = _object(raw, "the plan")
    if fields.get("version") != VERSION:
        raise PlanError(f"version is {fields.get('version')!r}; this build reads {VERSION}")
    for name, kind in {"version": int, "gpu": str, "abi": int, "ops": dict}.items():
        if name not in fields:
            raise PlanError(f"there is no {name!r}")
        if type(fields[name]) is not kind:
            raise PlanError(f"{name} is {fields[name]!r}, not of type {kind.__name__}")
    unknown = sorted(set(fields) - {"version", "gpu", "abi", "ops"})
    if unknown:
        raise PlanError(f"unknown key {unknown[0]!r}; keys: version, gpu, abi, ops")
    ops = {}
    for op, shapes in fields["ops"].items():
        if op not in OPS:
            raise PlanError(f"unknown op {op!r}; ops: {', '.join(OPS)}")
        ops[op] = {_shape(op, text): _choices(op, text, pairs) for text, pairs in _object(shapes, op).items()}
    return Plan(fields["gpu"], fields["abi"], ops)


def _shape(op: str, text: str) -> Shape:
    match = OPS[op].shape.fullmatch(text)
    if match is None:
        raise PlanError(f"{op}: unknown shape {text!r}")
    return tuple(int(part) if part.isdigit() else part for part in match.groups())


def _choices(op: str, shape: str, pairs: Any) -> Choices:
    where = f"{op} {shape}"
    if not isinstance(pairs, list) or not pairs:
        raise PlanError(f"{where} is {pairs!r}, not a list of [tokens, choice]")
    up_to: list[int] = []
    names: list[str] = []
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str):
            raise PlanError(f"{where}: {pair!r} is no [tokens, choice]")
        tokens, name = pair
        if OPS[op].choices.fullmatch(name) is None:
            raise PlanError(f"{where}: unknown choice {name!r}; choices: {OPS[op].words}")
        if number == len(pairs) and tokens is not None:
            raise PlanError(f"{where}: the last number of tokens is {tokens!r}, not null")
        if number < len(pairs):
            if type(tokens) is not int or tokens <= (up_to[-1] if up_to else 0):
                raise PlanError(f"{where}: {tokens!r} tokens, not a number above the one before")
            up_to.append(tokens)
        if OPS[op].most.get(name, tokens) != tokens and (tokens is None or tokens > OPS[op].most[name]):
            raise PlanError(f"{where}: {name} takes up to {OPS[op].most[name]} tokens, not {tokens or 'any number'}")
        if "tiles" in names and name != "tiles":
            raise PlanError(f"{where}: {name} behind tiles, which hold for all larger steps")
        names.append(name)
    return Choices(tuple(up_to), tuple(names))
