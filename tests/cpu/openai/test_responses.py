"""The Responses API without a server: items to messages, chunks to events, the store's bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.runtime.engine.messages import Finished, Tokens, Usage
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.chat_objects import ChatAnswer
from gptoss_trt.runtime.openai.chat_request import read_chat
from gptoss_trt.runtime.openai.gateway.store import ResponseStore
from gptoss_trt.runtime.openai.response_errors import in_response_terms
from gptoss_trt.runtime.openai.response_objects import ResponseAnswer
from gptoss_trt.runtime.openai.response_request import chat_body, input_messages, message_places, read_response

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}
THINK = "<|channel|>analysis<|message|>Hm 🙂.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'


def played(text: str, **more: Any) -> tuple[list[dict[str, Any]], ResponseAnswer]:
    """The events of a response to a completion, token by token."""
    request = read_response({"input": "hi", "tools": [TOOL], **more})
    body = chat_body(request, [])
    chat = ChatAnswer(read_chat(body), prompt_tokens=7)
    answer = ResponseAnswer(request, model="m")
    events = answer.begin()
    ids = Tokenizer.load().encode(text)
    reason = "stop" if ids[-1] in (200002, 200012) else "length"
    for event in [*(Tokens("r", 0, (number,)) for number in ids), Finished("r", 0, reason, Usage(7, len(ids)))]:
        for chunk in chat.push(event):
            events += answer.push(chunk)
    return events + answer.finish(), answer


def test_events_put_together_are_the_response() -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    events, answer = played(THINK + preamble + CALL)
    response = answer.response()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    names = ("response.reasoning_text", "response.output_text", "response.function_call_arguments")
    texts = ["".join(e["delta"] for e in events if e["type"] == f"{name}.delta") for name in names]
    assert texts == ["Hm 🙂.", "I look.", '{"city": "Oslo"}']
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert events[-1] == {**events[-1], "type": "response.completed", "response": response}
    assert response["usage"]["input_tokens"] == 7
    kinds = [event["type"].removeprefix("response.") for event in events if event.get("output_index") == 1]
    assert list(dict.fromkeys(kinds)) == [
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
    ]


def test_a_cut_answer_is_incomplete() -> None:
    events, answer = played("<|channel|>final<|message|>Half an")
    assert events[-1]["type"] == "response.incomplete"
    assert answer.response()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer.response()["output"][0]["status"] == "incomplete"


def test_a_failed_answer() -> None:
    answer = ResponseAnswer(read_response({"input": "hi"}), model="m")
    answer.begin()
    (failed,) = answer.fail(RequestError(500, None, "it broke"))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}


def test_the_answer_s_message_continues_the_conversation() -> None:
    _, answer = played(THINK + CALL)
    (message,) = answer.messages()
    (call,) = message["tool_calls"]
    assert (message["reasoning_content"], message["content"]) == ("Hm 🙂.", None)
    output = [{"type": "function_call_output", "call_id": call["id"], "output": "rain"}]
    follow = read_response({"input": output, "instructions": "Be brief.", "tools": [TOOL]})
    body = chat_body(follow, [{"role": "user", "content": "hi"}, message])
    assert [entry["role"] for entry in body["messages"]] == ["developer", "user", "assistant", "tool"]
    assert body["tools"][0]["function"]["strict"] is True
    read_chat(body)


def test_the_client_s_own_items_make_the_same_message() -> None:
    _, answer = played(THINK + CALL)
    assert input_messages(answer.response()["output"]) == answer.messages()


def test_parameters_become_chat_s() -> None:
    request = read_response(
        {
            "input": "x",
            "max_output_tokens": 9,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.5,
            "user": "u",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
    )
    body = chat_body(request, [])
    chat = read_chat(body)
    assert (chat.token_limit, chat.reasoning_effort, chat.temperature) == (9, "low", 0.5)
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert chat.wanted_format is not None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "file"}]}, "input[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"temprature": 1}, "temprature"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"store": "yes"}, "store"),
    ],
)
def test_refusals(more: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_body(read_response({"input": "x", **more}), [])
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


TURN = [{"type": "reasoning", "content": [{"text": "Hm"}]}, {"type": "function_call", "name": "f", "call_id": "1"}]


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"reasoning": {"effort": "max"}}, "reasoning.effort", "'max'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity is 'low'"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name", "'a b'"),
        ({"text": {"format": {"type": "verbosity"}}}, "text.format.type", "'verbosity'"),
        (
            {"input": [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]},
            "input[1].role",
            "input[1]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0].type", "'smell'"),
        ({"input": TURN}, "input", "input (arguments)"),
        ({"temperature": 7}, "temperature", "temperature is 7"),
    ],
)
def test_chat_s_complaints_name_what_the_client_wrote(more: Any, param: str, text: str) -> None:
    request = read_response({"input": "x", "instructions": "Be brief.", **more})
    earlier = [{"role": "user", "content": "messages[0] and verbosity"}]
    body = chat_body(request, earlier)
    with pytest.raises(RequestError) as caught:
        read_chat(body)
    places = message_places(request, earlier)
    assert len(places) == len(body["messages"])
    error = in_response_terms(caught.value, places)
    assert error.param == param, error.message
    assert text in error.message and "messages[" not in error.message
    assert (error.status, error.code) == (caught.value.status, caught.value.code)


@pytest.mark.parametrize("shared", [True, False])
def test_the_store_is_bounded(tmp_path: Path, shared: bool) -> None:
    store = ResponseStore(tmp_path / "s" if shared else None, max_count=3, max_bytes=1000, max_age_s=60)
    for number in range(5):
        assert store.put("me", f"r{number}", {"n": number})
    assert [store.get("me", f"r{number}") for number in range(5)] == [None, None, {"n": 2}, {"n": 3}, {"n": 4}]
    assert store.get("you", "r4") is None
    assert not store.delete("you", "r4")
    assert store.put("me", "big", {"text": "x" * 985})
    assert store.get("me", "r4") is None, "the bytes of the others made room"
    assert not store.put("me", "huge", {"text": "x" * 1000})
    assert store.get("me", "big") is not None
    assert store.put("me", "odd", {"text": "\ud800"})
    assert store.get("me", "odd") == {"text": "\ud800"}
    assert store.delete("me", "odd")
    assert store.get("me", "odd") is None
    store.close()


def test_the_store_forgets_with_age() -> None:
    store = ResponseStore(None, max_count=3, max_bytes=1000, max_age_s=0.0)
    store.put("me", "r", {})
    assert store.get("me", "r") is None
    store.close()


def test_no_bytes_or_count_means_nothing_is_stored() -> None:
    store = ResponseStore(None, max_count=0, max_bytes=1000, max_age_s=60)
    assert not store.put("me", "r", {})
    store.close()
