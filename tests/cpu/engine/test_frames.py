"""The wire format: messages there and back, wrong fields named, garbage and long frames refused."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import socket
from array import array
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from gptoss_trt.runtime.engine import frames
from gptoss_trt.runtime.engine.connection import Connection, PendingEvents
from gptoss_trt.runtime.engine.frames import FrameError, FrameReader, FrameType, Hello
from gptoss_trt.runtime.engine.messages import (
    IDS,
    PROTOCOL_VERSION,
    Cancel,
    Error,
    Finished,
    Guide,
    Sampling,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)

FULL_SUBMIT = Submit(
    "id-ä",
    (1, 2, 200_000),
    7,
    min_tokens=1,
    sampling=Sampling(0.5, 3, 0.9, 0.1, 2**64 - 1, 1.1, 0.2, -0.3),
    stop_ids=(5,),
    stop_sequences=((1, 2), (3,)),
    bad_sequences=((9,),),
    logit_bias=((4, -1.5),),
    logprobs=2,
    prompt_logprobs=0,
    n=2,
    priority=-1,
    deadline_ms=100,
    cache_salt="s",
    guides=(Guide("regex", "a+", (1,), (2,)),),
)
MESSAGES = [
    Submit("r", (), 1),
    Submit("r", array(IDS), 1),
    Submit("r", array(IDS, (-(2**31), 0, 201_087, 2**31 - 1)), 1),
    FULL_SUBMIT,
    Cancel("r"),
    Error(None, "UNAVAILABLE", "text"),
    Tokens("r", 0, (1, 2), (TokenLogprobs(-0.5, ((1, -0.5), (2, -1.5))), TokenLogprobs(-1.0))),
    Finished("r", 1, "stop", Usage(1, 2, arrival_ns=2**62), 0, (None, TokenLogprobs(-2.0))),
]


def body_of(message: Any) -> bytes:
    return frames.encode(FrameType.SUBMIT, message)[frames.HEADER.size :]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_round_trips(message: Any) -> None:
    assert frames.decode(type(message), body_of(message)) == message


def test_an_array_of_ids_travels_as_its_bytes() -> None:
    ids = array(IDS, range(150_000, 158_192))
    body = body_of(Submit("r", ids, 1))
    assert ids.tobytes() in body and len(body) < 4 * len(ids) + 200
    decoded = frames.decode(Submit, body).token_ids
    assert isinstance(decoded, array) and decoded.typecode == IDS


def test_only_whole_ids_in_their_typecode_travel() -> None:
    for wrong in (array("q", (1,)), array("f", (1.0,))):
        with pytest.raises(TypeError, match=f"typecode '{IDS}', not '{wrong.typecode}'"):
            frames.encode(FrameType.SUBMIT, Submit("r", wrong, 1))
    fields = list(msgpack.unpackb(body_of(Submit("r", array(IDS, (1, 2)), 1))))
    fields[1] = fields[1][:-1]
    with pytest.raises(FrameError, match=r"Submit\.token_ids: 7 bytes are no whole number of ids of 4"):
        frames.decode(Submit, msgpack.packb(fields))


def test_waiting_tokens_are_framed_as_their_messages() -> None:
    waiting = PendingEvents()
    for message in (Tokens("a", 1, (1,)), Tokens("b", 0, (2,), (TokenLogprobs(-1.0),)), Tokens("a", 1, (3, 4))):
        waiting.add(message)
    merged = [Tokens("a", 1, (1, 3, 4)), Tokens("b", 0, (2,), (TokenLogprobs(-1.0),))]
    assert list(waiting.frames()) == [frames.encode(FrameType.TOKENS, merged)]
    assert not waiting and waiting.weight == 0


def test_numbers_become_the_declared_type() -> None:
    decoded = frames.decode(Submit, body_of(Submit("r", (1,), 1, sampling=Sampling(temperature=1))))
    assert type(decoded.sampling.temperature) is float


def mutations() -> Iterator[tuple[str, Any]]:
    """Bodies of a SUBMIT that are wrong in one place, by name."""
    good = msgpack.unpackb(body_of(FULL_SUBMIT))
    names = [field.name for field in dataclasses.fields(Submit)]
    for index, name in enumerate(names):
        for wrong in (None, True, "text", 1.5, [1.5], {"a": 1}, [["x"]], b"bytes"):
            fields = list(good)
            fields[index] = wrong
            yield name, fields
    yield "too short", good[:-1]
    yield "too long", [*good, 0]
    yield "no list", {"request_id": "r"}
    yield "number", 3


ALLOWED = {"min_tokens", "logprobs", "prompt_logprobs", "deadline_ms", "cache_salt", "request_id", "trace"}


def test_wrong_fields_are_named() -> None:
    refused = 0
    for name, body in mutations():
        try:
            frames.decode(Submit, msgpack.packb(body))
        except FrameError as error:
            refused += 1
            assert "Submit" in str(error)
            if name in {field.name for field in dataclasses.fields(Submit)}:
                assert f"Submit.{name}" in str(error)
        else:
            assert name in ALLOWED  # None or a text, where that is a value
    assert refused > 100


def test_pickles_and_garbage_are_refused() -> None:
    for body in (pickle.dumps(Cancel("r")), b"\xc1", b"", b"\x92\x01", body_of(Cancel("r")) + b"x", b"\x91" * 5000):
        with pytest.raises(FrameError):
            frames.decode(Cancel, body)


def test_a_reader_takes_any_cut_and_keeps_its_limit() -> None:
    stream = b"".join(frames.encode(FrameType.CANCEL, Cancel(f"r{i}")) for i in range(20))
    generator = random.Random(2)
    reader, seen, position = FrameReader(), [], 0
    while position < len(stream):
        step = generator.randrange(1, 9)
        seen += [frames.decode(Cancel, body).request_id for _, body in reader.feed(stream[position : position + step])]
        position += step
    assert seen == [f"r{i}" for i in range(20)]
    with pytest.raises(FrameError, match="over the limit of 4096"):
        list(FrameReader().feed(frames.HEADER.pack(4097, FrameType.HELLO)))
    with pytest.raises(FrameError, match="unknown frame type 99"):
        list(FrameReader().feed(frames.HEADER.pack(1, 99)))
    with pytest.raises(FrameError, match="over the limit of 10"):
        frames.encode(FrameType.SUBMIT, Submit("r", tuple(range(100)), 1), limit=10)


def test_a_long_frame_behind_the_hello_in_one_read_is_taken() -> None:
    """The hello raises the limit for what came with it: frames are cut one at a time."""
    near, far = socket.socketpair()
    with near, far:
        connection = Connection(far, 1)
        long = Submit("long", tuple(range(5000)), 1)
        hello = frames.encode(FrameType.HELLO, Hello(PROTOCOL_VERSION, os.getpid()))
        near.sendall(hello + frames.encode(FrameType.SUBMIT, long))
        arrived = connection.receive()
        assert arrived is not None
        kinds = []
        for kind, _ in arrived:
            kinds.append(kind)
            if kind is FrameType.HELLO:
                connection.greeted_by_peer()
        assert kinds == [FrameType.HELLO, FrameType.SUBMIT]
