"""Collected parser and request cases through gateway, server and scripted engine; request shapes of known clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import start_gateway

DATA = Path(__file__).parents[1] / "data" / "harmony_cases.jsonl"
CASES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
# An engine that is cut before its first token cannot be told from one that stops there: the parser's tests have it.
INEXPRESSIBLE = {"h-trunc-03"}
PARSER = [case for case in CASES if case["kind"] in ("completion", "stream") and case["id"] not in INEXPRESSIBLE]
REQUESTS = [case for case in CASES if case["kind"] == "request"]
TEXT = "Once upon a time"


def asks(case: dict[str, Any]) -> str:
    return f"[[{case['id']}]]"


@pytest.fixture(scope="module")
def client(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One engine, scripted by the text of the prompt."""
    encode = Tokenizer.load().encode
    scripts = [
        {"match": encode(asks(case)), "tokens": case["token_ids_o200k_harmony"], "end": [], "chunk": [1, 3, 2]}
        for case in PARSER
    ]
    final = {"tokens": encode(f"<|channel|>final<|message|>{TEXT}")}
    script = {"scripts": scripts, "default": final, "step_ms": 1.0}
    triton = launch(script=script, models=("chat", "completions"))
    options = GatewayOptions(grpc_url=triton.server.grpc_url, port=0)
    gateway = start_gateway(options, tmp_path_factory.mktemp("gateway") / "log")
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client
    gateway.stop()


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(text) for text in data]


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's choice put together, in the form of a whole answer's."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None}
    calls: list[dict[str, Any]] = []
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name in ("content", "reasoning_content"):
                if choice["delta"].get(name):
                    message[name] = (message[name] or "") + choice["delta"][name]
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
                calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
            finish = choice["finish_reason"] or finish
    return {"message": {**message, "tool_calls": calls}, "finish_reason": finish}


@pytest.mark.parametrize("case", PARSER, ids=[case["id"] for case in PARSER])
def test_parser_case(client: httpx.Client, case: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in case["declared_tools"]]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": asks(case)}], "tools": tools}
    options = case.get("opts") or {}
    if "parallel_tool_calls" in options:
        body["parallel_tool_calls"] = options["parallel_tool_calls"]
    if options.get("engine_finish") == "length":
        body["max_completion_tokens"] = len(case["token_ids_o200k_harmony"])
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    streamed = message_of(chunks_of(client.post("/v1/chat/completions", json={**body, "stream": True})))
    expected = case["expected"]
    reasoning = "".join(expected.get("reasoning_parts", [expected["reasoning"] or ""]))
    for choice in (whole, streamed):
        message = choice["message"]
        assert message["content"] == expected["content"]
        assert (message["reasoning_content"] or "") == reasoning
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        assert calls == [[call["name"], call["arguments"]] for call in expected["tool_calls"]]
        assert choice["finish_reason"] == expected["finish_reason"]
        shown = json.dumps([message["content"], message["reasoning_content"], calls], ensure_ascii=False)
        assert not [text for text in case.get("must_not_appear_in_user_text", ()) if text in shown]


@pytest.mark.parametrize("case", REQUESTS, ids=[case["id"] for case in REQUESTS])
def test_request_case(client: httpx.Client, case: dict[str, Any]) -> None:
    expected = case["expected"]
    accepted = next((choice for choice in expected.get("any_of", ()) if "prompt_contains" in choice), expected)
    response = client.post("/v1/chat/completions", json=case["input_request"])
    assert response.status_code == accepted.get("status", 200)
    if "error_param" in expected:
        assert response.json()["error"]["param"] == expected["error_param"]


def test_vllm_bench_serve_chat(client: httpx.Client) -> None:
    body = {
        "model": "gpt-oss",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    headers = {"content-type": "application/json", "authorization": "Bearer EMPTY"}
    *chunks, last = chunks_of(client.post("/v1/chat/completions", json=body, headers=headers))
    assert message_of(chunks)["message"]["content"] == TEXT
    assert last["usage"]["completion_tokens"] == len(Tokenizer.load().encode(TEXT)) + 4
    refused = client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
    assert refused.json()["error"]["param"] == "ignore_eos", "a Harmony turn cannot go past its end"


def test_vllm_bench_serve_completions(client: httpx.Client) -> None:
    body = {
        "model": "gpt-oss",
        "prompt": "hi",
        "repetition_penalty": 1.0,
        "max_tokens": 5,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    *chunks, last = chunks_of(client.post("/v1/completions", json=body))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf_chat(client: httpx.Client, streaming: bool) -> None:
    body = {
        "messages": [{"role": "user", "name": "", "content": "hi"}],
        "model": "gpt-oss",
        "stream": streaming,
        "max_completion_tokens": 16,
        **({"stream_options": {"include_usage": True}} if streaming else {}),
    }
    response = client.post("/v1/chat/completions", json=body)
    message = message_of(chunks_of(response)) if streaming else response.json()["choices"][0]
    assert message["message"]["content"] == TEXT


def test_aiperf_completions(client: httpx.Client) -> None:
    body = {"prompt": ["hi"], "model": "gpt-oss", "stream": True, "max_tokens": 4, "min_tokens": 4}
    chunks = chunks_of(client.post("/v1/completions", json=body))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_lm_eval_generation(client: httpx.Client) -> None:
    """Two prompts as token ids, with stop strings; as `local-completions` sends them."""
    prompt = [Tokenizer.load().encode(text) for text in ("one", "two")]
    body = {"prompt": prompt, "model": "gpt-oss", "max_tokens": 32, "temperature": 0, "stop": [" a", "\n\n"], "seed": 1}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["text"] for choice in choices] == ["finalOnce upon"] * 2


def test_chat_options_that_reach_the_engine(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "stop": ["time"],
        "stop_token_ids": [9],
        "min_tokens": 1,
        "max_completion_tokens": 50,
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "user": "u",
        "store": False,
        "parallel_tool_calls": False,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Once upon a "] * 2
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
