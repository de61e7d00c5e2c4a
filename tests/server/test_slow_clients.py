"""Clients that do not read: what their answers cost in the gateway and in tritonserver, and when they are cut off."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import GatewayProcess, start_gateway

STREAMS, TOKENS = 8, 2000
GATEWAY_STREAM_BYTES = 256 << 10  # asyncio's 64 KiB and gRPC's; an answer of the test has 780 KB
SERVER_TOKEN_BYTES = 2 << 10  # a response that waits holds 1.2 KiB (measured)


@pytest.fixture(scope="module")
def start(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., GatewayProcess]]:
    started: list[GatewayProcess] = []

    def one(**options: Any) -> GatewayProcess:
        log = tmp_path_factory.mktemp("gateway") / "log"
        started.append(start_gateway(GatewayOptions(grpc_url=triton.server.grpc_url, port=0, **options), log))
        return started[-1]

    yield one
    for gateway in started:
        gateway.stop()


def ask_and_not_read(url: str, words: Any, max_tokens: int) -> socket.socket:
    """A stream of one chunk a token, each with log-probabilities, whose client has a window of a few KB."""
    asked = {"prompt": list(words.LONG), "max_tokens": max_tokens, "stream": True, "logprobs": 10}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((urlsplit(url).hostname, urlsplit(url).port))
    client.sendall(head.encode() + body)
    return client


def read_all(client: socket.socket) -> bytes:
    client.settimeout(30)
    received = b""
    while part := client.recv(1 << 16):
        received += part
    return received


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def test_memory_of_streams_that_are_not_read(start: Callable[..., GatewayProcess], triton: Any, words: Any) -> None:
    """The gateway holds some KB of each and leaves the rest to tritonserver, which uses its memory again."""
    gateway = start()
    pids = (gateway.process.pid, triton.server.process.pid)
    read_all(ask_and_not_read(gateway.url, words, 20))
    before = [resident(pid) for pid in pids]
    grown = []
    for _ in range(2):
        clients = [ask_and_not_read(gateway.url, words, TOKENS) for _ in range(STREAMS)]
        words.wait_until(lambda: triton.used_blocks() > 0)
        words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=90.0, period_s=0.1)
        grown.append([resident(pid) - was for pid, was in zip(pids, before, strict=True)])
        for client in clients:
            received = read_all(client)
            client.close()
            assert received.count(b"data: {") >= TOKENS / 4 and b"data: [DONE]" in received
            assert len(received) > 2 * GATEWAY_STREAM_BYTES, "the answer would fit the gateway's share"
    for in_gateway, in_server in grown:
        assert in_gateway < STREAMS * GATEWAY_STREAM_BYTES, grown
        assert in_server < STREAMS * TOKENS * SERVER_TOKEN_BYTES, grown
    assert grown[1][1] - grown[0][1] < 0.5 * STREAMS * TOKENS * SERVER_TOKEN_BYTES, f"not used again: {grown}"


def test_memory_of_grpc_streams_that_are_not_read(triton: Any, words: Any) -> None:
    """What waits in tritonserver is bounded by the answer, and nothing of it is lost."""
    go_on = threading.Event()

    class Unread(type(triton.open("tensorrt_llm", words.token_tensors((21,))))):  # type: ignore[misc]
        def _on_result(self, result: Any, error: Any) -> None:
            go_on.wait(90)
            super()._on_result(result, error)

    pid = triton.server.process.pid
    before = resident(pid)
    tensors = words.token_tensors(words.LONG, max_tokens=TOKENS, streaming=True)
    calls = [Unread(triton.server.grpc_url, "tensorrt_llm", tensors, "", None) for _ in range(STREAMS)]
    words.wait_until(lambda: triton.used_blocks() > 0)
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=90.0, period_s=0.1)
    assert resident(pid) - before < STREAMS * TOKENS * SERVER_TOKEN_BYTES
    go_on.set()
    for call in calls:
        assert words.tokens_of(call.rest(30.0)) == [words.CYCLE[i % len(words.CYCLE)] for i in range(TOKENS)]
        call.close()


def test_a_client_that_reads_nothing_for_long_is_cut_off(
    start: Callable[..., GatewayProcess], triton: Any, words: Any
) -> None:
    """Its generation ends, and with it what waits in tritonserver; others go on."""
    gateway = start(stall_s=1.0)
    silent = ask_and_not_read(gateway.url, words, 4000)  # 20 s
    words.wait_until(lambda: triton.used_blocks() > 0)
    body = {"prompt": list(words.LONG), "max_tokens": 1000, "stream": True}  # 5 s, longer than the limit
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=5.0)
    assert "gptoss_gateway_client_disconnects_total" in httpx.get(f"{gateway.url}/metrics", timeout=30).text
    with contextlib.closing(silent), contextlib.suppress(ConnectionError):
        assert b"[DONE]" not in read_all(silent)
