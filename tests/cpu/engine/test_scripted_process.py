"""The engine process end to end on the scripted engine: streams, cancellation, faults, restarts, several clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_stream import (
    CHUNKED,
    CRASHING,
    ENDLESS,
    FAILING,
    HANGING,
    NAN,
    REFUSED,
    SCRIPTS,
    Stream,
    engine_pid,
    is_running,
    start,
    wait_until,
)

from gptoss_trt.runtime.engine import server, starter
from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.location import EngineHome, socket_address
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Submit, Tokens
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.script import ScriptedEngine
from gptoss_trt.runtime.engine.scripted import ScriptedCore


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "scripted.json").write_text(json.dumps(SCRIPTS))
    return folder


@pytest.fixture
def client(engine_dir: Path, tmp_path: Path) -> Iterator[EngineClient]:
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state", idle_timeout_s=0.5)) as fresh:
        fresh.wait_ready(20)
        yield fresh


def test_a_request_streams_its_tokens_and_ends_once(client: EngineClient) -> None:
    stream = Stream()
    client.submit(Submit("a", (11, 12, 13), 10), stream)
    end = stream.end()
    assert isinstance(end, Finished) and end.reason == "stop"
    assert stream.ids == [11, 12, 13, 200002]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 4)
    assert 0 < end.usage.arrival_ns <= end.usage.first_scheduled_ns < end.usage.first_token_ns < end.usage.last_token_ns
    assert client.stats()["counters"]["finished"]["stop"] == 1


def test_chunks_come_as_scripted(client: EngineClient) -> None:
    stream = start(client, CHUNKED)
    stream.end()
    assert [event.token_ids for event in stream.seen if isinstance(event, Tokens)] == [(1, 2), (3, 4, 5), (6, 200002)]


def test_max_tokens_and_stop_ids_and_sequences(client: EngineClient) -> None:
    streams = {
        "length": start(client, ENDLESS, "a", max_tokens=4),
        "stop id": start(client, ENDLESS, "b", stop_ids=(7,)),
        "stop sequence": start(client, ENDLESS, "c", stop_sequences=((7, 5),)),
    }
    reasons = {name: stream.end() for name, stream in streams.items()}
    assert [end.reason for end in reasons.values() if isinstance(end, Finished)] == ["length", "stop", "stop"]
    assert [stream.ids for stream in streams.values()] == [[5, 6, 7, 5], [5, 6, 7], [5, 6, 7, 5]]


def test_several_sequences_end_one_by_one(client: EngineClient) -> None:
    stream = start(client, ENDLESS, max_tokens=3, n=2)
    stream.end()
    ends = [event for event in stream.seen if isinstance(event, Finished)]
    assert [(end.sequence, end.remaining) for end in ends] == [(0, 1), (1, 0)]


def test_cancellation_frees_the_blocks_within_100_ms(client: EngineClient) -> None:
    stream = start(client, ENDLESS)
    stream.next()
    assert client.stats()["kv"]["full"]["used"] > 0
    began = time.monotonic()
    client.cancel("r")
    wait_until(lambda: client.stats()["kv"]["full"]["used"] == 0, 0.1, "blocks freed")
    end = stream.end()
    assert isinstance(end, Finished) and end.reason == "cancelled"
    assert time.monotonic() - began < 0.1


def test_another_connection_cancels_by_id(client: EngineClient, engine_dir: Path, tmp_path: Path) -> None:
    stream = start(client, ENDLESS, "shared")
    stream.next()
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state")) as other:
        own = start(other, ENDLESS, "own")
        own.next()
        other.cancel("shared")
        end = stream.end(1.0)
        assert isinstance(end, Finished) and end.reason == "cancelled"
        assert other.stats()["requests"]["active"] == 1  # the other's own request goes on


def test_two_clients_share_one_process_and_may_use_one_id(
    client: EngineClient, engine_dir: Path, tmp_path: Path
) -> None:
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state")) as other:
        assert engine_pid(other) == engine_pid(client)
        mine, theirs = Stream(), Stream()
        client.submit(Submit("same", (1,), 5), mine)
        other.submit(Submit("same", (2,), 5), theirs)
        mine.end(), theirs.end()
        assert (mine.ids, theirs.ids) == ([1, 200002], [2, 200002])


def test_a_client_that_leaves_frees_its_blocks(client: EngineClient, engine_dir: Path, tmp_path: Path) -> None:
    other = EngineClient(engine_dir, state_dir=tmp_path / "state")
    stream = start(other, ENDLESS)
    stream.next()
    other.close()
    assert isinstance(stream.end(), Error)
    wait_until(lambda: client.stats()["kv"]["full"]["used"] == 0, 0.2, "blocks freed")


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        (FAILING, "INTERNAL", "planned"),
        (NAN, "INTERNAL", "not finite"),
        (REFUSED, "RESOURCE_EXHAUSTED", "full"),
    ],
)
def test_a_fault_ends_its_request_only(client: EngineClient, prompt: int, code: str, text: str) -> None:
    neighbour = start(client, ENDLESS, "neighbour", max_tokens=20)
    end = start(client, prompt, "faulty").end()
    assert isinstance(end, Error) and end.code == code and text in end.message
    assert isinstance(neighbour.end(), Finished)


def test_a_crash_fails_open_requests_and_restarts(client: EngineClient) -> None:
    pid = engine_pid(client)
    bystander = start(client, ENDLESS, "bystander")
    bystander.next()
    for end in (start(client, CRASHING, "crash").end(), bystander.end()):
        assert isinstance(end, Error) and end.code == "UNAVAILABLE", end
    assert not client.health()["ready"]
    client.wait_ready(10)
    assert engine_pid(client) != pid
    assert isinstance(start(client, 3, "after").end(), Finished)


def test_two_clients_restart_one_engine(client: EngineClient, engine_dir: Path, tmp_path: Path) -> None:
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state")) as other:
        streams = [start(client, ENDLESS), start(other, ENDLESS)]
        for stream in streams:
            stream.next()
        os.kill(engine_pid(client), signal.SIGKILL)
        for stream in streams:
            end = stream.end()
            assert isinstance(end, Error) and end.code == "UNAVAILABLE"
        client.wait_ready(10), other.wait_ready(10)
        assert engine_pid(client) == engine_pid(other)
        assert len(json.loads(client.home.starts.read_text())) == 2


def test_a_terminated_engine_says_goodbye_and_comes_back(client: EngineClient) -> None:
    stream = start(client, ENDLESS)
    stream.next()
    pid = engine_pid(client)
    os.kill(pid, signal.SIGTERM)
    end = stream.end()
    assert isinstance(end, Error) and end.code == "UNAVAILABLE" and "ends" in end.message
    client.wait_ready(10)
    assert engine_pid(client) != pid


def test_a_step_that_hangs_is_seen_and_ends_the_process(engine_dir: Path, tmp_path: Path) -> None:
    home = EngineHome.of(engine_dir, tmp_path / "state")
    command = [sys.executable, "-m", "gptoss_trt.runtime.engine.process", str(engine_dir), "--home", str(home.folder)]
    EngineOptions(step_timeout_s=1).write(home.options)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(home.socket.exists, 10, "the engine listens")
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state", start=False)) as client:
        client.wait_ready(5)
        stream = start(client, HANGING)
        wait_until(lambda: client.health()["state"] == "hung", 3, "health tells of the hang")
        end = stream.end(5)
        assert isinstance(end, Error) and end.code == "UNAVAILABLE" and "limit is 1 s" in end.message
    assert process.wait(10) == 1


def test_a_second_process_for_one_home_leaves_at_once(client: EngineClient, engine_dir: Path) -> None:
    command = [sys.executable, "-m", "gptoss_trt.runtime.engine.process", str(engine_dir)]
    second = subprocess.run([*command, "--home", str(client.home.folder)], capture_output=True, timeout=20, check=False)
    assert second.returncode == 3 and b"another engine process owns" in second.stderr
    assert client.health()["ready"]


def test_restarts_back_off(client: EngineClient) -> None:
    times = []
    for _ in range(3):
        os.kill(engine_pid(client), signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda: not client.health()["ready"], 2, "the death is seen")
        client.wait_ready(20)
        times.append(time.monotonic() - began)
    starts = json.loads(client.home.starts.read_text())
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert len(starts) == 4
    assert all(gap >= least for gap, least in zip(gaps, (0.5, 1.0, 2.0), strict=True)), gaps
    assert times[2] > 1.0


def test_requests_without_an_engine_fail_at_once(engine_dir: Path, tmp_path: Path) -> None:
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state", start=False)) as alone:
        began = time.monotonic()
        end = start(alone, 1).end()
        assert isinstance(end, Error) and end.code == "UNAVAILABLE"
        assert time.monotonic() - began < 0.5
        assert alone.health()["state"] == "down"


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, socket_address(path) as address:
        return probe.connect_ex(address) == 0


def test_an_engine_of_another_version_is_left_alone_until_it_leaves(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one runs on behind an update; then a new one is started."""
    home = EngineHome.of(engine_dir, tmp_path / "state")
    monkeypatch.setattr(server, "PROTOCOL_VERSION", 1)  # what its hello says
    old = server.EngineServer(home.socket, lambda: ScriptedCore(ScriptedEngine()), idle_timeout_s=1.0)
    thread = threading.Thread(target=old.serve)
    thread.start()
    wait_until(lambda: listens(home.socket), 5, "the old engine's socket")
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state", idle_timeout_s=0.5)) as client:
        end = start(client, 1).end()
        assert isinstance(end, Error) and end.code == "UNAVAILABLE" and "protocol version 1" in end.message
        assert thread.is_alive() and old._next_number <= 3
        client.wait_ready(20)
        thread.join(5)
        assert not thread.is_alive() and isinstance(start(client, 1).end(), Finished)


def test_kill_9_of_every_client_ends_the_engine(engine_dir: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from gptoss_trt.runtime.engine.client import EngineClient\n"
        "c = EngineClient(Path(sys.argv[1]), state_dir=Path(sys.argv[2]), idle_timeout_s=1.0)\n"
        "c.wait_ready(20)\nprint(c.health()['pid'], flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(engine_dir), str(tmp_path / "state")]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    pids = set()
    for one in clients:
        assert one.stdout is not None
        pids.add(int(one.stdout.readline()))
    assert len(pids) == 1  # started at the same time, they share one engine
    pid = pids.pop()
    clients[0].kill()
    clients[0].wait()
    time.sleep(1.5)
    assert is_running(pid)  # the second client still holds it
    clients[1].kill()
    clients[1].wait()
    assert wait_until(lambda: not is_running(pid), 5, "the engine leaves") > 0.5
    assert not EngineHome.of(engine_dir, tmp_path / "state").socket.exists()


def test_killing_the_client_that_started_it_keeps_the_engine(engine_dir: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from gptoss_trt.runtime.engine.client import EngineClient\n"
        "c = EngineClient(Path(sys.argv[1]), state_dir=Path(sys.argv[2]), idle_timeout_s=1.0)\n"
        "c.wait_ready(20)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(engine_dir), str(tmp_path / "state")]
    one = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert one.stdout is not None and one.stdout.readline() == "up\n"
    with contextlib.closing(EngineClient(engine_dir, state_dir=tmp_path / "state", start=False)) as second:
        second.wait_ready(5)
        stream = start(second, ENDLESS, max_tokens=60)
        stream.next()
        one.kill()
        one.wait()
        assert isinstance(stream.end(), Finished)


def test_the_socket_is_private(client: EngineClient) -> None:
    assert stat.S_IMODE(client.home.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(client.home.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(client.home.log.stat().st_mode) == 0o600


def test_a_long_state_folder_works(engine_dir: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with contextlib.closing(EngineClient(engine_dir, state_dir=deep, idle_timeout_s=0.2)) as far:
        far.wait_ready(20)
        assert len(str(far.home.socket)) > 200
        assert isinstance(start(far, 4).end(), Finished)


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "scripted.json").write_text(json.dumps({"load_ms": 200, "load_error": "no such card"}))
    with contextlib.closing(EngineClient(folder, state_dir=tmp_path / "state")) as hopeless:
        end = start(hopeless, 1).end()
        assert isinstance(end, Error) and end.code == "UNAVAILABLE" and "no such card" in end.message
        wait_until(lambda: "no such card" in hopeless.health().get("reason", ""), 2, "the reason in health")


def test_requests_wait_while_the_engine_loads(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "scripted.json").write_text(json.dumps({"load_ms": 800}))
    with contextlib.closing(EngineClient(folder, state_dir=tmp_path / "state", idle_timeout_s=0.2)) as early:
        health = early.health()
        assert health["live"] and not health["ready"] and health["state"] == "loading"
        assert isinstance(start(early, 1).end(), Finished)
        assert early.health()["ready"]


def test_a_sink_that_raises_loses_its_own_request_only(client: EngineClient) -> None:
    def broken(_: Event) -> None:
        raise RuntimeError("planned")

    client.submit(Submit("broken", (ENDLESS,), 5000), broken)
    assert isinstance(start(client, ENDLESS, "fine", max_tokens=20).end(), Finished)
    wait_until(lambda: client.stats()["requests"]["active"] == 0, 1, "the broken request is cancelled")


def test_misuse_is_an_error_of_the_caller(client: EngineClient) -> None:
    stream = start(client, ENDLESS, "one")
    with pytest.raises(ValueError, match="'one' is already open"):
        start(client, ENDLESS, "one")
    client.cancel("unknown")  # ignored
    unsendable = start(client, ENDLESS, "wide", cache_salt="x" * (17 << 20)).end()
    assert isinstance(unsendable, Error) and unsendable.code == "INVALID_ARGUMENT"
    assert "over the limit" in unsendable.message
    client.close()
    assert isinstance(stream.end(), Error)
    with pytest.raises(RuntimeError, match="closed"):
        start(client, ENDLESS, "late")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        EngineClient(Path("/nowhere"))


def test_a_lost_state_folder_is_an_answer(client: EngineClient) -> None:
    pid = engine_pid(client)
    shutil.rmtree(client.home.folder)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "cannot be started" in client.health().get("reason", ""), 3, "the reason in health")
    end = start(client, 1).end()
    assert isinstance(end, Error) and end.code == "UNAVAILABLE" and "cannot be started" in end.message


def test_python_is_found_inside_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/backends/python/triton_python_backend_stub")
    found = starter.own_python()
    command = [found, "-c", "import gptoss_trt"]
    assert subprocess.run(command, check=False, timeout=20).returncode == 0
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="triton_python_backend_stub"):
        starter.own_python()


def test_the_log_names_requests_and_no_prompts(client: EngineClient) -> None:
    stream = Stream()
    client.submit(Submit("visible-id", (FAILING, 77777), 10), stream)
    stream.end()
    text = client.home.log.read_text()
    assert "visible-id" in text and "77777" not in text
    assert all(json.loads(line)["message"] for line in text.splitlines())
