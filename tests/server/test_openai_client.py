"""The official `openai` client on the demo's weights: server, engine and gateway as a user has them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gptoss_trt.runtime.launch.demo import demo_engine
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import start_gateway

DEMO = Path(__file__).parents[2] / ".cache" / "demo"
MODEL = "gpt-oss-demo"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city"}},
    "required": ["city"],
}
WEATHER: Any = {"name": "get_weather", "description": "Get the weather in a city", "parameters": PARAMETERS}
QUESTION = "What is the weather in Paris?"
RESULT = json.dumps({"temperature": 21, "condition": "sunny"})
GREEDY: Any = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def url(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = ("chat", "completions", "ensemble", "tensorrt_llm")
    triton = launch(engine_dir=demo_engine(DEMO, print), models=models)
    options = GatewayOptions(grpc_url=triton.server.grpc_url, port=0, served_model_name=(MODEL,))
    gateway = start_gateway(options, tmp_path_factory.mktemp("gateway") / "log")
    deadline = time.monotonic() + 60
    while httpx.get(f"{gateway.url}/ready", timeout=30).status_code != 200:
        assert time.monotonic() < deadline, "the engine has not loaded"
        time.sleep(0.2)
    yield f"{gateway.url}/v1"
    gateway.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 131072


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=user("Hello"), **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content
    assert (choice.finish_reason, answer.model) == ("stop", MODEL)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    request = {**GREEDY, "messages": user("What is 12 + 7?")}
    whole = client.chat.completions.create(**request)
    text = reasoning = ""
    usages = []
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert text == whole.choices[0].message.content
    assert reasoning == (whole.choices[0].message.reasoning_content or "")
    assert "19" in text
    assert usages[-1] is not None
    assert not any(usages[:-1])


def test_async_and_at_the_same_time(url: str) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        text = ""
        stream = await client.chat.completions.create(messages=user(f"What is {number} + 1?"), stream=True, **GREEDY)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def several() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(2, 6)))

    for number, text in zip(range(3, 7), asyncio.run(several()), strict=True):
        assert str(number) in text


def test_a_client_that_stops_reading(client: OpenAI) -> None:
    stream = client.chat.completions.create(messages=user("Hello"), stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(messages=user("Hello"), max_completion_tokens=4, **GREEDY).choices


def test_a_chat_tool_loop_ends_in_a_final_answer(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    messages = user(QUESTION)
    answer = client.chat.completions.create(messages=messages, tools=tools, **GREEDY)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(choice.message.model_dump(exclude_none=True))
    for call in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    final = client.chat.completions.create(messages=messages, tools=tools, **GREEDY).choices[0]
    assert final.finish_reason == "stop"
    assert "21" in (final.message.content or "")


def test_a_streamed_tool_call(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    name = arguments = ""
    finish = None
    for chunk in client.chat.completions.create(messages=user(QUESTION), tools=tools, stream=True, **GREEDY):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (name, json.loads(arguments), finish) == ("get_weather", {"city": "Paris"}, "tool_calls")


def test_a_responses_tool_loop(client: OpenAI) -> None:
    tools: Any = [{"type": "function", **WEATHER}]
    first = client.responses.create(input=QUESTION, tools=tools, **GREEDY)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    second = client.responses.create(input=output, tools=tools, previous_response_id=first.id, **GREEDY)
    assert second.status == "completed"
    assert "21" in second.output_text
    # without the store: the client carries the items itself
    items: Any = [*user(QUESTION), *(item.model_dump(exclude_none=True) for item in first.output), *output]
    third = client.responses.create(input=items, tools=tools, store=False, **GREEDY)
    assert third.output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_stored_responses(client: OpenAI) -> None:
    made = client.responses.create(input="Hello", metadata={"a": "b"}, **GREEDY)
    assert client.responses.retrieve(made.id) == made
    assert made.metadata == {"a": "b"}
    (item,) = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_response_events_in_order(client: OpenAI) -> None:
    events = list(client.responses.create(input="What is 2 + 3?", stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    response = events[-1].response
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == response.output_text
    message = [event.type for event in events if getattr(event, "item_id", "") == deltas[0].item_id]
    assert (message[0], message[-2:]) == (
        "response.content_part.added",
        ["response.output_text.done", "response.content_part.done"],
    )
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == list(range(len(response.output)))
    assert response.usage is not None
    assert response.usage.output_tokens > 0


def test_the_client_s_own_stream_helpers(client: OpenAI) -> None:
    with client.chat.completions.stream(messages=user("Hello"), **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content
    with client.responses.stream(input="Hello", **GREEDY) as responses:
        for _ in responses:
            pass
        assert responses.get_final_response().output_text


def test_completions(client: OpenAI) -> None:
    request: Any = {**GREEDY, "prompt": ["<|start|>user<|message|>Hello<|end|><|start|>assistant", [200006, 1428]]}
    answer = client.completions.create(max_tokens=6, logprobs=2, **request)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    text = ["", ""]
    for chunk in client.completions.create(max_tokens=6, stream=True, **request):
        for choice in chunk.choices:
            text[choice.index] += choice.text
    assert text == [choice.text for choice in answer.choices]


def test_lm_eval_log_likelihoods(client: OpenAI) -> None:
    """As lm-eval's `local-completions` asks and reads: echo, one token more than the text, ids as prompts."""
    contexts, continuations = ([200006, 1428, 200008], [200006, 1428]), ([13225], [200008, 13225, 200007])
    prompt: Any = [[*context, *rest] for context, rest in zip(contexts, continuations, strict=True)]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=1, seed=1234, echo=True
    )
    for choice, ids, context in zip(answer.choices, prompt, contexts, strict=True):
        assert choice.logprobs is not None
        values, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert values is not None
        assert top is not None
        assert len(values) == len(top) == len(ids) + 1
        assert values[0] is None
        scored = values[len(context) : -1]
        assert len(scored) == len(ids) - len(context)
        assert all(
            value <= max(best.values()) + 1e-6 for value, best in zip(scored, top[len(context) : -1], strict=True)
        )


@pytest.mark.parametrize(
    ("request_of", "error", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"max_tokens": 1 << 20}, openai.BadRequestError, "max_tokens"),
        ({"n": 129}, openai.BadRequestError, "n"),
    ],
)
def test_errors_are_the_client_s_own(client: OpenAI, request_of: Any, error: type, param: str) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": user("x"), **request_of})
    assert caught.value.param == param
