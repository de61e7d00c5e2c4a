"""From the engine's events to Triton's responses: a model's live requests, its sender thread, its cancellation watch.

Invariant: a live request is closed exactly once, by its last sequence's end, an error or its client's cancellation, and
nothing is sent after that. A stream's waiting tokens become one response, because a send is a synchronous handshake of
200 to 350 us. Must not know tensors' names or Triton's Python module.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from gptoss_trt.runtime.engine.messages import Error, ErrorCode, Event, Finished, Submit, Tokens
from gptoss_trt.runtime.triton_models.answers import Answer, Arrays
from gptoss_trt.runtime.triton_models.inputs import RefusalCode, RefusalError

log = logging.getLogger(__name__)

ERROR_CODES: dict[ErrorCode, RefusalCode] = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "CANCELLED",  # Triton has no code of that name; the text says that it was the deadline
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "INTERNAL": "INTERNAL",
}
SHORTEST_POLL_S = 0.02
LONGEST_POLL_S = 0.05
POLL_SHARE = 8  # a look at all live requests takes at most about 1 / POLL_SHARE of the watch's time
CLOSE_TIMEOUT_S = 5.0


class Responder(Protocol):
    """The way back to one Triton request."""

    trace: str  # W3C traceparent of the request's span; empty when it is not traced

    def send(self, arrays: Arrays, *, final: bool) -> None: ...

    def fail(self, error: RefusalError) -> None:
        """Sends an error as the last response."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone away. Costs about 100 us."""


class Engine(Protocol):
    """What is used of an EngineClient."""

    def submit(self, submit: Submit, sink: Callable[[Event], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class _Stream:
    """One sequence, or all of an engine's request: the events that wait for the sender."""

    def __init__(self, request: LiveRequest, engine_id: str, answer: Answer, *, whole: bool) -> None:
        self.request = request
        self.whole = whole  # all sequences of the engine's request, not one of several
        self.engine_id = engine_id
        self.answer = answer
        self.events: deque[Tokens | Finished] = deque()
        self.queued = False
        self.complete = False  # the answer wants no more tokens
        self.ended = False  # the engine has said its last word
        self.delivered = False  # and so have we


class LiveRequest:
    """One Triton request until its last response."""

    def __init__(self, triton_id: str, responder: Responder) -> None:
        self.triton_id = triton_id
        self.responder = responder
        self.streams: list[_Stream] = []
        self.failure: RefusalError | None = None
        self.closed = False
        self._taken: set[str] = set()

    def take_open_ids(self, only: str | None) -> list[str]:
        """Ids of the engine's requests that have not ended (or `only` that one), each given once in a request's life: a
        cancellation of an id that the engine no longer knows from us would reach another model's request of that id."""
        ids = dict.fromkeys(stream.engine_id for stream in self.streams if not stream.ended)
        fresh = [name for name in ids if name not in self._taken and only in (None, name)]
        self._taken.update(fresh)
        return fresh


class Delivery:
    """The live requests of one model instance and the two threads that serve them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[int, LiveRequest] = {}
        self._open_ids: set[str] = set()  # of requests that the engine has not ended
        self._lock = threading.Lock()  # guards _live, _open_ids and what is told of a LiveRequest's end
        self._ready: queue.SimpleQueue[_Stream | LiveRequest | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self._watch = threading.Thread(target=self._watch_loop, name="cancellation-watch", daemon=True)
        self._sender.start()
        self._watch.start()

    def start(self, triton_id: str, responder: Responder, jobs: Iterable[tuple[Submit, Sequence[Answer]]]) -> None:
        """Submits the jobs of one Triton request. Each submit has one answer for each of its sequences, in order, or
        one for all of them."""
        request = LiveRequest(triton_id, responder)
        submits: list[tuple[Submit, list[_Stream]]] = []
        for submit, answers in jobs:
            whole = len(answers) == 1
            streams = [_Stream(request, submit.request_id, answer, whole=whole) for answer in answers]
            request.streams += streams
            submits.append((replace(submit, trace=responder.trace) if responder.trace else submit, streams))
        with self._lock:
            self._live[id(request)] = request
            self._open_ids.update(submit.request_id for submit, _ in submits)
        for submit, streams in submits:
            self._engine.submit(submit, self._sink(request, streams))

    def stop(self, triton_id: str) -> bool:
        """Ends the requests with that Triton id; they close with what they have. False when there is none here."""
        with self._lock:
            stopped = [request for request in self._live.values() if request.triton_id == triton_id]
        for request in stopped:
            self._cancel_in_engine(request)
        return bool(stopped)

    def is_open(self, engine_id: str) -> bool:
        """Whether the engine still works on a request of that id, be its client gone or not."""
        with self._lock:
            return engine_id in self._open_ids

    def is_idle(self) -> bool:
        """Whether every request that was started has had its last response."""
        with self._lock:
            return not self._live

    def close(self) -> None:
        """Fails what is still open and ends the threads. The engine client must be closed first."""
        self._closing.set()
        with self._lock:
            left = list(self._live.values())
        for request in left:
            self._fail_later(request, RefusalError("the model is being unloaded", "UNAVAILABLE"))
        self._ready.put(None)
        self._sender.join(CLOSE_TIMEOUT_S)
        self._watch.join(CLOSE_TIMEOUT_S)

    # -- the engine client's thread -----------------------------------------------------------------------------------

    def _sink(self, request: LiveRequest, streams: Sequence[_Stream]) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            if isinstance(event, Error) or (isinstance(event, Finished) and event.remaining == 0):
                with self._lock:
                    self._open_ids.discard(streams[0].engine_id)
            if isinstance(event, Error):
                self._fail_later(request, RefusalError(event.message, ERROR_CODES[event.code], event.code))
                return
            stream = streams[0 if streams[0].whole else event.sequence]
            stream.events.append(event)
            if not stream.queued:  # the sender clears it before it looks at the events, so none is left behind
                stream.queued = True
                self._ready.put(stream)

        return sink

    def _fail_later(self, request: LiveRequest, error: RefusalError) -> None:
        request.failure = request.failure or error
        self._ready.put(request)

    # -- the sender's thread ------------------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while (item := self._ready.get()) is not None:
            request = item if isinstance(item, LiveRequest) else item.request
            try:
                if request.closed:
                    continue
                if isinstance(item, LiveRequest):
                    self._close_failed(item)
                else:
                    self._serve(item)
            except Exception as error:
                log.exception("the answer to request %r failed", request.triton_id)
                request.failure = RefusalError(f"the model failed: {error}", "INTERNAL")
                self._close_failed(request)

    def _serve(self, stream: _Stream) -> None:
        stream.queued = False
        if stream.delivered:
            return
        while stream.events:
            event = stream.events.popleft()
            if isinstance(event, Finished):
                stream.answer.finish(event)
                stream.ended = event.remaining == 0 or not stream.whole
            elif stream.answer.push(event) and not stream.complete:
                stream.complete = True
                self._end_if_complete(stream)
        arrays = stream.answer.take()
        stream.delivered = stream.ended
        last = all(other.delivered for other in stream.request.streams)
        if (arrays is None and not last) or (last and not self._retire(stream.request)):
            return
        stream.request.responder.send(arrays or {}, final=last)

    def _end_if_complete(self, stream: _Stream) -> None:
        siblings = [other for other in stream.request.streams if other.engine_id == stream.engine_id]
        if all(other.complete or other.ended for other in siblings):
            self._cancel_in_engine(stream.request, stream.engine_id)

    def _close_failed(self, request: LiveRequest) -> None:
        if self._retire(request):
            self._cancel_in_engine(request)
            request.responder.fail(request.failure or RefusalError("the request failed", "INTERNAL"))

    def _retire(self, request: LiveRequest) -> bool:
        """Takes the request out of the live ones; False when that has been done before."""
        with self._lock:
            if request.closed:
                return False
            request.closed = True
            self._live.pop(id(request), None)
            return True

    def _cancel_in_engine(self, request: LiveRequest, only: str | None = None) -> None:
        with self._lock:
            ids = request.take_open_ids(only)
        for engine_id in ids:
            self._engine.cancel(engine_id)

    # -- the watch's thread -------------------------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        pause_s = SHORTEST_POLL_S
        while not self._closing.wait(pause_s):
            start = time.monotonic()
            with self._lock:
                live = list(self._live.values())
            for request in live:
                if not request.closed and request.responder.is_cancelled():
                    self._cancel_in_engine(request)
                    self._fail_later(request, RefusalError("the client cancelled the request", "CANCELLED"))
            took_s = time.monotonic() - start
            pause_s = min(LONGEST_POLL_S, max(SHORTEST_POLL_S, POLL_SHARE * took_s))
