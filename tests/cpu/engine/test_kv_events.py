"""KV events as a router reads them: frames, merging of chains, replay, endpoints that cannot be bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from click.testing import CliRunner

from gptoss_trt.build_engine.random_engine import random_engine
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.kv_events import KvEventPublisher
from gptoss_trt.runtime.engine.messages import Sampling, Submit
from gptoss_trt.runtime.engine.model_core import ModelCore
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.model import load_model

TIMEOUT_MS = 5000
A, B, C = (bytes([value] * 16) for value in (1, 2, 3))
A_NUMBER, B_NUMBER, C_NUMBER = (int.from_bytes(content[:8], "big") for content in (A, B, C))


@pytest.fixture
def endpoints(tmp_path: Any) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def publisher(endpoints: tuple[str, str]) -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(*endpoints, block_tokens=2, medium="GPU", topic="kv")
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def subscribed(context: zmq.Context[Any], endpoint: str, publisher: KvEventPublisher) -> Any:
    """A subscriber that hears the publisher: it drops messages until the first one is seen to arrive."""
    socket = context.socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    for _ in range(100):
        publisher.removed(C)
        publisher.flush()
        if socket.poll(50):
            break
    else:
        pytest.fail("no message arrived")
    while socket.poll(50):
        socket.recv_multipart()
    return socket


def test_a_chain_is_one_event_and_a_step_one_message(
    publisher: KvEventPublisher, endpoints: tuple[str, str], context: zmq.Context[Any]
) -> None:
    socket = subscribed(context, endpoints[0], publisher)
    publisher.stored(A, None, [1, 2])
    publisher.stored(B, A, [3, 4])
    publisher.stored(C, A, [5, 6])
    publisher.removed(B)
    publisher.removed(C)
    publisher.flush()
    publisher.flush()  # nothing to say: no message
    assert socket.poll(TIMEOUT_MS)
    topic, number, payload = socket.recv_multipart()
    assert not socket.poll(100)
    time_s, events, rank = msgpack.unpackb(payload)
    assert (topic, len(number), rank) == (b"kv", 8, 0)
    assert time_s > 1.7e9
    assert events == [
        ["BlockStored", [A_NUMBER, B_NUMBER], None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockStored", [C_NUMBER], A_NUMBER, [5, 6], 2, None, "GPU"],
        ["BlockRemoved", [B_NUMBER, C_NUMBER], "GPU"],
    ]


def test_a_router_that_missed_messages_asks_for_them(
    publisher: KvEventPublisher, endpoints: tuple[str, str], context: zmq.Context[Any]
) -> None:
    for content in (A, B, C):
        publisher.stored(content, None, [1, 2])
        publisher.flush()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoints[1])
    socket.send_multipart((b"", (1).to_bytes(8, "big")))
    answers = []
    while not answers or answers[-1][0] != -1:
        assert socket.poll(TIMEOUT_MS)
        _, number, payload = socket.recv_multipart()
        answers.append((int.from_bytes(number, "big", signed=True), payload))
    assert [number for number, _ in answers] == [1, 2, -1]
    assert [msgpack.unpackb(payload)[1][0][1] for _, payload in answers[:-1]] == [[B_NUMBER], [C_NUMBER]]


def test_a_bad_replay_request_is_survived(
    publisher: KvEventPublisher, endpoints: tuple[str, str], context: zmq.Context[Any]
) -> None:
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoints[1])
    socket.send_multipart((b"", b"one"))
    socket.send_multipart((b"", (0).to_bytes(8, "big")))
    assert socket.poll(TIMEOUT_MS)
    assert socket.recv_multipart()[1:] == [(-1).to_bytes(8, "big", signed=True), b""]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:99999", "nowhere", "ipc:///no/such/folder/socket"])
def test_an_endpoint_that_cannot_be_bound_is_named(endpoint: str) -> None:
    with pytest.raises(EngineLoadError, match="kv_events"):
        KvEventPublisher(endpoint, "", block_tokens=2, medium="CPU")


def test_a_router_knows_what_the_engine_holds(
    tmp_path: Any, endpoints: tuple[str, str], context: zmq.Context[Any]
) -> None:
    """Blocks come and go in a cache for some of the prompts; stored less removed is what the cache can find."""
    made = CliRunner().invoke(random_engine, [str(tmp_path / "engine"), "--model", "tiny"])
    assert made.exit_code == 0, made.output
    options = EngineOptions(
        device="cpu", threads=1, block_tokens=4, max_batch=4, step_tokens=64, kv_bytes=400 << 10,
        kv_events=endpoints[0], kv_events_replay=endpoints[1],
    )  # fmt: skip
    model = load_model(tmp_path / "engine")
    core = ModelCore(model, options, kv_bytes=options.kv_bytes)
    generator = random.Random(5)
    prompts = [tuple(generator.randrange(256) for _ in range(150)) for _ in range(24)]
    for number, prompt in enumerate(prompts + prompts[:4]):
        core.submit((0, str(number)), Submit(str(number), prompt, 6, sampling=Sampling(seed=1)), 0)
    while core.has_work():
        core.step()
        core.settle()
    tokens_of: dict[int, tuple[int, ...]] = {}
    removed = 0
    for _, events, _ in replayed(context, endpoints[1]):
        for kind, hashes, *rest in events:
            for index, number in enumerate(hashes):
                if kind == "BlockRemoved":
                    del tokens_of[number]
                    removed += 1
                else:
                    before = rest[0] if index == 0 else hashes[index - 1]
                    tokens_of[number] = (*tokens_of.get(before, ()), *rest[1][index * 4 : index * 4 + 4])
    assert removed > 100, "nothing was evicted: the cache is too large for this test"
    held = {int.from_bytes(content[:8], "big") for content in core._cache.full.known_contents()}
    assert set(tokens_of) == held
    assert all(any(p[: len(t)] == t[: len(p)] for p in prompts) for t in tokens_of.values())


def replayed(context: zmq.Context[Any], endpoint: str) -> Iterator[Any]:
    """Every batch from the first on."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart((b"", (0).to_bytes(8, "big")))
    while True:
        assert socket.poll(TIMEOUT_MS)
        _, _, payload = socket.recv_multipart()
        if not payload:
            return
        yield msgpack.unpackb(payload)
