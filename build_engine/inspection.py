"""Describes and verifies engine directories and checkpoints, and looks into single tensors.

Invariant: nothing is changed, and a whole model is never in memory: tensors are read an expert or 4,096 rows at a time.
Must not print.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gptoss_trt.build_engine.checkpoint import open_checkpoint
from gptoss_trt.build_engine.engine_folder import hash_file
from gptoss_trt.build_engine.names import LAYOUTS
from gptoss_trt.build_engine.safetensors_file import CheckpointError, TensorEntry, TensorReader, open_file
from gptoss_trt.build_engine.sources import Fp8, Packed, Plain, Source
from gptoss_trt.build_engine.spec import (
    MANIFEST_NAME,
    RANDOM_SEED,
    Manifest,
    SpecError,
    expected_tensors,
    qkv_segments,
    rank_file,
    rank_share,
)
from gptoss_trt.ops import plan
from gptoss_trt.reference import fp8_block, mxfp4
from gptoss_trt.reference.mxfp4 import FormatError

_ROWS = 4096
_WORDS = (".weight", ".weight_scale", ".blocks", ".scales")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def is_engine(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def describe(path: Path) -> dict[str, Any]:
    """What `path` is, as JSON values: {"kind": "engine" | "checkpoint", ...}. Raises CheckpointError or SpecError."""
    if is_engine(path):
        manifest = Manifest.read(path)
        size = sum(entry.bytes for entry in manifest.files.values())
        head = {"kind": "engine", "path": str(path), "bytes": size, "plan": _plan_text(path)}
        return head | dataclasses.asdict(manifest)
    checkpoint = open_checkpoint(path)
    return {
        "kind": "checkpoint",
        "path": str(checkpoint.folder),
        "layout": checkpoint.layout,
        "layout_text": LAYOUTS[checkpoint.layout],
        "quantization": dict(checkpoint.quantization),
        "model": dataclasses.asdict(checkpoint.config),
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.bytes,
        "files": [file.name for file in checkpoint.files],
        "ignored": list(checkpoint.ignored),
    }


def _plan_text(path: Path) -> str:
    """Which kernels the engine wants. Raises CheckpointError for a plan file that is not one."""
    words = []
    for file in plan.engine_files(path):
        try:
            own = plan.Plan.read(file)
        except plan.PlanError as error:
            raise CheckpointError(str(error)) from error
        shapes = ", ".join(f"{op} {len(shapes)}" for op, shapes in own.ops.items())
        words.append(f"{file.relative_to(path)}, tuned on {own.gpu}: {shapes}")
    return "; ".join(words) or "none of its own: the one shipped for the GPU, or the built-in rule"


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Problems found by reading everything; [] when there are none.

    Engine: length and sha256 of each file, files that the manifest does not list, and every rank's tensors against the
    table. Checkpoint: names, shapes and dtypes (raises CheckpointError), and that every number is one.
    """
    return _verify_engine(path, progress) if is_engine(path) else _verify_checkpoint(path, progress)


def _verify_engine(path: Path, progress: Progress | None) -> list[str]:
    manifest = Manifest.read(path)
    problems: list[str] = []
    try:
        _plan_text(path)
    except CheckpointError as error:
        problems.append(str(error))
    total, done = sum(entry.bytes for entry in manifest.files.values()), 0
    for name, entry in sorted(manifest.files.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: missing")
        elif file.stat().st_size != entry.bytes:
            problems.append(f"{name}: {file.stat().st_size} bytes, the manifest says {entry.bytes}")
        elif (found := hash_file(file).sha256) != entry.sha256:
            problems.append(f"{name}: sha256 {found}, the manifest says {entry.sha256}")
        done += entry.bytes
        if progress:
            progress(done, total)
    if RANDOM_SEED in manifest.provenance and not manifest.files:
        return problems  # nothing but the manifest says what it is
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    plans = {str(file.relative_to(path)) for file in plan.engine_files(path)}
    extra = on_disk - set(manifest.files) - {MANIFEST_NAME} - plans
    problems += [f"{name}: not in the manifest" for name in sorted(extra)]
    for rank in range(manifest.mapping.world):
        problems += _verify_tensors(path / rank_file(rank), manifest, rank)
    return problems


def _verify_tensors(file: Path, manifest: Manifest, rank: int) -> list[str]:
    """A rank's header against the table, and zeros in the biases that another rank adds."""
    try:
        entries = open_file(file)
    except CheckpointError as error:
        return [str(error)]
    table = expected_tensors(manifest.model, manifest.formats, manifest.mapping, rank)
    problems = [f"{file.name}: tensor {name} missing" for name in table if name not in entries]
    problems += [f"{file.name}: unknown tensor {name}" for name in entries if name not in table]
    for name, (shape, dtype) in table.items():
        if name in entries and (entries[name].shape, entries[name].dtype) != (shape, dtype):
            found = entries[name]
            problems.append(
                f"{file.name}: tensor {name} is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}"
            )
    return problems or _verify_zeros(entries, manifest, rank)


def _verify_zeros(entries: dict[str, TensorEntry], manifest: Manifest, rank: int) -> list[str]:
    share = rank_share(manifest.model, manifest.mapping, rank)
    ends = [] if share.adds_attention_bias else [".attention.out.bias"]
    ends += [] if share.adds_expert_bias else [".moe.down.bias"]
    reader = TensorReader()
    try:
        names = [name for name in entries if name.endswith(tuple(ends))] if ends else []
        return [
            f"{rank_file(rank)}: tensor {name} is not zero, though another rank adds this bias"
            for name in names
            if bool(reader.read(name, entries[name]).any())
        ]
    finally:
        reader.close()


def _verify_checkpoint(path: Path, progress: Progress | None) -> list[str]:
    checkpoint = open_checkpoint(path)
    source = Source(checkpoint)
    problems: list[str] = []
    done = 0
    for name, entry in checkpoint.tensors.items():
        if not name.endswith((".scales", "_scale")):  # read together with their weight
            try:
                not_finite = _summarise(_read_checkpoint(source, name)).not_finite
                if not_finite:
                    problems.append(f"{checkpoint.keys[name]}: {not_finite} values are not finite")
            except (FormatError, CheckpointError) as error:
                problems.append(f"{entry.path.name}: {checkpoint.keys[name]}: {error}")
        done += entry.bytes
        if progress:
            progress(done, checkpoint.bytes)
    return problems


def tensor_statistics(path: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Dequantises one tensor and returns its name, format, shape, and statistics of its finite values.

    `name`: an engine tensor, the stem of one (`layers.0.moe.gate_up`), a canonical name or a checkpoint's own key.
    Raises CheckpointError with close names when there is none of that name.
    """
    stored, pieces = _engine_pieces(path, name, rank) if is_engine(path) else _checkpoint_pieces(path, name)
    return {"tensor": name, "stored_as": stored} | _summarise(pieces).to_dict()


def _summarise(pieces: Iterable[torch.Tensor]) -> _Totals:
    totals = _Totals()
    for piece in pieces:
        totals.add(piece.to(torch.float64))
    return totals


class _Totals:
    """Running statistics of a tensor that comes in pieces along its first dimension."""

    def __init__(self) -> None:
        self.count = self.not_finite = self.zeros = 0
        self.sum = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, piece: torch.Tensor) -> None:
        finite = piece[torch.isfinite(piece)]
        self.count += piece.numel()
        self.not_finite += piece.numel() - finite.numel()
        self.zeros += int((finite == 0).sum())
        self.sum += float(finite.sum())
        self.squares += float(finite.square().sum())
        if finite.numel():
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    def to_dict(self) -> dict[str, Any]:
        finite = self.count - self.not_finite
        return {
            "values": self.count,
            "not_finite": self.not_finite,
            "zeros": self.zeros,
            "min": self.low if finite else None,
            "max": self.high if finite else None,
            "mean": self.sum / finite if finite else None,
            "rms": math.sqrt(self.squares / finite) if finite else None,
        }


def _stem(name: str) -> str:
    return next((name.removesuffix(word) for word in _WORDS if name.endswith(word)), name)


def _not_found(path: Path, name: str, known: Iterable[str]) -> CheckpointError:
    close = difflib.get_close_matches(name, list(known), n=3)
    return CheckpointError(f"{path}: no tensor {name}" + (f"; did you mean {', '.join(close)}?" if close else ""))


def _engine_pieces(path: Path, name: str, rank: int) -> tuple[str, Iterator[torch.Tensor]]:
    manifest = Manifest.read(path)
    if not 0 <= rank < manifest.mapping.world:
        raise SpecError(f"rank {rank} is outside the world of {manifest.mapping.world} ranks")
    entries = open_file(path / rank_file(rank))
    stem = name if name in entries and not name.endswith(_WORDS) else _stem(name)
    parts = {word: entries[stem + word] for word in ("", *_WORDS) if stem + word in entries}
    if not parts:
        raise _not_found(path, name, entries)
    stored = " + ".join(f"{entry.dtype} {list(entry.shape)}" for entry in parts.values())
    segments = qkv_segments(manifest.model, manifest.mapping) if stem.endswith(".qkv") else None
    return stored, _read_engine(stem, parts, segments)


def _read_engine(stem: str, parts: dict[str, TensorEntry], segments: tuple[int, ...] | None) -> Iterator[torch.Tensor]:
    reader = TensorReader()

    def read(word: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return reader.read(stem + word, parts[word], start, stop)

    try:
        if ".blocks" in parts:
            for expert in range(parts[".blocks"].shape[0]):
                yield mxfp4.decode(read(".blocks", expert, expert + 1), read(".scales", expert, expert + 1))
        elif ".weight_scale" in parts and len(parts[".weight"].shape) == 3:
            for expert in range(parts[".weight"].shape[0]):
                weight, scale = read(".weight", expert, expert + 1), read(".weight_scale", expert, expert + 1)
                yield fp8_block.dequantise(weight, scale)
        elif ".weight_scale" in parts:
            rows = parts[".weight"].shape[0]
            yield fp8_block.dequantise_segments(read(".weight"), read(".weight_scale"), segments or (rows,))
        else:
            word, entry = next(iter(parts.items()))
            for start in range(0, entry.shape[0], _ROWS):
                yield read(word, start, min(start + _ROWS, entry.shape[0]))
    finally:
        reader.close()


def _checkpoint_pieces(path: Path, name: str) -> tuple[str, Iterator[torch.Tensor]]:
    source = Source(open_checkpoint(path))
    checkpoint = source.checkpoint
    by_key = {key: canonical for canonical, key in checkpoint.keys.items()}
    canonical = by_key.get(name, name)
    if canonical not in checkpoint.tensors:
        canonical = next((_stem(name) + word for word in _WORDS if _stem(name) + word in checkpoint.tensors), "")
    if not canonical:
        source.close()
        raise _not_found(path, name, (*checkpoint.tensors, *by_key))
    entry = checkpoint.tensors[canonical]
    return f"{entry.dtype} {list(entry.shape)}", _read_checkpoint(source, canonical)


def _read_checkpoint(source: Source, canonical: str) -> Iterator[torch.Tensor]:
    stem, entry = _stem(canonical), source.checkpoint.tensors[canonical]
    try:
        if stem.endswith((".gate_up", ".down")):
            for expert in range(source.checkpoint.config.num_experts):
                yield _dequantise(source.expert(stem, expert))
        elif entry.dtype == "F8_E4M3":
            yield from (_dequantise(part) for part in source.dense(stem))
        else:
            rows = entry.shape[0] if entry.shape else 1
            for start in range(0, rows, _ROWS):
                yield source.read(canonical, start, min(start + _ROWS, rows))
    finally:
        source.close()


def _dequantise(weight: Packed | Plain | Fp8) -> torch.Tensor:
    if isinstance(weight, Packed):
        return mxfp4.decode(weight.blocks, weight.scales)
    return weight.values if isinstance(weight, Plain) else fp8_block.dequantise(weight.weight, weight.scale)
