"""Ends a process whose parent has died, whatever holds its interpreter: by a small process beside it.

Invariant: a process without its parent is gone within a second and its grace, one whose parent lives is never
signalled, however long it stalls, and the watch ends with what it watches. Must not know what that does.

A thread of Python will not do: the python backend of 2.51 keeps Python's lock while it waits for the dead server's half
of their shared memory, and the stub stayed with the engine (in up to 7 of 24 kills on two busy cores). What else needs
no lock serves worse. PR_SET_PDEATHSIG fires when the parent's forking thread ends, and a server's threads that load
models do. A timer whose signal (or faulthandler's exit) a living thread puts off ends a healthy process that was
stopped or held its lock for long. Costs: 4 MB, 13 ms of CPU at the start, then 0.06% of a core.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gptoss_trt.runtime.engine.starter import own_python

PROGRAM = Path(__file__).with_name("parent_watch_process.py")


class ParentWatch:
    """Watches over this process from now until `close`, or for life.

    When `parent` is not this process's parent (any more), this process gets SIGTERM and `grace_s` later SIGKILL; with
    a grace of 0, SIGKILL at once. Raises OSError (FileNotFoundError without a Python) when the watch cannot be started.
    Where /proc is missing or of another PID namespace, it says on stderr that it does not watch.
    """

    def __init__(self, parent: int, grace_s: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [own_python(), "-I", "-S", str(PROGRAM), str(os.getpid()), str(parent), str(grace_s)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its last words go to our stderr
        )

    def close(self) -> None:
        """Ends the watch; idempotent."""
        self._process.kill()  # it ignores what asks it to end
        self._process.wait()
