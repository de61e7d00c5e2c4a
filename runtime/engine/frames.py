"""Frames on the engine's socket: 4 bytes of length, 1 byte of type, a msgpack body; the hello goes first, both ways.

Invariant: nothing larger than a connection's limit is ever buffered, and nothing is ever unpickled: a body is msgpack
of plain values that codec.py checks field by field. Must not know sockets, threads or requests.

| type | client to engine | engine to client |
|---|---|---|
| HELLO | Hello | Hello |
| SUBMIT | Submit | |
| CANCEL | Cancel | |
| TOKENS | | list of Tokens: one frame a step for all requests of the connection |
| FINISHED | | list of Finished, after the tokens of their step |
| ERROR | | Error; without a request id it is about the connection, which then closes |
| STATS, HEALTH | [query] | [query, dictionary] |
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from gptoss_trt.runtime.engine.codec import DecodeError, pack, unpack
from gptoss_trt.runtime.engine.messages import PROTOCOL_VERSION

T = TypeVar("T")

HEADER = struct.Struct(">IB")  # length of the body in bytes, type
HELLO_LIMIT_BYTES = 4096  # until a peer has said hello
REQUEST_LIMIT_BYTES = 16 << 20  # client to engine: 131,072 ids are 0.7 MB; the rest is room for bias and bad sequences
REPLY_LIMIT_BYTES = 64 << 20  # engine to client: log-probabilities of a long prompt


class FrameType(enum.IntEnum):
    """The second field of a frame's header."""

    HELLO = 1
    SUBMIT = 2
    TOKENS = 3
    FINISHED = 4
    ERROR = 5
    CANCEL = 6
    STATS = 7
    HEALTH = 8


_KINDS = {int(kind): kind for kind in FrameType}


@dataclass(frozen=True)
class Hello:
    """The first frame of each side. `connection` is the engine's number for this connection (0 from a client)."""

    version: int
    pid: int
    connection: int = 0

    def require_version(self) -> None:
        """Raises VersionError when the peer speaks another version."""
        if self.version != PROTOCOL_VERSION:
            raise VersionError(f"the peer speaks protocol version {self.version}, this side {PROTOCOL_VERSION}")


class FrameError(ValueError):
    """A peer that breaks the protocol: the connection cannot go on."""


class VersionError(FrameError):
    """A peer of another version of the protocol: no connection will go on."""


def encode(kind: FrameType, body: Any, limit: int = REPLY_LIMIT_BYTES) -> bytes:
    """One frame. `body`: a message, a list of messages or plain values. Raises FrameError beyond `limit` bytes."""
    return encode_plain(kind, pack(body), limit)


def encode_plain(kind: FrameType, body: Any, limit: int = REPLY_LIMIT_BYTES) -> bytes:
    """One frame of what is plain values already. Raises FrameError beyond `limit` bytes."""
    packed = msgpack.packb(body, use_bin_type=True)
    if len(packed) > limit:
        raise FrameError(f"a {kind.name} frame of {len(packed)} bytes is over the limit of {limit}")
    return HEADER.pack(len(packed), kind) + bytes(packed)


def decode(kind: type[T], body: bytes) -> T:
    """The message of type `kind` in a frame's body. Raises FrameError."""
    try:
        return unpack(kind, decode_plain(body))
    except DecodeError as error:
        raise FrameError(str(error)) from error


def decode_each(kind: type[T], body: bytes) -> list[T]:
    """The list of messages of type `kind` in a frame's body. Raises FrameError."""
    raw = decode_plain(body)
    if type(raw) is not tuple:
        raise FrameError(f"expected a list of {kind.__name__}, got {type(raw).__name__}")
    try:
        return [unpack(kind, item) for item in raw]
    except DecodeError as error:
        raise FrameError(str(error)) from error


def decode_query(body: bytes) -> tuple[int, dict[str, Any] | None]:
    """The query number of a STATS or HEALTH frame and, in an answer, its dictionary. Raises FrameError."""
    raw = decode_plain(body)
    if type(raw) is not tuple or not raw or len(raw) > 2 or type(raw[0]) is not int:
        raise FrameError("expected [query] or [query, dictionary]")
    if len(raw) == 1:
        return raw[0], None
    if type(raw[1]) is not dict:
        raise FrameError(f"expected [query, dictionary], got {type(raw[1]).__name__}")
    return raw[0], raw[1]


def decode_plain(body: bytes) -> Any:
    """A body as plain values, arrays as tuples. Raises FrameError for anything that is not one whole msgpack value."""
    try:
        return msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(f"a body of {len(body)} bytes is not msgpack: {type(error).__name__}: {error}") from error


class FrameReader:
    """Cuts a byte stream into frames. The limit starts at the hello's and is raised once the peer is known."""

    def __init__(self, limit: int = HELLO_LIMIT_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameType, bytes]]:
        """Yields each frame that `data` completes. Raises FrameError for an unknown type or a length over the limit."""
        if not self._buffer:
            whole = self._next(data)
            if whole is not None and HEADER.size + len(whole[1]) == len(data):  # as nearly always
                yield whole
                return
        self._buffer += data
        while (frame := self._next(self._buffer)) is not None:
            del self._buffer[: HEADER.size + len(frame[1])]
            yield frame

    def _next(self, data: bytes | bytearray) -> tuple[FrameType, bytes] | None:
        """The frame that `data` begins with, if all of it is there."""
        if len(data) < HEADER.size:
            return None
        length, number = HEADER.unpack_from(data)
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError(f"unknown frame type {number}")
        if length > self.limit:
            raise FrameError(f"a {kind.name} frame of {length} bytes is over the limit of {self.limit}")
        if len(data) < HEADER.size + length:
            return None
        return kind, bytes(memoryview(data)[HEADER.size : HEADER.size + length])
