"""The client side of the engine process: connects, starts the engine when it is dead, and hands events to sinks.

Invariant: each submitted request's sink gets exactly one end: one Finished a sequence or one Error, also when the
engine dies (UNAVAILABLE) or this client is closed. Must not know Triton, text or how the engine works.

Request ids belong to one client: two clients may use the same id. `cancel` ends this client's request of that id; when
it has none, those of every other client of the engine (that is how a stop request that reached another model instance
ends a generation; ids that must not be stopped from elsewhere have to be unique).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_trt.runtime.engine import frames
from gptoss_trt.runtime.engine.frames import FrameError, FrameReader, FrameType, Hello, VersionError
from gptoss_trt.runtime.engine.location import EngineHome, LocationError, require_same_user, socket_address
from gptoss_trt.runtime.engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Error,
    ErrorCode,
    Event,
    Finished,
    Submit,
    Tokens,
)
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.starter import EngineStarter
from gptoss_trt.runtime.launch import settings

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]

POLL_S = 0.05  # between two looks at an engine that is not there
OTHER_VERSION_S = 30.0  # between two connections to one that speaks another version
HELLO_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0  # an engine that takes no bytes for this long is treated as dead
READ_BYTES = 1 << 18


class EngineUnavailableError(RuntimeError):
    """No engine process answers; the text says what is known about it."""


@dataclass
class _Flight:
    """An open request: where its events go, and whether the engine has been told of it."""

    submit: Submit
    sink: Sink
    sent: bool = False


class EngineClient:
    """One connection to the engine process of `engine_dir`, shared by all threads of this process.

    A sink is called from this client's own thread, one event at a time; it must be quick and must not call `close`.
    `state_dir` names the server the engine belongs to (settings.state_dir finds it when absent). With `start`, a dead
    engine is (re)started; the first client writes `options` for it. The constructor returns once connected, or after
    `connect_timeout_s` (then it keeps trying).
    """

    def __init__(
        self,
        engine_dir: Path,
        *,
        state_dir: Path | None = None,
        start: bool = True,
        options: EngineOptions | None = None,
        connect_timeout_s: float = 20.0,
        idle_timeout_s: float | None = None,
    ) -> None:
        if not engine_dir.is_dir():
            raise FileNotFoundError(f"the engine directory {engine_dir} does not exist")
        self.home = EngineHome.of(engine_dir, settings.state_dir(state_dir))
        if options is not None:
            options.write(self.home.options)
        self._starter = EngineStarter(engine_dir, self.home, idle_timeout_s) if start else None
        self._lock = threading.Lock()  # guards the four fields below
        self._flights: dict[str, _Flight] = {}
        self._answers: dict[int, _Answer] = {}
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._send_lock = threading.Lock()
        self._queries = itertools.count(1)
        self._first_try = threading.Event()
        self._note = "not connected yet"
        self._last_error: Error | None = None
        self._candidate: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()
        self._first_try.wait(connect_timeout_s)

    # -- for callers --------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Sends a request. Raises ValueError when its id is already open here, RuntimeError when the client is closed.

        Every other problem arrives at the sink as an Error; without an engine that is UNAVAILABLE within POLL_S.
        """
        flight = _Flight(submit, sink)
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the engine client is closed")
            if submit.request_id in self._flights:
                raise ValueError(f"request id {submit.request_id!r} is already open")
            self._flights[submit.request_id] = flight
            flight.sent = self._socket is not None
        if flight.sent:
            self._send_submit(submit)

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request; the sink then gets Finished("cancelled"). Unknown ids are ignored."""
        self._send(frames.encode(FrameType.CANCEL, Cancel(request_id)))

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The engine's statistics (metrics.py lists them). Raises EngineUnavailableError."""
        return self._ask(FrameType.STATS, timeout_s)

    def health(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """`state`, `ready` and `live` (a process answers), with `reason` when it is not live. Never raises for a dead
        engine.

        States: loading, ready, hung (as the engine says), unresponsive (connected, no answer), down (no process: it is
        being restarted, or waits out its back-off, or this client may not start it).
        """
        try:
            return {"live": True, **self._ask(FrameType.HEALTH, timeout_s)}
        except EngineUnavailableError as error:
            with self._lock:
                state = "down" if self._socket is None else "unresponsive"
            return {"live": False, "ready": False, "state": state, "reason": str(error)}

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Returns once the engine can serve. Raises EngineUnavailableError after `timeout_s`."""
        until = time.monotonic() + timeout_s
        health = self.health()
        while not health["ready"]:
            if time.monotonic() >= until:
                raise EngineUnavailableError(f"the engine is not ready after {timeout_s} s: {health}")
            time.sleep(POLL_S)
            health = self.health()

    def close(self) -> None:
        """Ends the connection; open requests are cancelled and their sinks get UNAVAILABLE."""
        with self._lock:
            self._closed.set()
            if self._socket is not None:
                _shut_down(self._socket)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_submit(self, submit: Submit) -> None:
        try:
            frame = frames.encode(FrameType.SUBMIT, submit, frames.REQUEST_LIMIT_BYTES)
        except (FrameError, TypeError, ValueError, OverflowError) as error:
            self._end(Error(submit.request_id, "INVALID_ARGUMENT", f"the request cannot be sent: {error}"))
            return
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        with self._lock:
            target = self._socket
        if target is None:
            return
        try:
            with self._send_lock:
                target.sendall(frame)
        except OSError as error:  # the reader sees the end of the stream and fails what is open
            log.warning("sending to the engine failed: %s", error)
            _shut_down(target)

    def _ask(self, kind: FrameType, timeout_s: float) -> dict[str, Any]:
        query, answer = next(self._queries), _Answer()
        with self._lock:
            if self._socket is None:
                raise EngineUnavailableError(self._reason())
            self._answers[query] = answer
        self._send(frames.encode(kind, [query]))
        answer.ready.wait(timeout_s)
        with self._lock:
            self._answers.pop(query, None)
        if answer.value is None:
            raise EngineUnavailableError(
                self._reason() if answer.ready.is_set() else f"the engine did not answer in {timeout_s} s"
            )
        return answer.value

    # -- the client's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._connect():
                met = self._socket_file()
                if not self._read_until_gone():
                    self._leave_alone(met)
                continue
            self._note = self._try_start()
            if self._candidate is None:
                self._fail_flights(self._reason())
                self._closed.wait(POLL_S)
        self._fail_flights("the engine client was closed")
        if self._candidate is not None:
            self._candidate.close()

    def _try_start(self) -> str:
        """Starts the engine if that is up to this client; what is known then."""
        if self._starter is None:
            self._first_try.set()
            return "no engine process runs and this client may not start one"
        try:
            note = self._starter.try_start(self._connect, self._closed.is_set)
        except (OSError, ValueError) as error:  # the state folder is gone or full, no Python is there
            note = f"the engine cannot be started: {type(error).__name__}: {error}"
            self._first_try.set()
        if self._starter.failures:
            self._first_try.set()
        return note

    def _connect(self) -> bool:
        """Whether an engine accepts connections; the connection is kept for use."""
        if self._candidate is not None:
            return True
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with socket_address(self.home.socket) as address:
                fresh.connect(address)
            require_same_user(fresh)
        except (FileNotFoundError, ConnectionRefusedError):
            fresh.close()
            return False
        except (OSError, LocationError) as error:
            fresh.close()
            log.warning("connecting to the engine failed: %s", error)
            return False
        self._candidate = fresh
        return True

    def _socket_file(self) -> tuple[int, int] | None:
        """Which file the engine's socket is; None without one."""
        try:
            status = self.home.socket.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _leave_alone(self, met: tuple[int, int] | None) -> None:
        """Waits for another engine than one of another version, as runs on behind an update: it leaves when its own
        clients have, and each new connection would keep it."""
        self._first_try.set()
        until = time.monotonic() + OTHER_VERSION_S
        while met is not None and self._socket_file() == met and time.monotonic() < until:
            self._fail_flights(self._reason())
            if self._closed.wait(POLL_S):
                return

    def _read_until_gone(self) -> bool:
        """Speaks over the candidate connection until it ends, then fails what was open on it. False when the engine
        speaks another version."""
        assert self._candidate is not None
        peer, self._candidate = self._candidate, None
        self._last_error = None
        reader = FrameReader()
        understood = True
        try:
            peer.settimeout(HELLO_TIMEOUT_S)
            peer.sendall(frames.encode(FrameType.HELLO, Hello(PROTOCOL_VERSION, os.getpid())))
            greeted = False
            while data := peer.recv(READ_BYTES):
                for kind, body in reader.feed(data):
                    if greeted:
                        self._handle(kind, body)
                    else:
                        self._take_hello(peer, reader, kind, body)
                        greeted = True
            self._note = "the engine process closed the connection"
        except (OSError, FrameError) as error:
            understood = not isinstance(error, VersionError)
            self._note = f"the connection to the engine broke: {error}"
            log.warning("%s", self._note)
        with self._lock:
            self._socket = None
            answers, self._answers = self._answers, {}
        peer.close()
        for answer in answers.values():
            answer.ready.set()
        if self._starter is not None and (status := self._starter.reap()) is not None:
            self._note = f"the engine process ended with status {status}"
        self._fail_flights(self._reason())
        return understood

    def _take_hello(self, peer: socket.socket, reader: FrameReader, kind: FrameType, body: bytes) -> None:
        """Makes the connection usable and sends the requests that came in meanwhile."""
        if kind is not FrameType.HELLO:
            raise FrameError(f"the engine's first frame is {kind.name}, not HELLO")
        frames.decode(Hello, body).require_version()
        reader.limit = frames.REPLY_LIMIT_BYTES
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        with self._lock:
            self._socket = peer
            if self._closed.is_set():
                _shut_down(peer)
            unsent = [flight for flight in self._flights.values() if not flight.sent]
            for flight in unsent:
                flight.sent = True
        self._first_try.set()
        for flight in unsent:
            self._send_submit(flight.submit)

    def _handle(self, kind: FrameType, body: bytes) -> None:
        if kind is FrameType.TOKENS:
            for tokens in frames.decode_each(Tokens, body):
                self._call_sink(self._flights.get(tokens.request_id), tokens)
        elif kind is FrameType.FINISHED:
            for end in frames.decode_each(Finished, body):
                if end.remaining == 0:
                    self._end(end)
                else:
                    self._call_sink(self._flights.get(end.request_id), end)
        elif kind is FrameType.ERROR:
            error = frames.decode(Error, body)
            if error.request_id is None:
                self._last_error = error
            else:
                self._end(error)
        elif kind in (FrameType.STATS, FrameType.HEALTH):
            query, value = frames.decode_query(body)
            answer = self._answers.get(query)
            if answer is not None:
                answer.value = value
                answer.ready.set()
        else:
            raise FrameError(f"the engine may not send {kind.name}")

    def _end(self, event: Finished | Error) -> None:
        with self._lock:
            flight = self._flights.pop(event.request_id or "", None)
        self._call_sink(flight, event)

    def _call_sink(self, flight: _Flight | None, event: Event) -> None:
        if flight is None:
            return  # its sink raised before: the request is being cancelled
        try:
            flight.sink(event)
        except Exception:
            request_id = flight.submit.request_id
            log.exception("the sink of request %s raised; the request is cancelled", request_id)
            with self._lock:
                self._flights.pop(request_id, None)
            self.cancel(request_id)

    def _fail_flights(self, reason: str) -> None:
        code: ErrorCode = "UNAVAILABLE" if self._last_error is None else self._last_error.code
        with self._lock:
            flights, self._flights = self._flights, {}
        for flight in flights.values():
            self._call_sink(flight, Error(flight.submit.request_id, code, reason))

    def _reason(self) -> str:
        """What is known about an engine that does not answer."""
        parts = [] if self._last_error is None else [self._last_error.message]
        return "the engine is not available: " + "; ".join([*parts, self._note])


@dataclass
class _Answer:
    """Where the answer to a STATS or HEALTH query arrives; without a value the connection ended first."""

    ready: threading.Event = dataclasses.field(default_factory=threading.Event)
    value: dict[str, Any] | None = None


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already disconnected
        peer.shutdown(socket.SHUT_RDWR)
