"""A client that stops, cancels or goes away frees its KV blocks within 100 ms at steps of 5 ms, as the engine counts.

Each way is tried up to three times and the best time counts, because the machine may be busy with other work.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np

LIMIT_S = 0.1
BUSY = 2000  # tokens that nobody waits for


def busy_call(triton: Any, words: Any, request_id: str = "", **more: Any) -> Any:
    """A stream that has begun and would run for ten seconds."""
    assert triton.used_blocks() == 0
    tensors = words.token_tensors(words.LONG, max_tokens=BUSY, streaming=True, **more)
    call = triton.open("tensorrt_llm", tensors, request_id)
    call.next()
    assert triton.used_blocks() > 0
    return call


def stop_tensors() -> dict[str, np.ndarray]:
    """What upstream's client sends to stop a request; the ids are whatever the memory held."""
    return {
        "input_ids": np.empty([1, 1], dtype=np.int32),
        "input_lengths": np.zeros([1, 1], dtype=np.int32),
        "request_output_len": np.array([[0]], dtype=np.int32),
        "stop": np.array([[True]]),
    }


def seconds_until_free(triton: Any, words: Any) -> float:
    return words.wait_until(lambda: triton.used_blocks() == 0, period_s=0.002)


def best_of_three(attempt: Callable[[], float]) -> float:
    best = attempt()
    for _ in range(2):
        if best < LIMIT_S:
            break
        best = min(best, attempt())
    return best


def test_a_cancelled_grpc_stream(triton: Any, words: Any) -> None:
    def attempt() -> float:
        busy_call(triton, words).cancel()
        return seconds_until_free(triton, words)

    assert best_of_three(attempt) < LIMIT_S


def test_a_grpc_client_that_goes_away(triton: Any, words: Any) -> None:
    def attempt() -> float:
        call = busy_call(triton, words)
        call.client._channel.close()
        seconds = seconds_until_free(triton, words)
        call.close()
        return seconds

    assert best_of_three(attempt) < LIMIT_S


def test_a_stop_request_on_the_same_stream(triton: Any, words: Any) -> None:
    def attempt() -> float:
        call = busy_call(triton, words, "stop-me")
        call.send("tensorrt_llm", stop_tensors(), "stop-me")
        seconds = seconds_until_free(triton, words)
        assert reasons_of_two(call) == [b"cancelled"]
        return seconds

    assert best_of_three(attempt) < LIMIT_S


def reasons_of_two(call: Any) -> list[bytes]:
    """Finish reasons up to the ends of the stopped request and of the stop request, whose only response is empty."""
    reasons: list[bytes] = []
    finals = 0
    while finals < 2:
        outputs, final = call.next()
        finals += final
        reasons += outputs["finish_reason"].tolist() if "finish_reason" in outputs else []
    call.close()
    return reasons


def test_a_stop_request_from_elsewhere_and_what_was_generated(triton: Any, words: Any) -> None:
    tensors = words.token_tensors(words.LONG, max_tokens=BUSY, exclude_input_in_output=True)
    call = triton.open("tensorrt_llm", tensors, "not-streaming")
    words.wait_until(lambda: triton.used_blocks() > 0)
    time.sleep(0.1)
    assert triton.ask("tensorrt_llm", stop_tensors(), "not-streaming") == []
    (response,) = call.rest()
    call.close()
    count = response["sequence_length"][0, 0]
    assert 5 < count < BUSY
    assert response["output_ids"][0, 0].tolist() == [words.CYCLE[i % len(words.CYCLE)] for i in range(count)]
    assert response["finish_reason"].tolist() == [b"cancelled"]


def test_a_stop_request_reaches_a_text_model(triton: Any, words: Any) -> None:
    tensors = words.text_tensors(words.LONG_TEXT, max_tokens=BUSY, stream=True)
    call = triton.open("ensemble", tensors, "in-ensemble")
    call.next()
    triton.ask("tensorrt_llm", stop_tensors(), "in-ensemble")
    assert call.rest()[-1]["finish_reason"].tolist() == [b"cancelled"]
    assert triton.used_blocks() == 0
    call.close()


def test_a_stop_request_spares_others(triton: Any, words: Any) -> None:
    stays = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=60, streaming=True), "stays")
    goes = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=BUSY, streaming=True), "goes")
    goes.next()
    triton.ask("tensorrt_llm", stop_tensors(), "goes")
    assert goes.rest()[-1]["finish_reason"].tolist() == [b"cancelled"]
    responses = stays.rest()
    assert responses[-1]["finish_reason"].tolist() == [b"length"]
    assert len(words.tokens_of(responses)) == 60
    goes.close()
    stays.close()


def test_a_stop_request_without_an_id_is_refused(triton: Any) -> None:
    assert "must carry the id" in triton.refusal("tensorrt_llm", stop_tensors()).message()


def test_a_stop_request_for_nothing_is_answered(triton: Any) -> None:
    assert triton.ask("tensorrt_llm", stop_tensors(), "nobody") == []


def http_post(triton: Any, words: Any, path: str, max_tokens: int, streaming: bool) -> socket.socket:
    """A connection on which a request to tensorrt_llm has begun to generate."""
    address = urlsplit(triton.server.http_url)
    request = {"input_ids": words.LONG, "input_lengths": 4, "request_output_len": max_tokens, "streaming": streaming}
    body = json.dumps(request).encode()
    head = f"POST /v2/models/tensorrt_llm/{path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    assert triton.used_blocks() == 0
    peer = socket.create_connection((address.hostname, address.port))
    peer.sendall(head.encode() + body)
    words.wait_until(lambda: triton.used_blocks() > 0)
    return peer


def test_an_http_client_that_goes_away(triton: Any, words: Any) -> None:
    def attempt() -> float:
        with http_post(triton, words, "generate_stream", BUSY, True) as peer:
            assert peer.recv(4096)
        return seconds_until_free(triton, words)

    assert best_of_three(attempt) < LIMIT_S


def test_generate_runs_on_without_its_client(triton: Any, words: Any) -> None:
    """tritonserver does not watch the connection of a plain /generate: the model is never told. It must do no harm."""
    http_post(triton, words, "generate", 100, False).close()
    assert 0.2 < seconds_until_free(triton, words) < 5.0
    assert triton.is_ready()


def test_64_cancelled_streams(triton: Any, words: Any) -> None:
    def attempt() -> float:
        tensors = words.token_tensors(words.LONG, max_tokens=BUSY, streaming=True)
        calls = [triton.open("tensorrt_llm", tensors) for _ in range(64)]
        for call in calls:
            call.next()
        for call in calls:
            call.cancel()
        return seconds_until_free(triton, words)

    assert best_of_three(attempt) < LIMIT_S


def test_an_id_can_be_used_again_right_after_a_cancellation(triton: Any, words: Any) -> None:
    for _ in range(10):
        tensors = words.token_tensors(words.LONG, max_tokens=BUSY, streaming=True)
        call = triton.open("tensorrt_llm", tensors, "again")
        call.next()
        call.cancel()
        responses = triton.ask("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=5, streaming=True), "again")
        assert len(words.tokens_of(responses)) == 5
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=1.0)


def test_two_requests_under_one_id_are_both_stopped(triton: Any, words: Any) -> None:
    calls = [busy_twin(triton, words) for _ in range(2)]
    assert triton.ask("tensorrt_llm", stop_tensors(), "twin") == []
    for call in calls:
        assert call.rest()[-1]["finish_reason"].tolist() == [b"cancelled"]
        call.close()


def busy_twin(triton: Any, words: Any) -> Any:
    call = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=BUSY, streaming=True), "twin")
    call.next()
    return call
