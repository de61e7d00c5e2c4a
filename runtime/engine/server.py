"""The engine's socket server: accepts clients, turns frames into commands and events into frames, leaves when alone.

Invariant: a request lives no longer than its connection, and the process no longer than `idle_timeout_s` after the last
connection. Connections belong to whoever holds the server's lock: the thread that calls `serve` while it handles what
came in, the engine's loop while it sends a step's events, which so wait for no other thread to wake. A loop that finds
the lock taken, or whose events are long to pack, leaves them in a queue, wakes the server's thread and goes on. A loop
without work reads what comes in itself, and the server's thread stands aside until the next step is launched: a request
to an idle engine wakes one thread, not two. Must not know the scheduler or the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptoss_trt.runtime.engine import frames
from gptoss_trt.runtime.engine.connection import Connection
from gptoss_trt.runtime.engine.core import EngineCore, RequestKey
from gptoss_trt.runtime.engine.frames import FrameError, FrameType, Hello
from gptoss_trt.runtime.engine.location import LocationError, require_same_user, socket_address
from gptoss_trt.runtime.engine.loop import EngineLoop
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

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 2.0  # for a last error to be read
TICK_S = 0.25  # how often timers are looked at
BACKLOG = 128


class EngineServer:
    """Serves one engine on one socket. `load` builds the core in the loop's thread; clients may connect before."""

    def __init__(
        self,
        socket_path: Path,
        load: Callable[[], EngineCore],
        *,
        idle_timeout_s: float = 5.0,
        step_timeout_s: float = 120.0,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._path = socket_path
        self._idle_timeout_s = idle_timeout_s
        self._step_timeout_s = step_timeout_s
        self._describe = describe
        self._started = time.monotonic()
        self._connections: dict[int, Connection] = {}
        self._next_number = 1
        self._alone_since = self._started
        self._arrived: deque[Callable[[], None]] = deque()  # what is to be done with connections, in this order
        self._lock = threading.Lock()  # of connections
        self.clients = selectors.DefaultSelector()  # the listener and connections, and what disturbs the loop's rest
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._reading = _Reading(self)
        self._loop = EngineLoop(load, self._deliver_soon, self._loop_failed, self._reading)
        self._failure: str | None = None
        self._stopping = False
        self._listener: socket.socket

    # -- called from other threads ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends `serve`. Safe in a signal handler and in any thread."""
        self._stopping = True
        self.wake()

    def _soon(self, call: Callable[[], None], *, here: bool = True) -> None:
        """Does it now, behind what waits already, or leaves it to the server's thread: when that is at work, and where
        it is not to be done `here`."""
        self._arrived.append(call)
        if here and self._lock.acquire(blocking=False):
            try:
                self._run_arrived()
            finally:
                self._lock.release()
        else:
            self.wake()

    def read_here(self, timeout_s: float | None = None) -> None:
        """Waits until something comes in, and handles it."""
        came = self.clients.select(timeout_s)
        if len(came) > 1:  # what disturbs the loop is taken first: a client behind it may disturb the loop anew
            came.sort(key=lambda each: each[0].data != self._reading.calm)
        with self._lock:
            for ready, mask in came:
                ready.data(mask)
            self._run_arrived()

    def wake(self) -> None:
        """Makes the server's thread look around."""
        try:
            self._wake_out.send(b"!")
        except BlockingIOError:
            return  # a full pipe wakes just as well

    def _deliver_soon(self, events: list[tuple[RequestKey, Event]]) -> None:
        long = any(map(_has_logprobs, events))  # up to a second for those of a long prompt: no step waits for that
        self._soon(lambda: self._deliver(events), here=not long)

    def _loop_failed(self, reason: str) -> None:
        self._failure = reason
        self.wake()

    # -- the server's thread ------------------------------------------------------------------------------------------

    def serve(self) -> str | None:
        """Serves until stopped, alone for too long, or failed. Returns None, or why the engine failed."""
        waits, aside = _selector_of(self._wake_in, self.clients), _selector_of(self._wake_in)
        self._open_listener()
        self._loop.start()
        try:
            while not self._stopping and self._failure is None:
                (aside if self._loop.rests else waits).select(TICK_S)
                self._drain_wake()
                if not self._loop.rests:
                    self.read_here(0)
                with self._lock:
                    self._run_arrived()
                    self._look_at_timers()
                    if self._alone_too_long() and not self._take_last_chance():
                        log.info("no client for %.1f s: leaving", self._idle_timeout_s)
                        break
        finally:
            self._path.unlink(missing_ok=True)
            with self._lock:
                self._close_listener()
                self._run_arrived()
                self._say_goodbye()
            self._loop.stop(timeout_s=0.0 if self._failure else 5.0)
        return self._failure

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _open_listener(self) -> None:
        self._path.unlink(missing_ok=True)  # the life lock is ours, so a socket file here has no owner
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with socket_address(self._path) as address:
                self._listener.bind(address)
        finally:
            os.umask(before)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self.clients.register(self._listener, selectors.EVENT_READ, lambda _mask: self._accept())

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self.clients.unregister(self._listener)
            self._listener.close()

    def _drain_wake(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            return

    def _run_arrived(self) -> None:
        while self._arrived:
            self._arrived.popleft()()

    def _accept(self) -> bool:
        """Takes one waiting client; False when none waits."""
        if self._listener.fileno() < 0:
            return False  # closed since the loop saw that a client waits
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return False
        try:
            require_same_user(peer)
        except (LocationError, OSError) as error:
            log.warning("a client was turned away: %s", error)
            peer.close()
            return True
        connection = Connection(peer, self._next_number)
        self._next_number += 1
        self._connections[connection.number] = connection
        self.clients.register(peer, selectors.EVENT_READ, lambda mask: self._ready(connection, mask))
        hello = Hello(PROTOCOL_VERSION, os.getpid(), connection.number)
        connection.queue_frame(frames.encode(FrameType.HELLO, hello))
        self._flush(connection)
        return True

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if mask & selectors.EVENT_READ and connection.number in self._connections:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            arrived = connection.receive()
            if arrived is None:
                self._drop(connection)
                return
            for kind, body in arrived if connection.close_at is None else []:
                self._handle(connection, kind, body)
        except FrameError as error:
            self._fail_connection(connection, "INVALID_ARGUMENT", str(error))

    def _handle(self, connection: Connection, kind: FrameType, body: bytes) -> None:
        if not connection.greeted:
            if kind is not FrameType.HELLO:
                raise FrameError(f"the first frame must be HELLO, not {kind.name}")
            frames.decode(Hello, body).require_version()
            connection.greeted_by_peer()
        elif kind is FrameType.SUBMIT:
            self._submit(connection, frames.decode(Submit, body))
        elif kind is FrameType.CANCEL:
            self._cancel(connection, frames.decode(Cancel, body).request_id)
        elif kind is FrameType.STATS:
            self._answer_stats(connection, frames.decode_query(body)[0])
        elif kind is FrameType.HEALTH:
            answer = [frames.decode_query(body)[0], self.health()]
            self._send_frame(connection, frames.encode(kind, answer))
        else:
            raise FrameError(f"a client may not send {kind.name}")

    def _submit(self, connection: Connection, submit: Submit) -> None:
        if submit.request_id in connection.requests:
            raise FrameError(f"request id {submit.request_id!r} is already open on this connection")
        connection.requests.add(submit.request_id)
        self._loop.submit((connection.number, submit.request_id), submit)

    def _cancel(self, connection: Connection, request_id: str) -> None:
        """This connection's request of that id; when it has none, every other connection's (the stop request)."""
        own = [connection] if request_id in connection.requests else []
        for owner in own or [c for c in self._connections.values() if request_id in c.requests]:
            self._loop.cancel((owner.number, request_id))

    def _answer_stats(self, connection: Connection, query: int) -> None:
        def answer(stats: dict[str, Any]) -> None:
            frame = frames.encode(FrameType.STATS, [query, stats])
            self._soon(lambda: self._send_stats(connection, frame))

        self._loop.ask_stats(answer)

    def health(self) -> dict[str, Any]:
        """What the process can say about itself without the loop."""
        age_s = self._loop.step_age_s
        state = "loading" if not self._loop.loaded else "hung" if age_s > self._step_timeout_s / 2 else "ready"
        return {
            **self._describe(),
            "state": state,
            "ready": state == "ready",
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started,
            "connections": len(self._connections),
            "step_age_s": age_s,
        }

    def _deliver(self, events: list[tuple[RequestKey, Event]]) -> None:
        touched: dict[int, Connection] = {}
        for (number, request_id), event in events:
            connection = self._connections.get(number)
            if connection is None or connection.close_at is not None:
                continue  # the client has left; its requests are being cancelled
            if isinstance(event, Error) or (not isinstance(event, Tokens) and event.remaining == 0):
                connection.requests.discard(request_id)
            touched[number] = connection
            try:
                connection.queue(event)
            except FrameError as error:
                self._fail_connection(connection, "RESOURCE_EXHAUSTED", str(error))
        for connection in touched.values():
            self._flush(connection)

    def _send_stats(self, connection: Connection, frame: bytes) -> None:
        try:
            self._send_frame(connection, frame)
        except FrameError as error:  # nobody behind the queue takes it, and it must not end the loop
            self._fail_connection(connection, "RESOURCE_EXHAUSTED", str(error))

    def _send_frame(self, connection: Connection, frame: bytes) -> None:
        if connection.number not in self._connections or connection.close_at is not None:
            return
        connection.queue_frame(frame)
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.number not in self._connections:
            return
        if not connection.send() or (connection.close_at is not None and not connection.wants_to_write):
            self._drop(connection)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if self.clients.get_key(connection.socket).events != mask:
            self.clients.modify(connection.socket, mask, self.clients.get_key(connection.socket).data)

    def _fail_connection(self, connection: Connection, code: ErrorCode, message: str) -> None:
        log.warning("connection %d: %s", connection.number, message)
        self._cancel_all(connection)
        connection.fail(Error(None, code, message), time.monotonic() + CLOSE_GRACE_S)
        self._flush(connection)

    def _cancel_all(self, connection: Connection) -> None:
        for request_id in connection.requests:
            self._loop.cancel((connection.number, request_id))
        connection.requests.clear()

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._cancel_all(connection)
        self.clients.unregister(connection.socket)
        connection.socket.close()
        if not self._connections:
            self._alone_since = time.monotonic()

    def _look_at_timers(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.close_at is not None and c.close_at <= now]:
            self._drop(connection)
        age_s = self._loop.step_age_s
        if age_s > self._step_timeout_s:
            self._failure = f"a step has run for {age_s:.1f} s; the limit is {self._step_timeout_s:g} s"

    def _alone_too_long(self) -> bool:
        return not self._connections and time.monotonic() - self._alone_since >= self._idle_timeout_s

    def _take_last_chance(self) -> bool:
        """Hides the socket, then looks once more for a client that came in between. True: there was one, go on."""
        self._path.unlink(missing_ok=True)
        accepted = self._accept()
        while accepted and self._accept():
            pass
        self._close_listener()
        if accepted:
            self._open_listener()
        return accepted

    def _say_goodbye(self) -> None:
        reason = self._failure or "the engine process ends"
        for connection in list(self._connections.values()):
            connection.fail(Error(None, "UNAVAILABLE", reason), time.monotonic())
            self._flush(connection)


class _Reading:
    """What the loop does without work: it reads for the server."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        server.clients.register(self._event, selectors.EVENT_READ, self.calm)
        self._begun = False

    def take(self) -> None:
        if not self._begun:
            self._begun = True
            self._server.wake()  # it waits for the same, and is to stand aside
        self._server.read_here()

    def disturb(self) -> None:
        os.eventfd_write(self._event, 1)

    def end(self) -> None:
        if self._begun:
            self._begun = False
            self._server.wake()

    def calm(self, _mask: int) -> None:
        """What `disturb` said is known."""
        with contextlib.suppress(BlockingIOError):  # the other thread saw it too
            os.eventfd_read(self._event)


def _selector_of(*sources: Any) -> selectors.BaseSelector:
    """Waits for any of `sources` to be readable; a selector is when one of its own is."""
    selector = selectors.DefaultSelector()
    for source in sources:
        selector.register(source, selectors.EVENT_READ)
    return selector


def _has_logprobs(addressed: tuple[RequestKey, Event]) -> bool:
    event = addressed[1]
    if isinstance(event, Tokens):
        return event.logprobs is not None
    return isinstance(event, Finished) and event.prompt_logprobs is not None
