"""The variant for clients that only do unary infer: one response, no stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def unary(launch: Callable[..., Any]) -> Any:
    return launch(models=("tensorrt_llm", "ensemble"), decoupled=False)


def infer(triton: Any, words: Any, model: str, tensors: dict[str, np.ndarray], request_id: str = "") -> Any:
    with grpcclient.InferenceServerClient(triton.server.grpc_url) as client:
        return client.infer(model, words.infer_inputs(tensors), request_id=request_id)


def test_unary_infer(unary: Any, words: Any) -> None:
    result = infer(unary, words, "tensorrt_llm", words.token_tensors((21, 22), streaming=False))
    assert result.as_numpy("output_ids").tolist() == [[[21, 22, 21, 22, 200002]]]
    assert infer(unary, words, "ensemble", words.text_tensors("Hi")).as_numpy("text_output").tolist() == [b"HiHi"]


def test_requests_run_beside_each_other(unary: Any, words: Any) -> None:
    """The instance takes the next request while one is generating: 16 requests of 0.5 s take far less than 8 s."""
    results: list[Any] = []

    def ask() -> None:
        tensors = words.token_tensors(words.LONG, max_tokens=100, exclude_input_in_output=True)
        results.append(infer(unary, words, "tensorrt_llm", tensors).as_numpy("output_ids").shape[2])

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    used = []
    while any(thread.is_alive() for thread in threads):
        used.append(int(unary.engine.stats()["requests"]["active"]))
        threads[0].join(0.05)
    for thread in threads:
        thread.join()
    assert results == [100] * 16
    assert max(used) > 8


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"streaming": True}, "without streaming"),
        ({"num_return_sequences": 2}, "1 prompts x 2 sequences need 2 responses"),
    ],
)
def test_more_than_one_response_is_refused(unary: Any, words: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match=text):
        infer(unary, words, "tensorrt_llm", words.token_tensors((21, 22), **more))
    with pytest.raises(Exception, match="2 prompts x 1 sequences need 2 responses"):
        infer(unary, words, "tensorrt_llm", words.token_tensors((21, 22), (31, 32)))


def test_a_stop_request_as_upstream_s_client_sends_it(unary: Any, words: Any) -> None:
    """Two unary calls under one id; the stop request's own answer has no output_ids, which that client looks for."""
    answers: list[Any] = []
    tensors = words.token_tensors(words.LONG, max_tokens=2000, exclude_input_in_output=True)
    thread = threading.Thread(target=lambda: answers.append(infer(unary, words, "tensorrt_llm", tensors, "77")))
    thread.start()
    words.wait_until(lambda: unary.used_blocks() > 0)
    stop = {
        "input_ids": np.empty([1, 1], dtype=np.int32),
        "input_lengths": np.zeros([1, 1], dtype=np.int32),
        "request_output_len": np.array([[0]], dtype=np.int32),
        "stop": np.array([[True]]),
    }
    assert infer(unary, words, "tensorrt_llm", stop, "77").as_numpy("output_ids") is None
    thread.join(10)
    assert answers[0].as_numpy("finish_reason").tolist() == [b"cancelled"]


def test_a_cancelled_unary_call_frees_its_blocks(unary: Any, words: Any) -> None:
    client = grpcclient.InferenceServerClient(unary.server.grpc_url)
    tensors = words.token_tensors(words.LONG, max_tokens=2000)
    future = client.async_infer("tensorrt_llm", words.infer_inputs(tensors), lambda result, error: None)
    words.wait_until(lambda: unary.used_blocks() > 0)
    future.cancel()
    words.wait_until(lambda: unary.used_blocks() == 0, timeout_s=1.0)
    client.close()


@pytest.mark.parametrize(
    ("prompt", "more", "status"),
    [
        ((21, 22), {"runtime_top_p": 3.0}, "INVALID_ARGUMENT"),
        ((21, -1), {}, "INVALID_ARGUMENT"),
        ((21, 22), {"beam_width": 2}, "UNIMPLEMENTED"),
        ("REFUSED", {}, "UNAVAILABLE"),
        ("FAILS", {}, "INTERNAL"),
    ],
)
def test_grpc_statuses(unary: Any, words: Any, prompt: Any, more: dict[str, Any], status: str) -> None:
    ids = getattr(words, prompt) if isinstance(prompt, str) else prompt
    with pytest.raises(InferenceServerException) as caught:
        infer(unary, words, "tensorrt_llm", words.token_tensors(ids, **more))
    assert caught.value.status() == f"StatusCode.{status}"
