"""A process goes with its parent whatever holds its interpreter, and stays while its parent lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gptoss_trt.runtime.launch.parent_watch import PROGRAM

# A server whose thread forks a stub and ends, as those do that load models.
SERVER = """
import subprocess, sys, threading, time
forking = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]))
forking.start()
forking.join()
time.sleep(600)
"""
STUB = """
import ctypes, os, signal, sys, time
from pathlib import Path
from gptoss_trt.runtime.launch.parent_watch import ParentWatch
{before}
watch = ParentWatch(os.getppid(), float(sys.argv[2]))
said = Path(sys.argv[1])
def say(word):
    fresh = said.with_suffix(".new")
    fresh.write_text(f"{{word}} {{os.getpid()}} {{watch._process.pid}}")
    fresh.replace(said)
say("serves")
{then}
"""
# PyDLL calls with Python's lock held: no other thread has a turn, and a signal does not end this wait.
KEEPS_THE_LOCK = """
mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)
"""
SLEEPS = "time.sleep(600)"
GONE_S = 1.5  # the promise is a second; looking takes some, too
STAYS_S = 1.0  # several of the watch's periods


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_until(gone: Callable[[], bool], limit_s: float = 10.0) -> float:
    start = time.monotonic()
    while not gone():
        assert time.monotonic() - start < limit_s
        time.sleep(0.01)
    return time.monotonic() - start


def ignores_sighup(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (signal.SIGHUP - 1) & 1)


class Family:
    """A server, its stub and the stub's watch."""

    def __init__(self, said: Path, then: str, before: str, grace_s: float) -> None:
        self.said = said
        stub = STUB.format(then=then, before=before)
        self.server = subprocess.Popen([sys.executable, "-c", SERVER, stub, str(said), str(grace_s)])
        seconds_until(said.exists, 20.0)
        _, *pids = said.read_text().split()
        self.stub, self.watch = (psutil.Process(int(pid)) for pid in pids)
        seconds_until(lambda: ignores_sighup(self.watch.pid))  # it is at work

    def kill_server(self) -> float:
        """Seconds until the stub had gone, too."""
        self.server.kill()
        seconds = seconds_until(lambda: not alive(self.stub))
        self.server.wait()
        return seconds

    def end(self) -> None:
        self.server.kill()
        self.server.wait()
        for process in (self.stub, self.watch):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    started: list[Family] = []

    def start(then: str, before: str = "", grace_s: float = 0.0) -> Family:
        started.append(Family(tmp_path / "said", then, before, grace_s))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.mark.parametrize("then", [KEEPS_THE_LOCK, SLEEPS])
def test_a_stub_goes_with_its_server(family: Callable[..., Family], then: str) -> None:
    one = family(then)
    assert one.kill_server() < GONE_S
    seconds_until(lambda: not alive(one.watch), GONE_S)


def test_one_that_stalls_while_its_server_lives_stays(family: Callable[..., Family]) -> None:
    """Its lock held for long, the process stopped; and the watch has not gone meanwhile."""
    one = family(f"ctypes.PyDLL(None).sleep(3); say('goes-on'); {SLEEPS}")
    seconds_until(lambda: one.said.read_text().startswith("goes-on"))
    one.stub.suspend()
    time.sleep(STAYS_S)
    assert alive(one.stub) and alive(one.watch)
    assert one.kill_server() < GONE_S


def test_a_watch_that_is_asked_to_end_stays(family: Callable[..., Family]) -> None:
    """A service manager and a terminal ask the whole group, of which the stub drains."""
    one = family(KEEPS_THE_LOCK)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        one.watch.send_signal(number)
    time.sleep(STAYS_S)
    assert alive(one.watch)
    assert one.kill_server() < GONE_S


def test_the_watch_goes_with_its_stub(family: Callable[..., Family]) -> None:
    one = family(SLEEPS)
    one.stub.kill()
    seconds_until(lambda: not alive(one.watch), GONE_S)
    assert one.server.poll() is None


def test_closing_leaves_no_watch_and_no_zombie(family: Callable[..., Family]) -> None:
    one = family(f"""
while not said.with_suffix(".go").exists(): time.sleep(0.02)
watch.close()
watch.close()
say("closed")
{SLEEPS}""")
    one.said.with_suffix(".go").touch()
    seconds_until(lambda: one.said.read_text().startswith("closed"))
    assert not one.stub.children() and alive(one.stub)


def test_a_grace_lets_an_orderly_end_happen(family: Callable[..., Family]) -> None:
    one = family(SLEEPS, "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), say('drained'), sys.exit()))", 8.0)
    assert 0.9 < one.kill_server() < 4.0
    assert one.said.read_text().startswith("drained")
    seconds_until(lambda: not alive(one.watch), GONE_S)


def test_a_grace_ends(family: Callable[..., Family]) -> None:
    one = family(KEEPS_THE_LOCK, "signal.signal(signal.SIGTERM, lambda *_: sys.exit())", 1.0)
    assert 0.9 < one.kill_server() < 1.0 + GONE_S


def test_the_watch_holds_nothing_of_the_stub(family: Callable[..., Family], tmp_path: Path) -> None:
    """Neither files nor sockets, inheritable ones included, nor the folder it runs in."""
    file = tmp_path / "held"
    one = family(SLEEPS, f"held = os.open({str(file)!r}, os.O_CREAT | os.O_RDWR); os.set_inheritable(held, True)")
    seconds_until(lambda: [entry.path for entry in one.watch.open_files()] == [f"/proc/{one.stub.pid}/stat"])
    assert one.watch.net_connections("all") == [] and one.watch.cwd() == "/"


@pytest.mark.parametrize("watched", ["gone", "not the watch's parent"])
def test_nobody_else_is_signalled(watched: str) -> None:
    """A stub that died before its watch looked: whoever took the watch over, or has the number now, is not ended."""
    other = subprocess.Popen([sys.executable, "-c", SLEEPS.replace("time", "__import__('time')", 1)])
    if watched == "gone":
        other.kill()
        other.wait()
    command = [sys.executable, "-I", "-S", str(PROGRAM), str(other.pid), "1", "0"]
    try:
        assert subprocess.run(command, timeout=10, check=False).returncode == 0
        time.sleep(0.2)  # a signal acts after a moment
        assert watched == "gone" or other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("proc", ["of the namespace outside", "none"])
def test_without_a_proc_of_its_own_nobody_is_signalled(proc: str) -> None:
    """Processes in a namespace of their own, whose numbers are others' in the /proc that they see."""
    alone = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces may be made here")
    hidden = "mount -t tmpfs none /proc && " if proc == "none" else ""
    imports = "import os, time; from gptoss_trt.runtime.launch.parent_watch import ParentWatch"
    code = f"{imports}; watch = ParentWatch(os.getppid()); watch._process.wait(10); time.sleep(0.2); print('lives')"
    command = [*alone, f'{hidden}"$0" -c "$1"; echo ended', sys.executable, code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.stdout.split() == ["lives", "ended"] and "nobody watches" in ran.stderr


def test_a_parent_that_died_before() -> None:
    """Between a fork and the watch: the number given is not the parent's any more."""
    imports = "import time; from gptoss_trt.runtime.launch.parent_watch import ParentWatch"
    code = f"{imports}; ParentWatch({os.getppid()}); {SLEEPS}"
    assert subprocess.run([sys.executable, "-c", code], timeout=10, check=False).returncode == -signal.SIGKILL
