"""Tells an external router which prefix blocks this engine holds: a ZeroMQ PUB socket in vLLM's message format.

A message has three frames: the topic, a sequence number (8 bytes, big endian) and a msgpack array [time in seconds,
[event ...], data-parallel rank]. Events are arrays: ["BlockStored", [hash ...], parent hash or nil, [token id ...],
tokens of a block, nil, medium] and ["BlockRemoved", [hash ...], medium]; a hash is the first 8 bytes of the engine's,
as an unsigned integer. The replay socket (ROUTER) answers a sequence number with the messages kept from there on, and
ends with number -1 and an empty frame. One message a step, none for a step without events.

Invariant: a router that lags or is absent never delays a step: what it does not take is dropped, and the gap in the
numbers says so. Must not know sequences or block numbers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

from gptoss_trt.runtime.engine.core import EngineLoadError

log = logging.getLogger(__name__)

KEPT_MESSAGES = 10_000  # for the replay socket
QUEUED_MESSAGES = 100_000  # for each router, before they are dropped
POLL_MS = 200
END_NUMBER = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Collects a step's events and sends them. `endpoint` and `replay_endpoint` as ZeroMQ writes them, such as
    tcp://127.0.0.1:5557; `medium` is where the blocks are ("GPU" or "CPU").

    Raises EngineLoadError when an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, block_tokens: int, medium: str, topic: str = "") -> None:
        self._block_tokens = block_tokens
        self._medium = medium
        self._topic = topic.encode()
        self._events: list[list[Any]] = []
        self._numbers = itertools.count()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MESSAGES)
        self._lock = threading.Lock()  # of _kept
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._bind(zmq.PUB, endpoint)
        self._replayer: threading.Thread | None = None
        if replay_endpoint:
            router = self._bind(zmq.ROUTER, replay_endpoint)
            self._replayer = threading.Thread(target=self._replay, args=(router,), name="kv-replay", daemon=True)
            self._replayer.start()

    def stored(self, content: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """A block of these tokens, behind the block `parent`, can be found from now on."""
        number, before = _number(content), None if parent is None else _number(parent)
        last = self._events[-1] if self._events else None
        if last is not None and last[0] == "BlockStored" and last[1][-1] == before:  # the same chain goes on
            last[1].append(number)
            last[3].extend(tokens)
        else:
            self._events.append(["BlockStored", [number], before, list(tokens), self._block_tokens, None, self._medium])

    def removed(self, content: bytes) -> None:
        """The block can be found no longer."""
        last = self._events[-1] if self._events else None
        if last is not None and last[0] == "BlockRemoved":
            last[1].append(_number(content))
        else:
            self._events.append(["BlockRemoved", [_number(content)], self._medium])

    def flush(self) -> None:
        """Sends what has been collected as one message."""
        if not self._events:
            return
        payload = msgpack.packb([time.time(), self._events, 0])
        self._events = []
        number = next(self._numbers)
        with self._lock:
            self._kept.append((number, payload))
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """Ends the replay thread and unbinds."""
        self._stop.set()
        if self._replayer is not None:
            self._replayer.join()
        self._socket.close(linger=0)
        self._context.term()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp:") and port.isdigit() and int(port) > 65535:  # ZeroMQ would bind another one
            raise EngineLoadError(f"engine option kv_events: {endpoint!r} names port {port}; the last is 65535")
        socket = self._context.socket(kind)
        socket.set_hwm(QUEUED_MESSAGES)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise EngineLoadError(f"engine option kv_events: {endpoint!r} cannot be bound: {error}") from error
        return socket

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        try:
            while not self._stop.is_set():
                if router.poll(POLL_MS):
                    self._answer(router, router.recv_multipart())
        finally:
            router.close(linger=0)

    def _answer(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        peer, wanted = frames[0], frames[-1]
        if len(frames) != 3 or len(wanted) != 8:
            log.warning("a replay request of %d frames, the last of %d bytes, is ignored", len(frames), len(wanted))
            return
        first = int.from_bytes(wanted, "big")
        with self._lock:
            messages = [message for message in self._kept if message[0] >= first]
        for number, payload in messages:
            router.send_multipart((peer, b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((peer, b"", END_NUMBER, b""))


def _number(content: bytes) -> int:
    return int.from_bytes(content[:8], "big")
