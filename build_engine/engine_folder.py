"""The folder of an engine under construction: locked, private until it is whole, published by one rename.

Invariant: under the engine's name there is either what was there before or a complete engine. Must not know what the
files hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType

from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import MANIFEST_NAME, FileEntry

HASH_BYTES = 8 << 20  # read at a time


class BuildingFolder:
    """`{name}.building` beside `out`, under an exclusive lock that the kernel drops when the process dies.

    Entering starts clean: what an interrupted build left is removed. Leaving without `publish` removes the folder.
    """

    def __init__(self, out: Path, *, force: bool) -> None:
        self._out = out.absolute()  # not resolved: a link at `out` stays what it is
        self._force = force
        self.path = self._out.with_name(self._out.name + ".building")
        self._replaced = self._out.with_name(self._out.name + ".replaced")
        self._lock = -1

    def __enter__(self) -> BuildingFolder:
        """Raises CheckpointError when `out` must not be replaced or another build of it runs."""
        self._check_out()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.path.exists() or not os.path.samestat(os.fstat(self._lock), self.path.stat()):
                raise BlockingIOError  # published or removed between our opening and our locking
            if self._replaced.exists() and not self._out.exists():
                self._replaced.rename(self._out)  # an interruption between the two renames of `publish`
            self._check_out()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise CheckpointError(f"{self._out}: another build of it is running") from error
            raise
        for leftover in (*self.path.iterdir(), *([self._replaced] if self._replaced.exists() else [])):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return self

    def _check_out(self) -> None:
        if not self._out.exists():
            return
        empty = self._out.is_dir() and not any(self._out.iterdir())
        engine = (self._out / MANIFEST_NAME).is_file()
        if not empty and not engine:
            raise CheckpointError(f"{self._out}: exists and is not an engine; choose another name")
        if engine and not self._force:
            raise CheckpointError(f"{self._out}: is an engine already; --force replaces it")

    def publish(self) -> None:
        """Syncs every file and folder, and gives the folder the engine's name."""
        folders = [self.path]
        for path in self.path.rglob("*"):
            folders.append(path) if path.is_dir() else _sync(path)
        for folder in folders:
            _sync(folder)
        if self._out.exists():
            self._out.rename(self._replaced)
        self.path.rename(self._out)
        _sync(self._out.parent)
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        os.close(self._lock)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> FileEntry:
    """Length and sha256 of a file, read once in pieces."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_BYTES))
    total = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            total += count
    return FileEntry(bytes=total, sha256=digest.hexdigest())
