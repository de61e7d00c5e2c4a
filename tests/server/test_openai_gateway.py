"""The gateway over a real server and a scripted engine: routes, streams, refusals, keys, leaving clients."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import GatewayProcess, start_gateway

KEYS = ("first-key", "second-key")


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


@pytest.fixture(scope="module")
def gateway(start: Callable[..., GatewayProcess], triton: Any) -> Iterator[httpx.Client]:
    process = start(keep_alive_s=0.2, max_body_bytes=200_000, server_metrics_url=triton.server.metrics_url)
    with httpx.Client(base_url=process.url, timeout=30) as client:
        yield client


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-oss", "messages": [{"role": "user", "content": content}], **more}


def data_of(response: httpx.Response) -> list[str]:
    """The data of each event."""
    return [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]


def test_a_whole_chat(gateway: httpx.Client, words: Any) -> None:
    response = gateway.post("/v1/chat/completions", json=chat(words.GREETING), headers={"x-request-id": "mine-1"})
    assert (response.status_code, response.headers["x-request-id"]) == (200, "mine-1")
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == words.CONTENT
    assert answer["choices"][0]["message"]["reasoning"] == words.ANALYSIS
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("usage", [True, False])
def test_a_streamed_chat(gateway: httpx.Client, words: Any, usage: bool) -> None:
    body = chat(words.GREETING, stream=True, **({"stream_options": {"include_usage": True}} if usage else {}))
    response = gateway.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = data_of(response)
    assert done == "[DONE]"
    objects = [json.loads(chunk) for chunk in chunks]
    text = "".join(c["delta"].get("content") or "" for o in objects for c in o["choices"])
    assert text == words.CONTENT
    assert "🙂".encode() in response.content
    if usage:
        assert objects[-1]["choices"] == []
        assert objects[-1]["usage"]["completion_tokens"] > 10
        assert all(entry["usage"] is None for entry in objects[:-1])
    else:
        assert not any("usage" in entry for entry in objects)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"temprature": 1}, 400, "temprature"),
        ({"n": 129}, 400, "n"),
        ({"max_tokens": 100_000}, 400, "max_tokens"),
        ({"model": "theirs"}, 404, "model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, 400, None),
        ({"ignore_eos": True}, 400, "ignore_eos"),
    ],
)
def test_refusals(gateway: httpx.Client, stream: bool, change: Any, status: int, param: str | None) -> None:
    response = gateway.post("/v1/chat/completions", json=chat("hi", stream=stream) | change)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"{no", 400), (b"[]", 400), (b"\xff", 400), (b'{"a": NaN}', 400), (b"[" * 100_000, 400), (b"x" * 200_001, 413)],
)
def test_bodies_that_are_no_requests(gateway: httpx.Client, data: bytes, status: int) -> None:
    response = gateway.post("/v1/chat/completions", content=data)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_half_a_surrogate_pair_is_no_defect(gateway: httpx.Client) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return gateway.post(path, content=json.dumps(body).encode())

    half = "\ud800"
    assert post("/v1/responses", input=half, instructions=half, metadata={half: half}).status_code == 200
    assert post("/v1/chat/completions", **{**chat(half), half: 1}).status_code == 400
    assert post("/v1/chat/completions", **chat(half)).status_code == 200
    assert post("/tokenize", prompt=half).status_code == 200


def test_a_body_without_a_length_is_cut_at_the_limit(gateway: httpx.Client) -> None:
    response = gateway.post("/v1/chat/completions", content=(b"x" * 50_000 for _ in range(10)))
    assert response.status_code == 413


def test_a_client_that_writes_on_still_reads_the_refusal(gateway: httpx.Client) -> None:
    url, size = gateway.base_url, 80 << 20
    connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
    connection.request(
        "POST",
        "/v1/chat/completions",
        body=(b"x" * (1 << 20) for _ in range(80)),
        headers={"content-length": str(size), "connection": "close"},
    )
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert (response.status, error["code"]) == (413, "request_too_large")
    assert str(size) in error["message"]


def test_a_response_s_errors_name_its_own_parameters(gateway: httpx.Client) -> None:
    items = [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]
    for stream in (False, True):
        response = gateway.post("/v1/responses", json={"input": items, "instructions": "Be brief.", "stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith("input[1]"), error
        response = gateway.post("/v1/responses", json={"input": "x", "max_output_tokens": 0, "stream": stream})
        assert response.json()["error"]["param"] == "max_output_tokens"


def test_unknown_routes(gateway: httpx.Client) -> None:
    assert gateway.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = gateway.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_full_engine_is_429(gateway: httpx.Client, words: Any) -> None:
    response = gateway.post("/v1/completions", json={"prompt": list(words.REFUSED), "max_tokens": 4})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"] == {
        "message": "full", "type": "rate_limit_error", "param": None, "code": "resource_exhausted"
    }  # fmt: skip


def test_an_error_in_a_stream_is_an_event(gateway: httpx.Client, words: Any) -> None:
    response = gateway.post("/v1/chat/completions", json=chat(words.BREAKS, stream=True))
    *_, error, done = data_of(response)
    assert (response.status_code, done) == (200, "[DONE]")
    assert json.loads(error)["error"]["message"] == "it broke"
    whole = gateway.post("/v1/chat/completions", json=chat(words.BREAKS))
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "it broke")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(gateway: httpx.Client, triton: Any, words: Any, stream: bool) -> None:
    body = chat(words.LONG_TEXT, stream=stream, max_tokens=3000)
    with httpx.Client(base_url=gateway.base_url) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
                assert triton.used_blocks() > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/chat/completions", json=body, timeout=0.5)
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=2.0)


def test_a_stream_that_is_left_frees_its_blocks_within_100_ms(gateway: httpx.Client, triton: Any, words: Any) -> None:
    """Through gateway and server, as the engine counts; the best of three, because the machine may be busy."""
    body = chat(words.LONG_TEXT, stream=True, max_tokens=3000)
    best = 9.0
    for _ in range(3):
        leaving = httpx.Client(base_url=gateway.base_url)
        response = leaving.send(leaving.build_request("POST", "/v1/chat/completions", json=body), stream=True)
        words.wait_until(lambda: triton.used_blocks() > 0)
        response.close()
        leaving.close()
        best = min(best, words.wait_until(lambda: triton.used_blocks() == 0, period_s=0.002))
        if best < 0.1:
            break
    assert best < 0.1


def test_a_client_that_does_not_read_slows_nobody_and_loses_nothing(
    gateway: httpx.Client, triton: Any, words: Any
) -> None:
    """Two megabytes for a client with a small window, which reads when its answer has long been made."""
    body = json.dumps(chat(words.LONG_TEXT, stream=True, max_tokens=3000, logprobs=True, top_logprobs=5)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((gateway.base_url.host, gateway.base_url.port))
        slow.sendall(head.encode() + body)
        words.wait_until(lambda: triton.used_blocks() > 0)
        start = time.monotonic()
        for _ in range(5):
            answer = gateway.post("/v1/chat/completions", json=chat(words.GREETING))
            assert answer.json()["choices"][0]["message"]["content"] == words.CONTENT
        assert time.monotonic() - start < 5 * 1.0, "an answer of 20 tokens takes 0.1 s"
        words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=60.0)
        received = b""
        while part := slow.recv(1 << 16):
            received += part
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == Tokenizer.load().decode([words.CYCLE[i % len(words.CYCLE)] for i in range(3000)])


def test_silence_is_filled_with_comments(start: Callable[..., GatewayProcess], triton: Any, words: Any) -> None:
    """Reasoning that is not shown gives no chunks."""
    url = start(keep_alive_s=0.1).url
    body = chat(words.LONG_TEXT, stream=True, max_tokens=200, include_reasoning=False)
    text = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).text
    assert ": keep-alive\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


def test_completions(gateway: httpx.Client) -> None:
    request = {"model": "gpt-oss", "prompt": ["first text", "the second"], "max_tokens": 20}
    answer = gateway.post("/v1/completions", json=request).json()
    assert [choice["text"] for choice in answer["choices"]] == ["first text", "the second"]
    response = gateway.post("/v1/completions", json={**request, "stream": True})
    *chunks, done = data_of(response)
    texts = ["", ""]
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert (texts, done) == (["first text", "the second"], "[DONE]")


def test_models(gateway: httpx.Client) -> None:
    (model,) = gateway.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("gpt-oss", "model", 4096)
    assert gateway.get("/v1/models/gpt-oss").json() == model
    assert gateway.get("/v1/models/other").status_code == 404


def test_tokens_of_a_text_and_back(gateway: httpx.Client) -> None:
    text = "Grüße 🙂 <|end|>"
    answer = gateway.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == Tokenizer.load().encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
    assert len(answer["token_strs"]) == answer["count"]
    assert gateway.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    prompt = gateway.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert prompt["tokens"][0] == 200006
    for body in ({"tokens": [10**9]}, {"tokens": "x"}, {"tokens": [True]}):
        assert gateway.post("/detokenize", json=body).status_code == 400


def test_health_version_metrics(gateway: httpx.Client, words: Any) -> None:
    assert gateway.get("/health").json() == {"status": "alive"}
    assert gateway.get("/ready").status_code == 200
    assert gateway.get("/version").json()["version"]
    gateway.post("/v1/chat/completions", json=chat(words.GREETING))
    text = gateway.get("/metrics").text
    assert 'route="/v1/chat/completions",status="200"' in text
    assert "gptoss_gateway_completion_tokens_total" in text
    assert "nv_inference_request_success" in text, "the server's own follow"


def test_readiness_is_not_life(start: Callable[..., GatewayProcess]) -> None:
    process = start(completions_model="not_there")
    assert httpx.get(f"{process.url}/health").status_code == 200
    refused = httpx.get(f"{process.url}/ready", timeout=30)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "not_there" in refused.json()["error"]["message"]


def test_keys_names_and_stored_responses(start: Callable[..., GatewayProcess], words: Any, tmp_path: Path) -> None:
    """With two workers, which share the store."""
    keys = tmp_path / "keys"
    keys.write_text("# comment\n" + "\n".join(KEYS) + "\n")
    url = start(api_key_file=keys, served_model_name=("mine", "yours"), api_workers=2).url
    client = httpx.Client(base_url=url, timeout=60)
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first-key"}):
        refused = client.post("/v1/chat/completions", json=chat("x"), headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert client.get("/health").status_code == 200
    answer = client.post("/v1/chat/completions", json=chat(words.GREETING, model="yours"), headers=second).json()
    assert answer["model"] == "yours"
    body = {"model": "mine", "input": words.GREETING}
    stored = client.post("/v1/responses", json=body, headers=first, timeout=30).json()
    for _ in range(4):  # whichever worker answers
        assert client.get(f"/v1/responses/{stored['id']}", headers=first).json() == stored
    assert client.get(f"/v1/responses/{stored['id']}", headers=second).status_code == 404
    assert client.delete(f"/v1/responses/{stored['id']}", headers=second).status_code == 404
    again = {**body, "previous_response_id": stored["id"]}
    assert client.post("/v1/responses", json=again, headers=second).status_code == 404
    assert client.delete(f"/v1/responses/{stored['id']}", headers=first).json()["deleted"] is True
    assert client.get(f"/v1/responses/{stored['id']}", headers=first).status_code == 404


def test_a_drained_gateway_finishes_its_streams(start: Callable[..., GatewayProcess], words: Any) -> None:
    process = start(drain_s=10.0)
    body = chat(words.GREETING, stream=True)
    with httpx.stream("POST", f"{process.url}/v1/chat/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        process.process.terminate()
        rest = list(lines)
    assert [line for line in rest if line][-1] == "data: [DONE]"
    start_s = time.monotonic()
    assert process.stop() == 0
    assert time.monotonic() - start_s < 5
