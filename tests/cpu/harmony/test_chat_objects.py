"""Engine events to chat.completion and text_completion objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptoss_trt.runtime.engine.messages import Finished, TokenLogprobs, Tokens, Usage
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.chat_objects import ChatAnswer
from gptoss_trt.runtime.openai.chat_request import read_chat
from gptoss_trt.runtime.openai.completion_objects import CompletionAnswer
from gptoss_trt.runtime.openai.completion_request import prompt_lists, read_completion
from gptoss_trt.runtime.openai.errors import engine_error
from gptoss_trt.runtime.openai.submission import completion_submit

CASES_FILE = Path(__file__).parents[2] / "data" / "harmony_cases.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_text(encoding="utf-8").splitlines()]
PARSER_CASES = [case for case in CASES if case["kind"] in ("completion", "stream")]
TOKENIZER = Tokenizer.load()
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>'


def run(answer, ids, *, size=1, sequence=0, reason="stop", usage=None, logprobs=False):
    chunks = []
    for start in range(0, len(ids), size):
        part = tuple(ids[start : start + size])
        entries = tuple(TokenLogprobs(-0.5, ((number, -0.5), (5, -1.0))) for number in part) if logprobs else None
        chunks += answer.push(Tokens("r", sequence, part, entries))
        if answer.complete:
            reason = "cancelled" if answer.complete and reason == "cancel" else reason
    return chunks + answer.push(Finished("r", sequence, reason, usage or Usage(3, len(ids))))


def put_together(chunks):
    """What a client makes of a stream: one message per choice."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            state = choices.setdefault(choice["index"], {"message": {}, "finish_reason": None})
            message, delta = state["message"], choice["delta"]
            assert state["finish_reason"] is None
            assert ("role" in delta) == (not message)
            for name, value in delta.items():
                if name == "tool_calls":
                    for call in value:
                        calls = message.setdefault("tool_calls", [])
                        if call["index"] == len(calls):
                            assert set(call) == {"index", "id", "type", "function"}
                            calls.append({key: call[key] for key in ("id", "type", "function")})
                        else:
                            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                            calls[call["index"]]["function"] = {
                                "name": calls[call["index"]]["function"]["name"],
                                "arguments": calls[call["index"]]["function"]["arguments"]
                                + call["function"]["arguments"],
                            }
                elif name == "role":
                    message[name] = value
                elif value is not None:
                    message[name] = (message.get(name) or "") + value
            state["finish_reason"] = choice["finish_reason"]
    return choices


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("case", PARSER_CASES, ids=[case["id"] for case in PARSER_CASES])
def test_case_streamed_and_whole(case, size):
    tools = [{"type": "function", "function": {"name": name}} for name in case["declared_tools"]]
    answer = ChatAnswer(read_chat({"messages": HI, "tools": tools}), prompt_tokens=3)
    reason = (case.get("opts") or {}).get("engine_finish", "stop")
    chunks = run(answer, case["token_ids_o200k_harmony"], size=size, reason=reason)
    expected, whole = case["expected"], answer.completion()["choices"][0]
    assert whole["finish_reason"] == expected["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"]
    message = whole["message"]
    assert message["content"] == expected["content"]
    reasoning = "".join(expected.get("reasoning_parts", [expected["reasoning"] or ""])) or None
    assert message["reasoning"] == message["reasoning_content"] == reasoning
    calls = message.get("tool_calls", [])
    assert [call["function"] for call in calls] == [
        {"name": call["name"], "arguments": call["arguments"]} for call in expected["tool_calls"]
    ]
    assert len({call["id"] for call in calls}) == len(calls)
    streamed = put_together(chunks)[0]["message"]
    assert streamed.get("tool_calls", []) == calls
    for name in ("content", "reasoning", "reasoning_content"):
        assert streamed.get(name) == message[name]
    json.dumps([chunks, answer.completion()])


def test_usage_counts_prompt_cached_and_reasoning_tokens():
    chat = read_chat({"messages": HI, "n": 2, "stream_options": {"include_usage": True}})
    answer = ChatAnswer(chat, prompt_tokens=7, model="m", response_id="chatcmpl-1", created=5)
    ids = TOKENIZER.encode(
        "<|channel|>analysis<|message|>one two three<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>"
    )
    first = run(answer, ids, usage=Usage(7, len(ids), cached_tokens=4))
    assert all(chunk["usage"] is None for chunk in first)
    assert not answer.ended
    with pytest.raises(RuntimeError):
        answer.completion()
    second = run(answer, ids, sequence=1, usage=Usage(7, len(ids), cached_tokens=4))
    assert second[-1]["choices"] == []
    assert (
        second[-1]["usage"]
        == answer.completion()["usage"]
        == {
            "prompt_tokens": 7,
            "completion_tokens": 2 * len(ids),
            "total_tokens": 7 + 2 * len(ids),
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 6},
        }
    )
    assert {chunk["id"] for chunk in first + second} == {"chatcmpl-1"}
    assert sorted(put_together(first + second)) == [0, 1]


def test_usage_in_the_last_chunk():
    answer = ChatAnswer(read_chat({"messages": HI}), prompt_tokens=3, usage="last")
    chunks = run(answer, TOKENIZER.encode("<|channel|>final<|message|>hello<|return|>"))
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("stop", "include", "shown"), [(["ree"], False, "one two th"), (["ree"], True, "one two three")]
)
def test_stop_strings_cut_the_content_and_not_the_reasoning(stop, include, shown):
    chat = read_chat({"messages": HI, "stop": stop, "include_stop_str_in_output": include})
    answer = ChatAnswer(chat, prompt_tokens=1)
    text = (
        "<|channel|>analysis<|message|>three<|end|><|start|>assistant<|channel|>final<|message|>one two three four five"
    )
    chunks = []
    for number in TOKENIZER.encode(text):
        chunks += answer.push(Tokens("r", 0, (number,)))
    assert answer.complete and not answer.ended
    chunks += answer.push(Finished("r", 0, "cancelled", Usage(1, 9)))
    message = answer.completion()["choices"][0]
    assert (message["message"]["content"], message["message"]["reasoning"]) == (shown, "three")
    assert message["finish_reason"] == "stop"
    assert put_together(chunks)[0]["message"]["content"] == shown


def test_text_held_for_a_stop_string_comes_at_the_end():
    answer = ChatAnswer(read_chat({"messages": HI, "stop": "xyz"}), prompt_tokens=1)
    chunks = run(answer, TOKENIZER.encode("<|channel|>final<|message|>abxy<|return|>"))
    assert put_together(chunks)[0]["message"]["content"] == "abxy"


def test_reasoning_can_be_left_out():
    answer = ChatAnswer(read_chat({"messages": HI, "include_reasoning": False}), prompt_tokens=1)
    chunks = run(answer, TOKENIZER.encode("<|channel|>analysis<|message|>t<|end|>"))
    assert "reasoning" not in put_together(chunks)[0]["message"]
    assert answer.completion()["choices"][0]["message"]["reasoning"] is None


def test_parallel_tool_calls_false_completes_early():
    chat = read_chat({"messages": HI, "tools": [TOOL], "parallel_tool_calls": False})
    answer = ChatAnswer(chat, prompt_tokens=1)
    assert not answer.complete
    run(answer, TOKENIZER.encode(CALL.replace("<|call|>", "<|end|>") + "<|start|>assistant" + CALL))
    assert answer.complete
    assert len(answer.completion()["choices"][0]["message"]["tool_calls"]) == 1


def test_forced_call_is_parsed_from_its_arguments_on():
    chat = read_chat({"messages": HI, "tools": [TOOL], "tool_choice": "required"})
    answer = ChatAnswer(chat, prompt_tokens=1)
    run(answer, TOKENIZER.encode('{"city":"Oslo"}<|call|>'))
    choice = answer.completion()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Oslo"}'}


def test_forced_choice_of_several_is_parsed_from_its_name_on():
    other = {"type": "function", "function": {"name": "other"}}
    chat = read_chat({"messages": HI, "tools": [TOOL, other], "tool_choice": "required"})
    answer = ChatAnswer(chat, prompt_tokens=1)
    run(answer, TOKENIZER.encode("other <|constrain|>json<|message|>{}<|call|>"))
    (call,) = answer.completion()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "other", "arguments": "{}"}


def test_logprobs_cover_the_content_only():
    chat = read_chat({"messages": HI, "logprobs": True, "top_logprobs": 2})
    answer = ChatAnswer(chat, prompt_tokens=1)
    ids = TOKENIZER.encode(
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>one é😀<|return|>"
    )
    chunks = run(answer, ids, logprobs=True)
    entries = answer.completion()["choices"][0]["logprobs"]["content"]
    assert bytes(number for entry in entries for number in entry["bytes"]).decode() == "one é😀"
    assert entries[0]["token"] == "one" and entries[0]["top_logprobs"][1]["logprob"] == -1.0
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == entries


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_logprobs_end_with_the_stop_string_for_any_chunking(size):
    words = ["Once", " upon", " a", " time"]
    ids = TOKENIZER.encode("Once upon a time there was a fox")
    chat = read_chat({"messages": HI, "logprobs": True, "stop": ["a time"]})
    answer = ChatAnswer(chat, prompt_tokens=1)
    chunks = run(answer, [*TOKENIZER.encode("<|channel|>final<|message|>"), *ids], size=size, logprobs=True)
    choice = answer.completion()["choices"][0]
    assert choice["message"]["content"] == "Once upon "
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == words
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry["token"] for part in streamed for entry in part["content"]] == words
    plain = CompletionAnswer(read_completion({"prompt": "p", "stop": "a time", "logprobs": 0}), [[1]])
    for start in range(0, len(ids), size):
        part = tuple(ids[start : start + size])
        plain.push(0, Tokens("r", 0, part, tuple(TokenLogprobs(-1.0) for _ in part)))
    plain.push(0, Finished("r", 0, "cancelled", Usage(1, len(ids))))
    choice = plain.completion()["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Once upon ", words)


def test_objects_are_what_the_official_client_expects():
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    chat = read_chat({"messages": HI, "tools": [TOOL], "logprobs": True, "stream_options": {"include_usage": True}})
    answer = ChatAnswer(chat, prompt_tokens=1, model="m")
    text = f"<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>x<|end|>{CALL}"
    for chunk in run(answer, TOKENIZER.encode(text), logprobs=True):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    whole = ChatCompletion.model_validate(answer.completion(), strict=True)
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"
    Completion.model_validate(complete({"prompt": "p", "logprobs": 1}, ["abc"]), strict=True)


def test_engine_errors_have_statuses():
    codes = {
        "INVALID_ARGUMENT": 400,
        "RESOURCE_EXHAUSTED": 429,
        "UNAVAILABLE": 503,
        "DEADLINE_EXCEEDED": 504,
        "INTERNAL": 500,
    }
    assert {code: engine_error(code, "x").status for code in codes} == codes
    assert engine_error("INTERNAL", "x").body()["error"]["type"] == "server_error"


# Completions


@pytest.mark.parametrize("prompt", ["hi<|end|>", ["hi", "ho"], [1, 2], [[1, 2], [3]], ["hi", [3]]])
def test_prompts(prompt):
    lists = prompt_lists(read_completion({"prompt": prompt}))
    assert all(isinstance(number, int) for ids in lists for number in ids)
    if prompt == "hi<|end|>":
        assert lists == [[3686, 200007]]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [201088]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ],
)
def test_refused_completions(request_, param):
    with pytest.raises(RequestError) as caught:
        read_completion(request_)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        prompt_lists(read_completion({"prompt": ["a", ""]}))


def complete(request, texts, **finished):
    completion = read_completion(request)
    prompts = prompt_lists(completion)
    answer = CompletionAnswer(completion, prompts)
    chunks = []
    for prompt in range(len(prompts)):
        for sequence in range(completion.n):
            ids = TOKENIZER.encode(texts[prompt * completion.n + sequence])
            for number in ids:
                chunks += answer.push(
                    prompt, Tokens("r", sequence, (number,), (TokenLogprobs(-1.0, ((number, -1.0),)),))
                )
            end = Finished(
                "r", sequence, finished.get("reason", "stop"), Usage(2, len(ids)), 0, finished.get("prompt_logprobs")
            )
            chunks += answer.push(prompt, end)
    assert answer.ended
    whole = answer.completion()
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            tokens = [token for c in own if c["logprobs"] for token in c["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]
            offsets = [offset for c in own if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]
    return whole


def test_choices_are_numbered_prompt_by_prompt():
    whole = complete({"prompt": ["a", "b"], "n": 2}, ["w", "x", "y", "z"])
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "w"), (1, "x"), (2, "y"), (3, "z")]
    assert whole["object"] == "text_completion"
    assert whole["usage"]["prompt_tokens"] == 2 and whole["usage"]["completion_tokens"] == 4


def test_special_tokens_and_stops():
    text = "a<|end|>b<|return|>"
    assert complete({"prompt": "p"}, [text])["choices"][0]["text"] == "ab"
    shown = complete({"prompt": "p", "skip_special_tokens": False}, [text])["choices"][0]
    assert shown["text"] == "a<|end|>b"
    stopped = complete({"prompt": "p", "stop": "lo w"}, ["hello world"], reason="cancelled")["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("hel", "stop")
    assert complete({"prompt": "p"}, ["abc"], reason="length")["choices"][0]["finish_reason"] == "length"


def test_echo_with_prompt_logprobs():
    request = {"prompt": "Hello world", "echo": True, "max_tokens": 0, "logprobs": 1}
    entries = (None, TokenLogprobs(-2.0, ((5, -0.5),)))
    whole = complete(request, ["!"], prompt_logprobs=entries, reason="length")
    (choice,) = whole["choices"]
    assert choice["text"] == "Hello world"
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (0, 2), "one is made, none given"
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {TOKENIZER.decode([5]): -0.5}],
        "text_offset": [0, 5],
    }
    more = complete({**request, "max_tokens": 1}, ["!"], prompt_logprobs=entries)["choices"][0]
    assert more["text"] == "Hello world!"
    assert more["logprobs"]["tokens"] == ["Hello", " world", "!"]


def test_completion_submit():
    completion = read_completion(
        {"prompt": "x", "ignore_eos": True, "stop_token_ids": [4], "echo": True, "logprobs": 2}
    )
    submit = completion_submit(completion, "r", [1], max_context=100)
    assert (submit.stop_ids, submit.max_tokens, submit.logprobs, submit.prompt_logprobs) == ((4,), 16, 2, 2)
    plain = completion_submit(read_completion({"prompt": "x"}), "r", [1], max_context=100)
    assert (plain.stop_ids, plain.prompt_logprobs) == ((200002, 199999, 200012), None)
    with pytest.raises(RequestError, match="the context is 10 tokens"):
        completion_submit(read_completion({"prompt": "x"}), "r", [1], max_context=10)
