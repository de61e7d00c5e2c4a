"""When the stub of a reloaded model leaves: only idle, and only while its successor lives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STUB = """
import sys, time
from pathlib import Path
from gptoss_trt.runtime.triton_models import succession
succession.PERIOD_S, succession.GRACE_S = 0.02, 0.1
folder, instance, busy = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
watch = succession.Succession(folder, instance, lambda: not busy.exists(), succession.leave_process)
print("serves", flush=True)
sys.stdin.readline()
watch.close()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def one(instance: str = "chat_0_0", busy: Path = tmp_path / "never") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STUB, str(tmp_path / "instances"), instance, str(busy)]
        stub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(stub)
        assert stub.stdout is not None and stub.stdout.readline() == "serves\n"
        return stub

    yield one
    for stub in started:
        stub.kill()
        stub.communicate()


def test_an_idle_process_leaves_to_its_successor(start: Start) -> None:
    old, other = start(), start("chat_0_1")
    fresh = start()
    assert old.wait(10) == 0
    time.sleep(0.5)
    assert fresh.poll() is None and other.poll() is None


def test_one_with_a_request_stays_until_its_end(start: Start, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    old = start(busy=busy)
    start()
    time.sleep(0.5)
    assert old.poll() is None
    busy.unlink()
    assert old.wait(10) == 0


def test_nobody_leaves_to_a_process_that_died(start: Start) -> None:
    old = start()
    fresh = start()
    fresh.kill()
    fresh.communicate()
    time.sleep(0.5)
    assert old.poll() is None, "the older one still serves where the younger could not"


def test_an_orderly_end_takes_only_its_own_mark(start: Start, tmp_path: Path) -> None:
    start()
    second = start()
    assert second.stdin is not None
    second.communicate("\n")
    assert not list((tmp_path / "instances").iterdir())
