"""Builds an engine directory from a checkpoint: jobs of one weight each, run by threads, into a temporary folder.

Invariant: the engine's name appears only when everything is written, synced and hashed, by one rename; an interrupted
build leaves a `.building` folder that the next one removes. Peak memory is the jobs in flight (a weight each, a large
one in rows of 32 MB), not the model. Must not know command lines.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gptoss_trt import __version__
from gptoss_trt.build_engine import convert
from gptoss_trt.build_engine.checkpoint import Checkpoint, open_checkpoint
from gptoss_trt.build_engine.engine_folder import BuildingFolder, hash_file
from gptoss_trt.build_engine.model_config import CONFIG_NAME
from gptoss_trt.build_engine.names import Layout
from gptoss_trt.build_engine.report import ConversionReport
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.sources import Source
from gptoss_trt.build_engine.spec import (
    BLOCK,
    HARMONY_VOCAB_SIZE,
    MANIFEST_NAME,
    Dense,
    Experts,
    FileEntry,
    Formats,
    HScale,
    Kv,
    Manifest,
    ParallelMapping,
    check_mapping,
)
from gptoss_trt.build_engine.writing import EngineFiles
from gptoss_trt.reference.mxfp4 import FormatError

CHUNK_BYTES = 32 << 20  # of the embedding and the lm head at a time
MAX_WORKERS = 8  # beyond, disks and memory bandwidth are the limit, and each worker holds a weight

Progress = Callable[[int, int], None]  # bytes done, bytes in all (of the checkpoint)


@dataclass(frozen=True)
class BuildOptions:
    """What a build chooses; None takes the default for the checkpoint's layout."""

    experts: Experts | None = None
    dense: Dense = "bf16"
    kv: Kv = "bf16"
    h_scale: HScale = "static"
    mapping: ParallelMapping = field(default_factory=ParallelMapping)
    force: bool = False
    workers: int | None = None

    def formats(self, layout: Layout) -> Formats:
        stored = "mxfp4" if layout in ("openai", "hf_mxfp4") else "fp8_block128"
        return Formats(experts=self.experts or stored, dense=self.dense, kv=self.kv, h_scale=self.h_scale)  # type: ignore[arg-type]


@dataclass(frozen=True)
class BuildResult:
    """A finished build: the manifest that was written, bytes and seconds."""

    manifest: Manifest
    bytes_read: int
    bytes_written: int
    seconds: float

    @property
    def gb_per_second(self) -> float:
        """Bytes read plus bytes written, in 10^9 a second."""
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9


@dataclass(frozen=True)
class _Job:
    """One weight, or some of its rows, or one expert of it; `place` says which in an error."""

    name: str
    run: Callable[[], None]
    place: str = ""


def build_engine(
    checkpoint_path: Path, out: Path, options: BuildOptions, progress: Progress | None = None
) -> BuildResult:
    """Writes an engine directory at `out`.

    Raises CheckpointError (also for an `out` that exists and options.force is false) and SpecError; then `out` is as it
    was before.
    """
    started = time.monotonic()
    checkpoint = open_checkpoint(checkpoint_path)
    formats = options.formats(checkpoint.layout)
    check_mapping(checkpoint.config, formats, options.mapping)
    with BuildingFolder(out, force=options.force) as folder:
        report = ConversionReport()
        files = EngineFiles(folder.path, checkpoint.config, formats, options.mapping)
        source = Source(checkpoint)
        try:
            jobs = _Plan(source, files, formats, report).jobs()
            _run(jobs, source, options.workers or min(os.cpu_count() or 1, MAX_WORKERS), progress)
            entries = files.close()
        finally:
            files.abandon()
            source.close()
        _write_tokenizer(checkpoint, folder.path)
        manifest = Manifest(
            model=checkpoint.config,
            formats=formats,
            mapping=options.mapping,
            files=entries | _hash_files(folder.path, entries),
            provenance=_provenance(checkpoint),
            exactness=report.to_dict(),
        )
        (folder.path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        folder.publish()
    return BuildResult(manifest, source.bytes_read, files.bytes, time.monotonic() - started)


class _Plan:
    """The jobs of a build, in the order of the files."""

    def __init__(self, source: Source, files: EngineFiles, formats: Formats, report: ConversionReport) -> None:
        self._source, self._files, self._formats, self._report = source, files, formats, report

    def jobs(self) -> Iterator[_Job]:
        config = self._source.checkpoint.config
        yield from self._vocabulary("embedding")
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            for stem in ("attention.norm.weight", "attention.qkv.bias", "attention.sinks", "attention.out.bias",
                         "moe.norm.weight", "moe.router.weight", "moe.router.bias"):  # fmt: skip
                yield self._job(prefix + stem, self._plain, prefix, stem)
            for stem in ("attention.qkv", "attention.out"):
                yield self._job(prefix + stem, self._dense, prefix, stem)
            if self._formats.kv == "fp8":
                for part in "kv":
                    yield self._job(
                        f"{prefix}attention.{part}_scale", self._kv_scale, f"{prefix}attention.{part}_scale"
                    )
            for stem in ("gate_up", "down"):
                yield self._job(f"{prefix}moe.{stem}.bias", self._expert_bias, f"{prefix}moe.", stem)
                for expert in range(config.num_experts):
                    job = self._job(f"{prefix}moe.{stem}", self._expert, f"{prefix}moe.", stem, expert)
                    yield replace(job, place=f" of expert {expert}")
        yield self._job("norm.weight", self._plain, "", "norm.weight")
        yield from self._vocabulary("lm_head")

    def _job(self, name: str, run: Callable[..., None], *arguments: Any) -> _Job:
        return _Job(name, lambda: run(*arguments))

    def _vocabulary(self, stem: str) -> Iterator[_Job]:
        config = self._source.checkpoint.config
        rows = max(CHUNK_BYTES // (2 * config.hidden_size) // BLOCK, 1) * BLOCK
        for start in range(0, config.vocab_size, rows):
            stop = min(start + rows, config.vocab_size)
            yield self._job(f"{stem}.weight", self._vocabulary_rows, stem, start, stop)

    def _vocabulary_rows(self, stem: str, start: int, stop: int) -> None:
        if stem == "embedding":  # looked up, never multiplied: bf16 in every engine
            parts = {"weight": convert.convert_plain(self._source.read("embedding.weight", start, stop))}
        else:
            parts = convert.convert_dense(self._source.dense(stem, start, stop), self._formats, self._report, stem)
        self._files.write_dense("", stem, parts, (start, stop))

    def _plain(self, prefix: str, stem: str) -> None:
        self._files.write_dense(prefix, stem, {"": convert.convert_plain(self._source.vector(prefix + stem))})

    def _dense(self, prefix: str, stem: str) -> None:
        segments = self._source.dense(prefix + stem)
        tensor_class = stem.removeprefix("attention.")
        self._files.write_dense(
            prefix, stem, convert.convert_dense(segments, self._formats, self._report, tensor_class)
        )

    def _kv_scale(self, name: str) -> None:
        value = self._source.read(name).reshape(1) if self._source.has(name) else torch.ones(1)
        self._files.write_scalar(name, value)

    def _expert_bias(self, prefix: str, stem: str) -> None:
        self._files.write_expert_bias(prefix, stem, convert.convert_plain(self._source.read(f"{prefix}{stem}.bias")))

    def _expert(self, prefix: str, stem: str, expert: int) -> None:
        weight = self._source.expert(prefix + stem, expert)
        parts = convert.convert_expert(weight, self._formats, self._report, prefix + stem, expert)
        self._files.write_expert(prefix, stem, parts, expert)


def _run(jobs: Iterator[_Job], source: Source, workers: int, progress: Progress | None) -> None:
    """Runs the jobs with at most `workers` + 1 of them in flight; the first failure stops the rest and is raised."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parallel over jobs; more threads inside each would only compete
    pending: dict[Future[None], _Job] = {}
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="build") as pool:
            try:
                while True:
                    for job in jobs:
                        pending[pool.submit(job.run)] = job
                        if len(pending) > workers:
                            break
                    if not pending:
                        return
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        _finish(future, pending.pop(future), source.checkpoint)
                    if progress:
                        progress(source.bytes_read, source.checkpoint.bytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


def _finish(future: Future[None], job: _Job, checkpoint: Checkpoint) -> None:
    try:
        future.result()
    except FormatError as error:
        known = (name for name in (f"{job.name}.blocks", f"{job.name}.weight", job.name) if name in checkpoint.keys)
        name = next(known, None)
        where, key = (checkpoint.tensors[name].path, checkpoint.keys[name]) if name else (checkpoint.folder, job.name)
        raise CheckpointError(f"{where}: tensor {key}{job.place}: {error}") from error


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.config.vocab_size == HARMONY_VOCAB_SIZE:
        from gptoss_trt.build_engine.tokenizer_files import write_tokenizer_files

        write_tokenizer_files(folder)


def _hash_files(folder: Path, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """The files beside the weights."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: hash_file(folder / name) for name in names if name not in known}


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    config = (checkpoint.folder / CONFIG_NAME).read_bytes()
    return {
        "checkpoint": checkpoint.folder.resolve().name,
        "layout": checkpoint.layout,
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "quantization": dict(checkpoint.quantization),
        "ignored": list(checkpoint.ignored),
        "builder": __version__,
        "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
