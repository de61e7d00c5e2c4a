"""One client's connection inside the engine process: reads frames, holds what is still to be sent, within bounds.

Invariant: memory is bounded. Tokens that wait because the client reads slowly are merged by sequence, so a slow client
gets the same tokens in fewer messages; beyond PENDING_TOKEN_LIMIT it gets one Error without a request id and is closed.
One thread at a time touches a connection, which the server sees to. Must not know the core.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from gptoss_trt.runtime.engine.codec import pack
from gptoss_trt.runtime.engine.frames import (
    REPLY_LIMIT_BYTES,
    REQUEST_LIMIT_BYTES,
    FrameError,
    FrameReader,
    FrameType,
    encode,
    encode_plain,
)
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, TokenLogprobs, Tokens

READ_BYTES = 1 << 16  # at once: more is memory that malloc maps and unmaps each time
SEND_BYTES = 1 << 18
PENDING_TOKEN_LIMIT = 1 << 20  # tokens (and log-probability entries) that may wait for a slow client: about 64 MB
FRAME_ITEM_LIMIT = 1 << 17  # tokens put into one frame, so that a frame stays far below its byte limit


class PendingEvents:
    """Events that wait to be sent: tokens merged by sequence, then ends, then errors; a request's order is kept."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, int], tuple[list[int], list[TokenLogprobs]]] = {}
        self._finished: list[Finished] = []
        self._errors: list[Error] = []
        self.weight = 0  # tokens and log-probability entries that wait

    def __bool__(self) -> bool:
        return bool(self._tokens or self._finished or self._errors)

    def add(self, event: Event) -> None:
        if isinstance(event, Tokens):
            ids, logprobs = self._tokens.setdefault((event.request_id, event.sequence), ([], []))
            ids.extend(event.token_ids)
            self.weight += len(event.token_ids)
            if event.logprobs is not None:
                logprobs.extend(event.logprobs)
                self.weight += sum(2 + len(entry.top) for entry in event.logprobs)
        elif isinstance(event, Finished):
            self._finished.append(event)
            self.weight += sum(2 + len(entry.top) for entry in event.prompt_logprobs or () if entry is not None)
        else:
            self._errors.append(event)

    def frames(self) -> Iterator[bytes]:
        """Takes everything that waits, as frames. An event too large for a frame becomes its request's Error."""
        tokens, finished, errors = self._tokens, self._finished, self._errors
        self.__init__()  # type: ignore[misc]
        part: list[list[Any]] = []  # Tokens as pack makes them, without making those first: nearly all that is sent
        size = 0
        for (request_id, sequence), (ids, logprobs) in tokens.items():
            part.append([request_id, sequence, ids, pack(logprobs) if logprobs else None])
            size += len(ids) + sum(2 + len(entry.top) for entry in logprobs)
            if size >= FRAME_ITEM_LIMIT:
                yield encode_plain(FrameType.TOKENS, part)
                part, size = [], 0
        if part:
            yield encode_plain(FrameType.TOKENS, part)
        for end in finished:
            yield self._end_frame(end)
        for error in errors:
            yield encode(FrameType.ERROR, error)

    @staticmethod
    def _end_frame(end: Finished) -> bytes:
        try:
            return encode(FrameType.FINISHED, [end])
        except FrameError as error:
            return encode(FrameType.ERROR, Error(end.request_id, "RESOURCE_EXHAUSTED", str(error)))


class Connection:
    """A non-blocking socket with its reader and its outgoing bytes."""

    def __init__(self, peer: socket.socket, number: int) -> None:
        peer.setblocking(False)
        self.socket = peer
        self.number = number
        self.greeted = False
        self.requests: set[str] = set()  # open request ids
        self.close_at: float | None = None  # set once the connection only flushes its last error
        self._reader = FrameReader()
        self._pending = PendingEvents()
        self._outgoing = bytearray()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing or self._pending)

    def greeted_by_peer(self) -> None:
        self.greeted = True
        self._reader.limit = REQUEST_LIMIT_BYTES

    def receive(self) -> Iterator[tuple[FrameType, bytes]] | None:
        """The frames that have arrived; None at the end of the stream. Each is cut when it is asked for, because the
        hello raises the limit for what came with it. Raises FrameError, and so does its iterator."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        return self._reader.feed(data) if data else None

    def queue(self, event: Event) -> None:
        """Adds an event to what waits; raises FrameError when a slow client has let too much pile up."""
        self._pending.add(event)
        if self._pending.weight > PENDING_TOKEN_LIMIT:
            raise FrameError(
                f"{self._pending.weight} tokens wait for a client that does not read; "
                f"the limit is {PENDING_TOKEN_LIMIT}"
            )

    def queue_frame(self, frame: bytes) -> None:
        """Adds a frame that is small and not part of a request (hello, stats, health)."""
        if len(self._outgoing) > REPLY_LIMIT_BYTES:
            raise FrameError(f"{len(self._outgoing)} bytes of answers wait for a client that does not read them")
        self._outgoing += frame

    def fail(self, error: Error, close_at: float) -> None:
        """Drops what waits, queues the connection's last error; closes at `close_at` (time.monotonic()) at latest."""
        self._pending = PendingEvents()
        self.close_at = close_at
        self._outgoing += encode(FrameType.ERROR, error)

    def send(self) -> bool:
        """Sends what the socket takes. False when the peer is gone."""
        if not self._outgoing:
            for frame in self._pending.frames():
                self._outgoing += frame
        try:
            sent = self.socket.send(memoryview(self._outgoing)[:SEND_BYTES]) if self._outgoing else 0
        except BlockingIOError:
            return True
        except OSError:
            return False
        del self._outgoing[:sent]
        return True
