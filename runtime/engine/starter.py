"""Starts the engine process: one client at a time under a lock, in a session of its own, with back-off.

Invariant: two clients never start an engine for one home at the same time, and starts of an engine that keeps dying are
spaced by 0.5 s doubling to 30 s. Must not know the protocol.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from gptoss_trt.runtime.engine.location import EngineHome

FORGET_S = 120.0  # a start older than this is not part of a series of crashes
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
LOG_LIMIT_BYTES = 16 << 20  # a longer log is set aside as engine.log.1 before a start
LISTEN_TIMEOUT_S = 60.0


class EngineStarter:
    """Starts engines for one home on behalf of one client."""

    def __init__(self, engine_dir: Path, home: EngineHome, idle_timeout_s: float | None = None) -> None:
        self._engine_dir = engine_dir.resolve()
        self._home = home
        self._idle_timeout_s = idle_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.failures = 0  # engines started here that ended before they listened

    def try_start(self, is_alive: Callable[[], bool], give_up: Callable[[], bool]) -> str:
        """Starts the engine if no other client is doing so, it is not alive and the back-off is over.

        Returns what happened, for people: `started`, or why not. `is_alive` is asked again under the lock; `give_up`
        ends the wait for the socket.
        """
        self.reap()
        lock = os.open(self._home.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return "another client starts the engine"
        try:
            if is_alive():
                return "the engine is alive"
            wait_s = self._back_off_s()
            if wait_s > 0:
                return f"the engine died; the next start is in {wait_s:.1f} s; its last words: {self._last_log_line()}"
            return self._start(is_alive, give_up)
        finally:
            os.close(lock)

    def reap(self) -> int | None:
        """Collects the exit status of an engine that this client started and that has ended."""
        if self._process is None or self._process.poll() is None:
            return None
        status, self._process = self._process.returncode, None
        return status

    def _start(self, is_alive: Callable[[], bool], give_up: Callable[[], bool]) -> str:
        self._note_start()
        command = [own_python(), "-m", "gptoss_trt.runtime.engine.process", str(self._engine_dir)]
        command += ["--home", str(self._home.folder)]
        if self._idle_timeout_s is not None:
            command += ["--idle-timeout-s", str(self._idle_timeout_s)]
        with self._open_log() as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._home.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + LISTEN_TIMEOUT_S
        while time.monotonic() < until and not give_up():
            status = self.reap()
            if status is not None:
                self.failures += 1
                return f"the engine ended at its start with status {status}: {self._last_log_line()}"
            if is_alive():
                return "started"
            time.sleep(0.02)
        return "the engine does not listen yet"

    def _open_log(self) -> BinaryIO:
        path = self._home.log
        if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
            path.replace(path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab")

    def _last_log_line(self) -> str:
        if not self._home.log.exists():
            return "it wrote no log"
        tail = self._home.log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return tail[-1][-500:] if tail else "its log is empty"

    def _back_off_s(self) -> float:
        """Seconds until the next start is allowed; 0 or less means now."""
        starts = self._recent_starts()
        if not starts:
            return 0.0
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (len(starts) - 1))
        return starts[-1] + delay - time.time()

    def _recent_starts(self) -> list[float]:
        """Times (time.time()) of the starts in a series without a gap of FORGET_S up to now."""
        if not self._home.starts.exists():
            return []
        starts = [float(moment) for moment in json.loads(self._home.starts.read_text(encoding="ascii"))]
        now = time.time()
        recent: list[float] = []
        for moment in reversed(starts):
            if not 0 <= (recent[0] if recent else now) - moment <= FORGET_S:
                break
            recent.insert(0, moment)
        return recent

    def _note_start(self) -> None:
        fresh = self._home.starts.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps([*self._recent_starts()[-15:], time.time()]), encoding="ascii")
        fresh.replace(self._home.starts)


def own_python() -> str:
    """The Python that runs this code. Inside Triton's stub, sys.executable may name the stub."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [
        sys.executable,
        f"{sys.prefix}/bin/{version}",
        f"{sys.prefix}/bin/python3",
        shutil.which("python3") or "",
    ]
    for candidate in candidates:
        if candidate and Path(candidate).name.startswith("python") and os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(f"no Python to start a process with; tried {', '.join(filter(None, candidates))}")
