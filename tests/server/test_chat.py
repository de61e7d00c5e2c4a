"""The `chat` and `completions` models: OpenAI bodies in, OpenAI objects out; chat mode of the text models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


def body(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def joined(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"])


def test_a_streamed_chat(triton: Any, words: Any) -> None:
    responses = triton.ask("chat", words.json_tensors(body(words.GREETING, stream=True)))
    chunks = words.objects_of(responses)
    assert all(response["response"].ndim == 1 for response in responses)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert joined(chunks, "content") == words.CONTENT
    assert joined(chunks, "reasoning_content") == words.ANALYSIS
    assert len(responses) > 5
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > 10


def test_a_whole_chat_and_the_input_that_overrides_the_body(triton: Any, words: Any) -> None:
    (response,) = triton.ask("chat", words.json_tensors(body(words.GREETING, stream=True), stream=False))
    (answer,) = words.objects_of([response])
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == words.CONTENT
    assert choice["message"]["reasoning_content"] == words.ANALYSIS
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    streamed = triton.ask("chat", words.json_tensors(body(words.GREETING), stream=True))
    assert joined(words.objects_of(streamed), "content") == words.CONTENT


@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_call(triton: Any, words: Any, stream: bool) -> None:
    request = body(words.CALLS_TOOL, tools=[WEATHER], stream=stream)
    objects = words.objects_of(triton.ask("chat", words.json_tensors(request)))
    if stream:
        calls = [
            call for chunk in objects for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])
        ]
        name = calls[0]["function"]["name"]
        arguments = "".join(call["function"].get("arguments", "") for call in calls)
    else:
        (call,) = objects[0]["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert (name, arguments) == ("get_weather", words.ARGUMENTS)
    assert objects[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_several_choices(triton: Any, words: Any) -> None:
    (answer,) = words.objects_of(triton.ask("chat", words.json_tensors(body(words.GREETING, n=3))))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [words.CONTENT] * 3
    chunks = words.objects_of(triton.ask("chat", words.json_tensors(body(words.GREETING, n=3, stream=True))))
    finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]


def test_a_stop_string_ends_the_generation(triton: Any, words: Any) -> None:
    request = body(words.GREETING, stop=[" are"])
    (answer,) = words.objects_of(triton.ask("chat", words.json_tensors(request)))
    assert answer["choices"][0]["message"]["content"] == words.CONTENT.split(" are")[0]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert triton.used_blocks() == 0


@pytest.mark.parametrize(
    ("request_body", "status", "param", "text"),
    [
        (b"{not json", 400, None, "not JSON"),
        (b"[]", 400, None, "list, not a JSON object"),
        ({"messages": []}, 400, "messages", "messages"),
        (body("x", temperature=-1), 400, "temperature", "temperature"),
        (body("x", temprature=1), 400, "temprature", "temperature"),
        (body("word " * 5000), 400, "messages", "the context is 4096"),
        (body("x", max_tokens=0), 400, "max_tokens", "max_tokens"),
    ],
)
def test_refusals_are_openai_errors(
    triton: Any, words: Any, request_body: Any, status: int, param: str | None, text: str
) -> None:
    error = json.loads(triton.refusal("chat", words.json_tensors(request_body)).message())["error"]
    assert (error["status"], error["param"]) == (status, param)
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_error_after_the_first_chunk_is_the_last_response(triton: Any, words: Any) -> None:
    *chunks, last = words.objects_of(triton.ask("chat", words.json_tensors(body(words.BREAKS, stream=True))))
    assert joined(chunks, "reasoning_content")
    assert last["error"]["message"] == "it broke"
    assert last["error"]["status"] == 500


def test_a_cancelled_chat_frees_its_blocks(triton: Any, words: Any) -> None:
    request = body(words.LONG_TEXT, stream=True, max_tokens=2000)
    call = triton.open("chat", words.json_tensors(request))
    words.wait_until(lambda: triton.used_blocks() > 0)
    call.cancel()
    words.wait_until(lambda: triton.used_blocks() == 0, timeout_s=1.0)


@pytest.mark.parametrize("stream", [True, False])
def test_completions(triton: Any, words: Any, stream: bool) -> None:
    request = {"prompt": ["first text", "the second"], "max_tokens": 20, "stream": stream}
    objects = words.objects_of(triton.ask("completions", words.json_tensors(request)))
    texts = ["", ""]
    for entry in objects:
        for choice in entry["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["first text", "the second"]
    assert objects[-1]["usage"]["prompt_tokens"] == 4
    assert objects[-1]["choices"][0]["finish_reason"] == "stop"


def test_generate_over_http(triton: Any, words: Any) -> None:
    status, text = triton.post("chat/generate", {"request": json.dumps(body(words.GREETING))})
    assert status == 200, text
    answer = json.loads(json.loads(text)["response"])
    assert answer["choices"][0]["message"]["content"] == words.CONTENT


@pytest.fixture(scope="module")
def chatty(launch: Callable[..., Any]) -> Any:
    parameters = {"chat_mode": "true", "served_model_name": "mine, yours"}
    return launch(models=("ensemble", "tensorrt_llm_bls", "chat"), parameters=parameters)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("stream", [True, False])
def test_chat_mode_gives_the_final_channel_of_one_turn(chatty: Any, words: Any, model: str, stream: bool) -> None:
    responses = chatty.ask(model, words.text_tensors(words.GREETING, stream=stream, max_tokens=60, end_id=-1))
    assert words.text_of(responses) == words.CONTENT
    assert responses[-1]["finish_reason"].tolist() == [b"stop"]


def test_chat_mode_takes_special_token_text_as_text(chatty: Any, words: Any) -> None:
    def count(text: str) -> int:
        (response,) = chatty.ask("ensemble", words.text_tensors(text, return_num_input_tokens=True))
        return int(response["num_input_tokens"][0, 0])

    assert count("<|end|>") > count("x") + 1, "the text of a special token is several ordinary tokens"


def test_a_model_name_that_is_not_served(chatty: Any, words: Any) -> None:
    error = json.loads(chatty.refusal("chat", words.json_tensors(body("x", model="theirs"))).message())["error"]
    assert (error["status"], error["code"]) == (404, "model_not_found")
    (answer,) = words.objects_of(chatty.ask("chat", words.json_tensors(body(words.GREETING, model="yours"))))
    assert answer["model"] == "yours"
