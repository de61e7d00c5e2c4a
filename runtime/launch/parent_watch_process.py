"""The watch of `ParentWatch`: `python parent_watch_process.py WATCHED PARENT GRACE_S`, a child of WATCHED.

Invariant: it signals WATCHED alone, while that is its own parent, and only after PARENT has stopped being WATCHED's
parent; it ends when WATCHED does, and at once where /proc is not that of WATCHED's namespace. Runs without site
packages: imports light modules of the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time

# A look takes 100 us. Not pidfd_open, which would need none: it wants Linux 5.3 (RHEL 8 has 4.18), a container that
# lets it pass, and a Python that was built to know it.
PERIOD_S = 0.25
STAT_BYTES = 1024


def has_own_proc() -> bool:
    """Whether /proc is there and numbers processes as this one's namespace does: elsewhere a number is somebody else's,
    whose parent says nothing."""
    try:
        stat = os.open("/proc/self/stat", os.O_RDONLY)
    except FileNotFoundError:
        return False
    number = os.pread(stat, STAT_BYTES, 0).split(None, 1)[0]
    os.close(stat)
    return int(number) == os.getpid()


def parent_of(stat: int) -> int:
    """The parent's process id from an open /proc/PID/stat, 0 when that process has gone."""
    try:
        text = os.pread(stat, STAT_BYTES, 0)
    except ProcessLookupError:
        return 0
    return int(text.rpartition(b")")[2].split(None, 2)[1])  # the name before the state may have any character


def main(watched: int, parent: int, grace_s: float) -> None:
    """Returns when process `watched` has ended, by itself or by a signal from here."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: what it watches may drain
    if not has_own_proc():
        sys.stderr.write(f"WARNING parent_watch: /proc is not that of process {watched}: nobody watches its parent\n")
        return
    try:
        stat = os.open(f"/proc/{watched}/stat", os.O_RDONLY)
    except FileNotFoundError:
        return
    while os.getppid() == watched and parent_of(stat) == parent:
        time.sleep(PERIOD_S)
    deadline = time.monotonic() + grace_s
    if grace_s > 0 and os.getppid() == watched:
        os.kill(watched, signal.SIGTERM)
    while os.getppid() == watched and time.monotonic() < deadline:
        time.sleep(PERIOD_S)
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)
        sys.stderr.write(f"ERROR parent_watch: process {parent} has died: ended process {watched}, its child\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
