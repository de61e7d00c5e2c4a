"""A step that never ends: the engine's requests end with UNAVAILABLE, /ready says so, and the engine comes back."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpcclient

from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import start_gateway
from gptoss_trt.runtime.openai.gateway.readiness import FRESH_S

STEP_TIMEOUT_S = 8  # more than FRESH_S, so that readiness is asked about while the step hangs
SLACK_S = 1.5
ENGINE_START_S = 0.1  # at least
QUESTION = {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 5}


@pytest.fixture
def triton(launch: Callable[..., Any]) -> Any:
    models = ("tensorrt_llm", "chat", "completions")
    return launch(models=models, engine=EngineOptions(step_timeout_s=STEP_TIMEOUT_S))


@pytest.fixture
def gateway(triton: Any, tmp_path: Path) -> Iterator[str]:
    process = start_gateway(GatewayOptions(grpc_url=triton.server.grpc_url, port=0), tmp_path / "gateway.log")
    yield process.url
    process.stop()


class ReadyWatch:
    """Asks /ready all the time and keeps the time and status of each answer."""

    def __init__(self, url: str) -> None:
        self.seen: list[tuple[float, int]] = []
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            status = httpx.get(f"{self._url}/ready", timeout=30).status_code
            self.seen.append((time.monotonic(), status))

    def stop(self) -> None:
        self._end.set()
        self._thread.join(30)


class CodedStream:
    """An endless answer whose error arrives as a gRPC status: errors in band have no codes."""

    def __init__(self, triton: Any, words: Any) -> None:
        self.errors: queue.Queue[Any] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(triton.server.grpc_url)
        self._client.start_stream(self._on_result, headers={"triton_grpc_error": "true"})
        tensors = words.token_tensors(words.LONG, max_tokens=3000, streaming=True)
        self._client.async_stream_infer("tensorrt_llm", words.infer_inputs(tensors))

    def _on_result(self, result: Any, error: Any) -> None:
        if error is not None:
            self.errors.put(error)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def test_a_step_that_hangs(triton: Any, gateway: str, words: Any) -> None:
    body = {"prompt": list(words.LONG), "max_tokens": 3000, "stream": True}
    events: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{gateway}/v1/completions", json=body, timeout=60) as answer:
            events.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    bystander = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=3000, streaming=True))
    bystander.next()
    coded = CodedStream(triton, words)
    words.wait_until(lambda: httpx.get(f"{gateway}/ready", timeout=30).status_code == 200)
    pid = triton.engine.health()["pid"]
    watch = ReadyWatch(gateway)

    hangs = triton.open("tensorrt_llm", words.token_tensors(words.HANGS, max_tokens=20, streaming=True))
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += words.tokens_of([hangs.next()[0]])
    began = time.monotonic()
    for call in (hangs, bystander):
        with pytest.raises(Exception, match="the engine is not available: a step has run for"):
            call.rest(30.0)
        call.close()
    ended_s = time.monotonic() - began
    assert STEP_TIMEOUT_S - SLACK_S < ended_s < STEP_TIMEOUT_S + SLACK_S
    reader.join(10)
    assert coded.errors.get(timeout=10).status() == "StatusCode.UNAVAILABLE"
    coded.close()
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["code"], events[-1]) == ("unavailable", "data: [DONE]")

    words.wait_until(lambda: triton.post("tensorrt_llm/generate", QUESTION)[0] == 200, timeout_s=15.0, period_s=0.1)
    words.wait_until(lambda: watch.seen[-1][1] == 200, timeout_s=10.0)
    watch.stop()
    assert triton.engine.health()["pid"] != pid
    # Once the last sign of life is too old to count, and until a new engine can be there.
    told = [status for at, status in watch.seen if began + FRESH_S < at < began + ended_s + ENGINE_START_S]
    assert told and set(told) == {503}, (began, ended_s, watch.seen)
