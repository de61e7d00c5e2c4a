"""An engine's server that meets broken, slow and silent peers: a bad frame is answered and closes, and never hangs."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.runtime.engine import connection, frames
from gptoss_trt.runtime.engine.connection import PENDING_TOKEN_LIMIT
from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.frames import FrameReader, FrameType, Hello
from gptoss_trt.runtime.engine.location import EngineHome, LocationError, peer_uid, socket_address
from gptoss_trt.runtime.engine.messages import (
    PROTOCOL_VERSION,
    Error,
    Event,
    Finished,
    Sampling,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)
from gptoss_trt.runtime.engine.script import Script, ScriptedEngine
from gptoss_trt.runtime.engine.scripted import ScriptedCore
from gptoss_trt.runtime.engine.server import EngineServer


class Raw:
    """A peer that sends bytes as it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        with socket_address(path) as address:
            self.socket.connect(address)
        self.reader = FrameReader(frames.REPLY_LIMIT_BYTES)
        self.frames: list[tuple[FrameType, bytes]] = []

    def greet(self, version: int = PROTOCOL_VERSION) -> Raw:
        self.send(FrameType.HELLO, Hello(version, os.getpid()))
        kind, body = self.next()
        assert kind is FrameType.HELLO and frames.decode(Hello, body).connection > 0
        return self

    def send(self, kind: FrameType, body: Any) -> None:
        self.socket.sendall(frames.encode(kind, body))

    def next(self) -> tuple[FrameType, bytes]:
        while not self.frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.frames += self.reader.feed(data)
        return self.frames.pop(0)

    def last_error(self) -> Error:
        """The connection's error, after which it must end."""
        error = None
        try:
            while True:
                kind, body = self.next()
                if kind is FrameType.ERROR:
                    error = frames.decode(Error, body)
        except (EOFError, ConnectionResetError):
            assert error is not None, "closed without an error"
            return error


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[EngineServer, Path]]:
    endless = Script(tokens=(5,), cycle=True, chunk=(4000,))
    plan = ScriptedEngine(step_ms=1, max_context=1 << 30, full_blocks=1 << 25, default=endless)
    path = tmp_path / "s.sock"
    server = EngineServer(path, lambda: ScriptedCore(plan), idle_timeout_s=30)
    thread = threading.Thread(target=server.serve, name="server")
    thread.start()
    wait_until_it_listens(path)
    yield server, path
    server.stop()
    thread.join(10)
    assert not thread.is_alive() and not path.exists()


def wait_until_it_listens(path: Path) -> None:
    """The socket's file is there from bind on, a moment before listen."""
    deadline = time.monotonic() + 20
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                assert time.monotonic() < deadline, f"nothing listens on {path}"
                time.sleep(0.01)
            else:
                return


def still_serves(path: Path) -> None:
    peer = Raw(path).greet()
    peer.send(FrameType.SUBMIT, Submit("ok", (1,), 4))
    kinds = [peer.next()[0], peer.next()[0]]
    assert kinds == [FrameType.TOKENS, FrameType.FINISHED]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (frames.encode(FrameType.SUBMIT, Submit("r", (1,), 1)), "first frame must be HELLO"),
        (frames.encode(FrameType.HELLO, Hello(99, 1)), "version 99"),
        (frames.encode(FrameType.HELLO, [1]), "Hello"),
        (frames.HEADER.pack(1 << 20, FrameType.HELLO), "over the limit of 4096"),
        (b"GET / HTTP/1.1\r\n\r\n", "unknown frame type"),
        (struct.pack(">IB", 3, FrameType.HELLO) + b"\xc1\xc1\xc1", "not msgpack"),
    ],
)
def test_a_bad_greeting_is_answered_and_closed(server: tuple[EngineServer, Path], raw: bytes, text: str) -> None:
    peer = Raw(server[1])
    peer.socket.sendall(raw)
    error = peer.last_error()
    assert error.request_id is None and error.code == "INVALID_ARGUMENT" and text in error.message
    still_serves(server[1])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (frames.HEADER.pack(frames.REQUEST_LIMIT_BYTES + 1, FrameType.SUBMIT), "over the limit"),
        (frames.encode(FrameType.SUBMIT, ["r"]), "Submit"),
        (frames.encode(FrameType.TOKENS, [Tokens("r", 0, (1,))]), "may not send TOKENS"),
        (frames.encode(FrameType.SUBMIT, Submit("twice", (1,), 9)) * 2, "already open"),
        (frames.encode(FrameType.STATS, "x"), "expected [query]"),
    ],
)
def test_a_bad_frame_ends_its_connection_only(server: tuple[EngineServer, Path], raw: bytes, text: str) -> None:
    neighbour = Raw(server[1]).greet()
    peer = Raw(server[1]).greet()
    peer.socket.sendall(raw)
    error = peer.last_error()
    assert error.request_id is None and text in error.message
    neighbour.send(FrameType.SUBMIT, Submit("ok", (1,), 4))
    assert neighbour.next()[0] is FrameType.TOKENS


def test_random_bytes_never_stop_the_server(server: tuple[EngineServer, Path]) -> None:
    generator = random.Random(11)
    submit = Submit("id-ä", (1, 2, 200_000), 7, sampling=Sampling(0.5, 3), stop_sequences=((1, 2), (3,)), logprobs=2)
    good = frames.encode(FrameType.HELLO, Hello(PROTOCOL_VERSION, 1)) + frames.encode(FrameType.SUBMIT, submit)
    for _ in range(60):
        damaged = bytearray(good)
        for _ in range(generator.randrange(1, 6)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        peer = Raw(server[1])
        peer.socket.sendall(damaged[: generator.randrange(1, len(damaged) + 1)])
        peer.socket.close()
    still_serves(server[1])


def test_a_loop_that_finds_the_server_at_work_goes_on_and_its_events_are_sent(
    server: tuple[EngineServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of a step's events: by the loop's thread, and by the server's when the loop finds the lock taken."""
    engine, path = server
    threads = []
    deliver = engine._deliver

    def watched(events: list[Any]) -> None:
        threads.append(threading.current_thread().name)
        deliver(events)

    monkeypatch.setattr(engine, "_deliver", watched)
    raw = Raw(path).greet()
    raw.send(FrameType.SUBMIT, Submit("r", (1,), 4000 * 100))
    seen: list[int] = []
    while len(seen) < 4000 * 100:
        kind, body = raw.next()
        if kind is FrameType.TOKENS:
            seen += [token for tokens in frames.decode_each(Tokens, body) for token in tokens.token_ids]
        if len(threads) < 80 and len(threads) % 3 == 0:
            with engine._lock:  # as the server's thread has it while it works
                time.sleep(0.01)  # steps of 1 ms go on meanwhile
    assert seen == [5] * len(seen) and len(seen) == 4000 * 100
    assert {"engine-loop", "server"} == set(threads)


def test_a_loop_without_work_reads_itself_and_the_server_while_it_works(tmp_path: Path) -> None:
    readers: list[str] = []
    begun, ends = threading.Event(), threading.Event()

    class Core(ScriptedCore):
        def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
            readers.append(threading.current_thread().name)
            super().submit(key, submit, arrival_ns)

        def step(self) -> list[tuple[RequestKey, Event]]:
            begun.set()
            ends.wait(5)
            return super().step()

    class Server(EngineServer):
        def _submit(self, connection: connection.Connection, submit: Submit) -> None:
            readers.append(threading.current_thread().name)
            super()._submit(connection, submit)

    server = Server(tmp_path / "s.sock", lambda: Core(ScriptedEngine(step_ms=0)), idle_timeout_s=30)
    thread = threading.Thread(target=server.serve, name="server")
    thread.start()
    wait_until_it_listens(tmp_path / "s.sock")
    peer = Raw(tmp_path / "s.sock").greet()
    for turn in range(3):
        wait_for(lambda: server._loop.rests)
        begun.clear(), ends.clear()
        peer.send(FrameType.SUBMIT, Submit(f"first {turn}", (1,), 1))
        assert begun.wait(5)
        peer.send(FrameType.HEALTH, [turn])
        assert peer.next()[0] is FrameType.HEALTH  # while the loop is in its step
        peer.send(FrameType.SUBMIT, Submit(f"second {turn}", (1,), 1))
        wait_for(lambda: len(readers) == 3)
        ends.set()
        assert (
            sorted(kind for kind, _ in (peer.next() for _ in range(4)))
            == [FrameType.TOKENS] * 2 + [FrameType.FINISHED] * 2
        )
        assert readers == ["engine-loop", "engine-loop", "server", "engine-loop"]
        readers.clear()
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_request_that_comes_while_the_loop_lies_down_is_not_lost(tmp_path: Path) -> None:
    """The server's thread reads it, with a disturbance that was meant for an earlier rest, between the loop's look at
    what came and its wait."""
    asked, looked, goes_on = threading.Event(), threading.Event(), threading.Event()

    class Core(ScriptedCore):
        def stats(self) -> dict[str, Any]:
            asked.set()
            return super().stats()

    server = EngineServer(tmp_path / "s.sock", lambda: Core(ScriptedEngine(step_ms=0)), idle_timeout_s=30)
    take = server._reading.take

    def late_take() -> None:
        if asked.is_set() and not looked.is_set():
            looked.set()
            goes_on.wait(5)
        take()

    server._reading.take = late_take  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve)
    thread.start()
    wait_until_it_listens(tmp_path / "s.sock")
    peer = Raw(tmp_path / "s.sock").greet()
    peer.send(FrameType.STATS, [1])
    assert peer.next()[0] is FrameType.STATS and looked.wait(5)
    peer.send(FrameType.SUBMIT, Submit("r", (1,), 1))
    wait_for(lambda: bool(select.select([server.clients], [], [], 0)[0]))
    server._reading.disturb()
    server.read_here(0)
    goes_on.set()
    assert peer.next()[0] is FrameType.TOKENS
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_client_that_comes_at_the_end_is_no_failure(tmp_path: Path) -> None:
    """The loop has seen that it waits when the server's thread closes the listener."""
    server = EngineServer(tmp_path / "s.sock", lambda: ScriptedCore(ScriptedEngine()), idle_timeout_s=30)
    waits, saw, goes_on = threading.Event(), threading.Event(), threading.Event()
    select_clients = server.clients.select
    ended: list[str | None] = []

    def late_select(timeout_s: float | None = None) -> Any:
        waits.set()
        came = select_clients(timeout_s)
        if any(ready.fileobj is server._listener for ready, _ in came):
            saw.set()
            goes_on.wait(5)
        return came

    thread = threading.Thread(target=lambda: ended.append(server.serve()))
    thread.start()
    wait_until_it_listens(tmp_path / "s.sock")
    wait_for(lambda: server._loop.rests and not server._connections)
    server.clients.select = late_select  # type: ignore[assignment, method-assign]
    server._reading.disturb()
    assert waits.wait(5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late, socket_address(tmp_path / "s.sock") as address:
        late.connect(address)
        assert saw.wait(5)
        server.stop()
        wait_for(lambda: server._listener.fileno() < 0)
        goes_on.set()
        thread.join(10)
    assert ended == [None]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_waits_for_the_server_is_done_first(tmp_path: Path) -> None:
    server = EngineServer(tmp_path / "s.sock", lambda: ScriptedCore(ScriptedEngine()))
    done: list[int] = []
    with server._lock:
        server._soon(lambda: done.append(1))
        server._soon(lambda: done.append(2))
    assert done == [] and server._wake_in.recv(16) == b"!!"
    server._soon(lambda: done.append(3))
    assert done == [1, 2, 3]


@pytest.mark.parametrize(
    "event",
    [Tokens("r", 0, (1,), (TokenLogprobs(-1.0),)), Finished("r", 0, "length", Usage(1, 1), prompt_logprobs=(None,))],
)
def test_what_is_long_to_pack_is_left_to_the_servers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: Event
) -> None:
    server = EngineServer(tmp_path / "s.sock", lambda: ScriptedCore(ScriptedEngine()))
    done: list[Event] = []
    monkeypatch.setattr(server, "_deliver", lambda events: done.extend(event for _, event in events))
    short = Tokens("r", 0, (1,))
    server._deliver_soon([((1, "r"), short)])
    assert done == [short]
    server._deliver_soon([((1, "r"), short), ((1, "r"), event)])
    assert done == [short] and server._wake_in.recv(16) == b"!"
    server._run_arrived()
    assert done == [short, short, event]


def test_statistics_that_nobody_reads_end_their_connection_only(
    server: tuple[EngineServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPLY_LIMIT_BYTES", 10_000)
    peer = Raw(server[1]).greet()
    peer.socket.sendall(frames.encode(FrameType.STATS, [1]) * 2000)  # 1.5 MB of answers; the socket holds a fraction
    time.sleep(0.5)
    error = peer.last_error()
    assert error.code == "RESOURCE_EXHAUSTED" and "bytes of answers wait" in error.message
    still_serves(server[1])


def test_a_slow_reader_gets_merged_tokens_and_loses_none(server: tuple[EngineServer, Path]) -> None:
    peer = Raw(server[1]).greet()
    total = 400_000
    peer.send(FrameType.SUBMIT, Submit("slow", (1,), total))
    time.sleep(1.0)  # 100 steps and more of 4,000 tokens, far beyond what the socket buffers
    sizes = []
    while True:
        kind, body = peer.next()
        if kind is FrameType.FINISHED:
            break
        sizes += [len(tokens.token_ids) for tokens in frames.decode_each(Tokens, body)]
    assert sum(sizes) == total and max(sizes) > 4000


def test_a_reader_that_stops_is_dropped_with_a_reason(server: tuple[EngineServer, Path]) -> None:
    peer, neighbour = Raw(server[1]).greet(), Raw(server[1]).greet()
    peer.send(FrameType.SUBMIT, Submit("stuck", (1,), 1 << 29))
    neighbour.send(FrameType.SUBMIT, Submit("stuck too", (1,), 1 << 29))
    until = time.monotonic() + 20
    stats: dict[str, Any] = {"requests": {"active": 2}}
    watcher = Raw(server[1]).greet()
    while stats["requests"]["active"] and time.monotonic() < until:
        watcher.send(FrameType.STATS, [1])
        stats = frames.decode_query(watcher.next()[1])[1] or {}
        time.sleep(0.05)
    assert stats["requests"]["active"] == 0 and stats["kv"]["full"]["used"] == 0
    for slow in (peer, neighbour):
        error = slow.last_error()
        assert error.code == "RESOURCE_EXHAUSTED" and str(PENDING_TOKEN_LIMIT) in error.message
    still_serves(server[1])


def test_the_home_must_be_private(tmp_path: Path) -> None:
    home = EngineHome.of(tmp_path, tmp_path / "state")
    assert home == EngineHome.of(tmp_path / "." / "x" / "..", tmp_path / "state")
    home.folder.chmod(0o755)
    with pytest.raises(LocationError, match="mode 0755"):
        EngineHome.of(tmp_path, tmp_path / "state")


def test_the_peers_user_is_known() -> None:
    left, right = socket.socketpair()
    assert peer_uid(left) == os.geteuid()
    left.close(), right.close()


def test_script_files_are_checked(tmp_path: Path) -> None:
    def read(raw: dict[str, Any]) -> ScriptedEngine:
        (tmp_path / "scripted.json").write_text(json.dumps(raw))
        return ScriptedEngine.read(tmp_path)

    assert read({}).default.echo
    for raw, text in (
        ({"step": 5}, "unknown keys ['step']"),
        ({"scripts": [{"fault": {"kind": "explode"}}]}, "explode"),
        ({"scripts": [{"chunk": [0]}]}, "chunk"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"default": {"tokns": []}}, "tokns"),
    ):
        with pytest.raises(RuntimeError, match=text.replace("[", r"\[").replace("]", r"\]")):
            read(raw)
