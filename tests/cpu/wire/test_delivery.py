"""The sender and the cancellation watch against an engine and a client that a test plays."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Submit, Tokens, Usage
from gptoss_trt.runtime.triton_models.answers import Place, TokenAnswer
from gptoss_trt.runtime.triton_models.delivery import Delivery
from gptoss_trt.runtime.triton_models.generation import Wanted
from gptoss_trt.runtime.triton_models.inputs import RefusalError

STREAMED = Wanted(True, False, False, False, False, False)
USAGE = Usage(1, 1)


class PlayedEngine:
    def __init__(self) -> None:
        self.sinks: dict[str, Callable[[Event], None]] = {}
        self.cancelled: list[str] = []

    def submit(self, submit: Submit, sink: Callable[[Event], None]) -> None:
        self.sinks[submit.request_id] = sink

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class PlayedClient:
    trace = ""

    def __init__(self, send_s: float = 0.0) -> None:
        self.got: queue.Queue[tuple[Any, bool]] = queue.Queue()
        self.gone = False
        self._send_s = send_s

    def send(self, arrays: Any, *, final: bool) -> None:
        time.sleep(self._send_s)
        self.got.put((arrays, final))

    def fail(self, error: RefusalError) -> None:
        self.got.put((error, True))

    def is_cancelled(self) -> bool:
        return self.gone

    def ids(self) -> list[int]:
        """Token ids up to the last response."""
        ids: list[int] = []
        final = False
        while not final:
            arrays, final = self.got.get(timeout=5)
            ids += arrays["output_ids"][0, 0].tolist()
        return ids


@pytest.fixture
def engine() -> PlayedEngine:
    return PlayedEngine()


@pytest.fixture
def delivery(engine: PlayedEngine) -> Iterator[Delivery]:
    made = Delivery(engine)
    yield made
    made.close()


def start(delivery: Delivery, client: PlayedClient, *names: str, n: int = 1, triton_id: str = "") -> None:
    jobs = [
        (Submit(name, (1,), 100, n=n), [TokenAnswer(Place(row, i), STREAMED, (1,)) for i in range(n)])
        for row, name in enumerate(names)
    ]
    delivery.start(triton_id, client, jobs)


def end(name: str, sequence: int = 0, remaining: int = 0, reason: Any = "stop") -> Finished:
    return Finished(name, sequence, reason, USAGE, remaining)


def test_waiting_tokens_become_one_response(delivery: Delivery, engine: PlayedEngine) -> None:
    client = PlayedClient(send_s=0.02)
    start(delivery, client, "a")
    for i in range(100):
        engine.sinks["a"](Tokens("a", 0, (i,)))
        time.sleep(0.001)
    engine.sinks["a"](end("a"))
    responses, final = [], False
    while not final:
        arrays, final = client.got.get(timeout=5)
        responses.append(arrays["output_ids"][0, 0].tolist())
    assert [i for ids in responses for i in ids] == list(range(100))
    assert len(responses) < 30


def test_the_last_sequence_of_the_last_prompt_closes(delivery: Delivery, engine: PlayedEngine) -> None:
    client = PlayedClient()
    start(delivery, client, "a", "b", n=2)
    finals = []
    for name, sequence, remaining in (("a", 1, 1), ("b", 0, 1), ("a", 0, 0), ("b", 1, 0)):
        engine.sinks[name](end(name, sequence, remaining))
        arrays, final = client.got.get(timeout=5)
        finals.append((int(arrays["batch_index"][0, 0]), int(arrays["sequence_index"][0, 0]), final))
    assert finals == [(0, 1, False), (1, 0, False), (0, 0, False), (1, 1, True)]


def test_an_error_closes_and_cancels_the_rest(delivery: Delivery, engine: PlayedEngine) -> None:
    client = PlayedClient()
    start(delivery, client, "a", "b")
    engine.sinks["a"](Error("a", "RESOURCE_EXHAUSTED", "full"))
    error, final = client.got.get(timeout=5)
    assert (str(error), error.code, error.engine_code, final) == ("full", "UNAVAILABLE", "RESOURCE_EXHAUSTED", True)
    assert "b" in engine.cancelled
    engine.sinks["b"](end("b", reason="cancelled"))
    time.sleep(0.05)
    assert client.got.empty(), "nothing is sent after the last response"


def test_a_client_that_is_gone(delivery: Delivery, engine: PlayedEngine) -> None:
    client, other = PlayedClient(), PlayedClient()
    start(delivery, client, "a")
    start(delivery, other, "b")
    client.gone = True
    error, _ = client.got.get(timeout=5)
    assert error.code == "CANCELLED"
    assert engine.cancelled == ["a"]
    assert delivery.is_open("a"), "its id is not free before the engine says so"
    engine.sinks["a"](end("a", reason="cancelled"))
    assert not delivery.is_open("a")
    engine.sinks["b"](end("b"))
    assert other.ids() == []


def test_a_stop_request_ends_what_runs_under_its_id(delivery: Delivery, engine: PlayedEngine) -> None:
    client = PlayedClient()
    start(delivery, client, "a", triton_id="7")
    assert delivery.is_open("a")
    assert not delivery.stop("8")
    assert delivery.stop("7")
    assert engine.cancelled == ["a"]
    engine.sinks["a"](Tokens("a", 0, (5,)))
    engine.sinks["a"](end("a", reason="cancelled"))
    assert client.ids() == [5]
    assert not delivery.is_open("a")


def test_closing_fails_what_is_open(engine: PlayedEngine) -> None:
    delivery, client = Delivery(engine), PlayedClient()
    start(delivery, client, "a")
    delivery.close()
    error, final = client.got.get(timeout=1)
    assert (error.code, final) == ("UNAVAILABLE", True)


def test_an_answer_that_raises_is_an_internal_error(delivery: Delivery, engine: PlayedEngine) -> None:
    client = PlayedClient()
    start(delivery, client, "a")
    engine.sinks["a"](Tokens("a", 0, ("not a number",)))  # type: ignore[arg-type]
    error, _ = client.got.get(timeout=5)
    assert error.code == "INTERNAL"
    ok = PlayedClient()
    start(delivery, ok, "b")
    engine.sinks["b"](end("b"))
    assert ok.ids() == [], "the sender goes on"
