"""Ends the stub of a reloaded model when nothing is left for it to do.

Invariant: a stub leaves only while a younger one, alive, serves its instance, and only after GRACE_S without a request.
tritonserver 2.51 can keep an unloaded model for ever whose gRPC streams failed all at once (an engine crash), although
every one of them got its last response; its process would stay. Must not know requests or engines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

PERIOD_S = 1.0
GRACE_S = 5.0
FOLDER = "instances"  # of the state folder


def holders(folder: Path, server: int) -> dict[str, tuple[int, float]]:
    """Of the instances of a server (its process id): which process serves each, and since when (time.time())."""
    found: dict[str, tuple[int, float]] = {}
    for file in folder.glob(f"{server}-*"):
        name = file.name.removeprefix(f"{server}-")
        with contextlib.suppress(FileNotFoundError):  # the instance is being unloaded
            if "." not in name:  # else it is being written
                found[name] = (int(file.read_text(encoding="ascii")), file.stat().st_mtime)
    return found


class Succession:
    """Makes this process the one that serves `instance` under its server, and watches for a successor.

    Made when the model is able to serve: until then the server sends requests to an older process. `folder` keeps a
    file for each instance; `leave` is called once, on the watch's thread.
    """

    def __init__(self, folder: Path, instance: str, is_idle: Callable[[], bool], leave: Callable[[], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{os.getppid()}-{instance}"
        self._is_idle = is_idle
        self._leave = leave
        fresh = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        fresh.write_text(str(os.getpid()), encoding="ascii")
        fresh.replace(self._file)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="succession", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)
        if self._holder() == os.getpid():
            self._file.unlink(missing_ok=True)

    def _holder(self) -> int | None:
        """The process that serves the instance; None when the file has gone."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._file.read_text(encoding="ascii"))
        return None

    def _run(self) -> None:
        idle_since: float | None = None
        while not self._closing.wait(PERIOD_S):
            holder = self._holder()
            if holder in (None, os.getpid()) or not Path(f"/proc/{holder}").exists() or not self._is_idle():
                idle_since = None
                continue
            idle_since = idle_since or time.monotonic()
            if time.monotonic() - idle_since >= GRACE_S:
                log.warning("process %d serves this model now and nothing is left to do here: leaving", holder)
                self._leave()
                return


def leave_process() -> None:
    """Ends this process without the server's part in it, which may never come."""
    os._exit(0)
