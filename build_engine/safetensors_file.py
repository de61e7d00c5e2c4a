"""Safetensors files by position: headers checked without loading, tensors read and written in pieces.

Invariant: a file that `open_file` accepts has a well-formed header whose tensors cover its data exactly, without gaps
or overlaps, to the last byte. Reads and writes are positional, so any number of threads may share a file. Must not
know which tensors a model has.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptoss_trt.build_engine.prefix_hash import PrefixHash

LENGTH_BYTES = 8  # the header's length, little endian
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
HEADER_ALIGNMENT = 128  # our tensors then start at multiples of a GPU's memory transaction
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
TORCH_DTYPES = {
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


class CheckpointError(ValueError):
    """A checkpoint or weight file that cannot be used; the text names the file, the tensor, and both sides."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype in the words of safetensors, and its bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def open_file(path: Path) -> dict[str, TensorEntry]:
    """Reads and checks the header of `path`. Raises CheckpointError for what is not a whole, well-formed file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path}: is no regular file")
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(LENGTH_BYTES))[0] if total >= LENGTH_BYTES else total
            if length > min(total - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: header of {length} bytes in a file of {total}: truncated or not safetensors"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    header = _parse_header(path, raw)
    start = LENGTH_BYTES + length
    entries = {name: _entry(path, name, fields, start) for name, fields in header.items() if name != "__metadata__"}
    _check_coverage(path, entries, start, total)
    return entries


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: header names {twice!r} twice")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt header: {type(header).__name__}, not an object")
    return header


def _entry(path: Path, name: str, fields: Any, start: int) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name}: corrupt header entry {fields!r}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name}: unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name}: corrupt shape {shape!r} or data_offsets {offsets!r}")
    expected, given = size_bytes(tuple(shape), dtype), offsets[1] - offsets[0]
    if given != expected:
        raise CheckpointError(
            f"{path}: tensor {name}: {dtype} {shape} takes {expected} bytes, data_offsets give {given}"
        )
    return TensorEntry(path, dtype, tuple(shape), start + offsets[0], expected)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_coverage(path: Path, entries: Mapping[str, TensorEntry], start: int, total: int) -> None:
    at, previous = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != at:
            how = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {name} at byte {entry.offset} {how} {previous}, which ends at {at}")
        at, previous = entry.offset + entry.bytes, name
    if at != total:
        how = "truncated" if total < at else "data after the last tensor"
        raise CheckpointError(f"{path}: {how}: the header describes {at} bytes, the file has {total}")


class TensorReader:
    """Positional reads of entries; files are opened at first use and shared by threads. Counts the bytes it reads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read(self, name: str, entry: TensorEntry, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) along the first dimension of a tensor, as a fresh CPU tensor; all of it by default.

        Raises CheckpointError for a dtype without a torch counterpart here, and for a file that became shorter.
        """
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{entry.path}: tensor {name}: dtype {entry.dtype} is not one that a model here uses")
        rows = entry.shape[0] if entry.shape else 1
        stop = rows if stop is None else stop
        row_bytes = entry.bytes // rows if rows else 0
        data = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        self._fill(name, entry, data, entry.offset + start * row_bytes)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        return data.view(TORCH_DTYPES[entry.dtype]).reshape(shape)

    def _fill(self, name: str, entry: TensorEntry, data: torch.Tensor, offset: int) -> None:
        view = data.numpy().data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor(entry.path), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{entry.path}: tensor {name}: the file ended at byte {offset + done}")
            done += count
        with self._lock:
            self.bytes_read += done

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]

    def close(self) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


class TensorWriter:
    """A safetensors file whose tensors are known beforehand and arrive in pieces, in any order, from any thread."""

    def __init__(self, path: Path, table: Mapping[str, tuple[tuple[int, ...], str]], *, hashed: bool = False) -> None:
        """Creates `path` with its header and full length; `hashed`: computes its sha256 on the way.

        Raises OSError when it exists or the disk is full.
        """
        header: dict[str, dict[str, Any]] = {}
        starts: dict[str, int] = {}
        offset = 0
        for name, (shape, dtype) in table.items():
            starts[name], size = offset, size_bytes(shape, dtype)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_ALIGNMENT)
        start = LENGTH_BYTES + len(text)
        self.path = path
        self.bytes = start + offset
        self._table = table
        self._starts = {name: start + first for name, first in starts.items()}
        self._missing = {name: size_bytes(*spec) for name, spec in table.items()}
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, self.bytes)
            os.pwrite(self._descriptor, struct.pack("<Q", len(text)) + text, 0)
        except OSError as error:
            os.close(self._descriptor)
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._hash = PrefixHash(path, self.bytes) if hashed else None
        if self._hash:
            self._hash.written(0, start)

    def write(self, name: str, piece: torch.Tensor, first: int = 0) -> None:
        """Writes `piece` from element `first` of tensor `name` on, in memory order.

        Raises CheckpointError when its dtype is not the table's or it does not fit.
        """
        shape, dtype = self._table[name]
        size = size_bytes(shape, dtype)
        start = first * ITEM_BYTES[dtype]
        if piece.dtype != TORCH_DTYPES[dtype] or start + piece.nbytes > size:
            raise CheckpointError(
                f"{self.path}: tensor {name}: a piece of {piece.dtype} {tuple(piece.shape)} from element {first} "
                f"does not fit {dtype} {list(shape)}"
            )
        view = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
        at, done = self._starts[name] + start, 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], at + done)
        if self._hash:
            self._hash.written(at, at + done)
        with self._lock:
            self._missing[name] -= done

    def close(self) -> None:
        """Forces the file to disk. Raises CheckpointError, naming them, when tensors are incomplete."""
        incomplete = {name: missing for name, missing in self._missing.items() if missing}
        if incomplete:
            raise CheckpointError(f"{self.path}: bytes not produced, by tensor: {incomplete}")
        os.fsync(self._descriptor)
        self.abandon()

    def digest(self) -> str:
        """The file's sha256; for a file that was opened with `hashed` and is complete."""
        if self._hash is None:
            raise ValueError(f"{self.path} was opened without hashed=True")
        return self._hash.finish()

    def abandon(self) -> None:
        """Closes the file as it is; safe to call twice."""
        if self._hash and any(self._missing.values()):
            self._hash.abandon()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
