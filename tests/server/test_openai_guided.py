"""Guided answers and forced calls with the official client, through gateway, server and engine, on the demo."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from gptoss_trt.runtime.launch.demo import demo_engine
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import start_gateway

DEMO = Path(__file__).parents[2] / ".cache" / "demo"


class Reply(BaseModel):
    """What the answer must be."""

    answer: str
    sure: bool


@pytest.fixture(scope="module")
def client(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    triton = launch(engine_dir=demo_engine(DEMO, print), models=("chat", "completions"))
    options = GatewayOptions(grpc_url=triton.server.grpc_url, port=0)
    gateway = start_gateway(options, tmp_path_factory.mktemp("gateway") / "log")
    deadline = time.monotonic() + 60
    while httpx.get(f"{gateway.url}/ready", timeout=30).status_code != 200:
        assert time.monotonic() < deadline, "the engine has not loaded"
        time.sleep(0.2)
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client
    gateway.stop()


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "reply",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"],
            "additionalProperties": False,
        },
    },
}
ASKED: Any = {"model": "gpt-oss", "max_completion_tokens": 200, "seed": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_schema(client: OpenAI, stream: bool) -> None:
    request = {**ASKED, "messages": user("What is 2 + 3?"), "response_format": FORMAT}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **request))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        finish = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**request).choices
        text, finish = choice.message.content or "", choice.finish_reason
    assert finish == "stop"
    Reply.model_validate_json(text)


def test_several_choices_each_follow_the_schema(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=user("Hello"), response_format=FORMAT, n=3, **ASKED)
    for choice in answer.choices:
        Reply.model_validate_json(choice.message.content or "")


def test_responses_with_a_schema(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", **FORMAT["json_schema"]}}
    response = client.responses.create(model="gpt-oss", input="Hello", text=text, max_output_tokens=200)
    Reply.model_validate_json(response.output_text)


def test_vllm_s_extras(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=user("Yes?"), extra_body={"guided_choice": ["yes", "no"]}, **ASKED)
    assert answer.choices[0].message.content in ("yes", "no")
    extra = {"structured_outputs": {"regex": "[a-c]{3}"}}
    plain = client.completions.create(model="gpt-oss", prompt="x", max_tokens=20, extra_body=extra)
    assert len(plain.choices[0].text) == 3
    assert set(plain.choices[0].text) <= set("abc")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_alarm"}}])
def test_a_forced_call(client: OpenAI, choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
        "required": ["hour"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "set_alarm", "parameters": parameters}}]
    (answer,) = client.chat.completions.create(messages=user("Hello"), tools=tools, tool_choice=choice, **ASKED).choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.function.name == "set_alarm"
    assert 0 <= json.loads(call.function.arguments)["hour"] <= 23


def test_a_schema_that_cannot_be_enforced_is_refused(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "if": {}}}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented"):
        client.chat.completions.create(messages=user("Hello"), response_format=wanted, **ASKED)
