"""check_request: the request cases of tests/data/harmony_cases.jsonl, ranges, unknown and refused parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptoss_trt.runtime.harmony import Tokenizer, render_chat
from gptoss_trt.runtime.openai import RequestError, check_request
from gptoss_trt.runtime.openai.chat_request import forced_prefix, read_chat
from gptoss_trt.runtime.openai.submission import chat_submit

CASES_FILE = Path(__file__).parents[2] / "data" / "harmony_cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, CASES_FILE.read_text(encoding="utf-8").splitlines())}
REQUEST_CASES = [case for case in CASES.values() if case["kind"] == "request"]
TOKENIZER = Tokenizer.load()
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
SCHEMA = {"name": "r", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def refusal(**request):
    with pytest.raises(RequestError) as caught:
        check_request(request)
    return caught.value


@pytest.mark.parametrize("case", REQUEST_CASES, ids=[case["id"] for case in REQUEST_CASES])
def test_case(case):
    expected, request = case["expected"], case["input_request"]
    accepted = next((choice for choice in expected.get("any_of", ()) if "prompt_contains" in choice), expected)
    if "status" in accepted:
        error = refusal(**request)
        assert error.status == accepted["status"]
        assert error.param == accepted.get("error_param", error.param)
        assert error.param and error.param.split("[")[0] in str(error)
        return
    check_request(request)
    prompt = TOKENIZER.decode(render_chat(request, current_date="2025-06-28"))
    assert not [text for text in accepted.get("prompt_contains", ()) if text not in prompt]
    assert not [text for text in accepted.get("prompt_excludes", ()) if text in prompt]


def test_case_h_fmt_01_is_enforced_on_the_final_channel_only():
    chat = read_chat(CASES["h-fmt-01"]["input_request"])
    guides = chat_submit(chat, "r", [1], max_context=100).guides
    (guide,) = guides
    assert (guide.kind, guide.trigger, guide.end_ids) == ("ebnf", (), ()), "the grammar is the whole turn's"
    (answer,) = [line for line in guide.grammar.splitlines() if line.startswith("answer: %json ")]
    assert json.loads(answer.removeprefix("answer: %json ")).items() >= SCHEMA["schema"].items()
    assert 'thought: <[200005]> "analysis" <[200008]> text' in guide.grammar


def test_case_h_stop_03_ignore_eos_is_refused_on_chat():
    error = refusal(messages=HI, ignore_eos=True)
    assert (error.status, error.param) == (400, "ignore_eos")


ACCEPTED = [
    {},
    {"model": "gpt-oss-20b", "temperature": 0, "top_p": 1, "n": 2, "seed": -1, "max_tokens": 5},
    {"temperature": None, "max_tokens": None, "stop": None, "tools": None, "tool_choice": None, "logprobs": None},
    {"stop": "x"},
    {"stop": ["x", "y", "z", "w"], "max_completion_tokens": 1},
    {"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "auto", "safety_identifier": "s"},
    {"prompt_cache_key": "k", "parallel_tool_calls": False, "modalities": ["text"]},
    {"logprobs": True, "top_logprobs": 20, "logit_bias": {"11": -100, "201087": 100}},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [200002]},
    {"reasoning_effort": "minimal"},
    {"reasoning": {"effort": "high"}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"tools": [WEATHER], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"tools": [{"type": "python"}, {"type": "browser"}]},
    {"tools": [], "best_of": 1, "use_beam_search": False, "functions": [], "ignore_eos": False},
]


@pytest.mark.parametrize("extra", ACCEPTED, ids=[json.dumps(extra)[:60] for extra in ACCEPTED])
def test_accepted(extra):
    chat = read_chat({"messages": HI, **extra})
    assert chat_submit(chat, "r", [1, 2], max_context=100).max_tokens >= 1


# (request without messages, parameter, words of the message)
REFUSED = [
    ({"temperature": -0.1}, "temperature", ["-0.1", "0"]),
    ({"temperature": 2.1}, "temperature", ["2.1", "2"]),
    ({"temperature": "1"}, "temperature", ["'1'"]),
    ({"temperature": True}, "temperature", ["True"]),
    ({"temperature": float("nan")}, "temperature", ["nan"]),
    ({"top_p": 0}, "top_p", ["0"]),
    ({"top_p": 1.5}, "top_p", ["1.5"]),
    ({"n": 0}, "n", ["0", "1"]),
    ({"n": 129}, "n", ["129", "128"]),
    ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
    ({"max_tokens": -1}, "max_tokens", ["-1"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["0"]),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", ["6", "5"]),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", ["4"]),
    ({"stop": ""}, "stop[0]", []),
    ({"stop": 7}, "stop", ["7"]),
    ({"presence_penalty": 3}, "presence_penalty", ["3", "2"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["-3"]),
    ({"logit_bias": {"x": 1}}, "logit_bias", ["'x'"]),
    ({"logit_bias": {"201088": 1}}, "logit_bias", ["201088", "201087"]),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "100"]),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ["token id", "201087"]),
    ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
    ({"logprobs": 1}, "logprobs", ["1"]),
    ({"seed": 2**64}, "seed", [str(2**64)]),
    ({"stop_token_ids": [201088]}, "stop_token_ids[0]", ["201088"]),
    ({"stream": "yes"}, "stream", ["'yes'"]),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", []),
    ({"temprature": 1}, "temprature", ["did you mean 'temperature'"]),
    ({"zzz": None}, "zzz", ["unknown"]),
    ({"reasoning_effort": "none"}, "reasoning_effort", ["'none'", "low"]),
    ({"reasoning_effort": 3}, "reasoning_effort", ["3"]),
    ({"reasoning": {"effort": "banana"}}, "reasoning.effort", ["banana"]),
    ({"audio": {"voice": "x"}}, "audio", ["text"]),
    ({"modalities": ["text", "audio"]}, "modalities", ["audio"]),
    ({"functions": [{"name": "f"}]}, "functions", ["tools"]),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", ["guided_json", "exclude"]),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar", ["response_format"]),
    ({"skip_special_tokens": False}, "skip_special_tokens", []),
    ({"use_beam_search": True}, "use_beam_search", []),
    ({"best_of": 2}, "best_of", ["n"]),
    ({"tool_choice": "sometimes"}, "tool_choice", ["'sometimes'"]),
    ({"tool_choice": "required"}, "tool_choice", ["no function"]),
    ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice", []),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [WEATHER]}, "tool_choice", ["'g'"]),
    ({"tools": [WEATHER, WEATHER]}, "tools", ["twice"]),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", ["'a b'"]),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", []),
    ({"tools": [{"type": "mcp"}]}, "tools[0].type", ["'mcp'"]),
    ({"tools": ["f"]}, "tools[0].type", []),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        [],
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", ["'xml'"]),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name", []),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "r"}}},
        "response_format.json_schema.schema",
        [],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "name": "r<|end|>"}}},
        "response_format.json_schema.name",
        ["r<|end|>"],
    ),
    (
        {"response_format": {"type": "json_object"}, "tools": [WEATHER], "tool_choice": "required"},
        "response_format",
        [],
    ),
]


@pytest.mark.parametrize(("extra", "param", "words"), REFUSED, ids=[str(row[0])[:70] for row in REFUSED])
def test_refused(extra, param, words):
    error = refusal(messages=HI, **extra)
    assert (error.status, error.param) == (400, param)
    assert not [word for word in words if word not in error.message]
    body = error.body()["error"]
    assert body["type"] == "invalid_request_error"
    assert set(body) == {"message", "type", "param", "code"}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_MESSAGES = [
    ([], "messages"),
    ("hi", "messages"),
    (["hi"], "messages[0]"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([*HI, {"role": "tool", "tool_call_id": "zzz", "content": "x"}], "messages[1].tool_call_id"),
    ([*HI, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
    ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0]"),
    (
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f x", "arguments": "{}"}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    ([{"role": "function", "name": "a b", "content": "x"}], "messages[0].name"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([{"role": "system", "content": "x", "tool_calls": "f"}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=[str(row[0])[:70] for row in BAD_MESSAGES])
def test_refused_messages(messages, param):
    error = refusal(messages=messages)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "extra",
    [{"tool_choice": "x" * 9999}, {"reasoning_effort": "x" * 9999}, {"logit_bias": {"9" * 4999: 1}}, {"x" * 9999: 1}],
)
def test_a_long_value_is_not_repeated_whole(extra):
    error = refusal(messages=HI, **extra)
    assert len(error.message) < 1100 and len(error.param) < 1100
    assert "allowed" in error.message or "unknown" in error.message or "ids lie in" in error.message


def test_missing_messages_and_other_bodies():
    assert refusal().param == "messages"
    for body in (None, [], "x", 3):
        with pytest.raises(RequestError, match="not a JSON object"):
            check_request(body)


def test_schema_limits():
    deep: dict = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    for schema, word in ((deep, "32 levels"), ({"description": "x" * 70_000}, "65536")):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        assert word in refusal(messages=HI, tools=tools).message
        wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
        assert word in refusal(messages=HI, response_format=wanted).message
    assert "129" in refusal(messages=HI, tools=[{**OTHER, "function": {"name": f"f{i}"}} for i in range(129)]).message


def test_forced_tool_calls():
    one = read_chat({"messages": HI, "tools": [WEATHER], "tool_choice": "required"})
    assert TOKENIZER.decode(forced_prefix(one)).endswith("to=functions.get_weather <|constrain|>json<|message|>")
    (guide,) = chat_submit(one, "r", [1], max_context=10).guides
    assert guide.grammar.startswith("start: arguments <[200012]>\n")
    two = read_chat({"messages": HI, "tools": [WEATHER, OTHER], "tool_choice": "required"})
    assert TOKENIZER.decode(forced_prefix(two)).endswith("to=functions.")
    (guide,) = chat_submit(two, "r", [1], max_context=10).guides
    assert [name for name in ("get_weather", "other", "third") if f'"{name}"' in guide.grammar] == [
        "get_weather",
        "other",
    ]
    for choice in ("auto", "none"):
        assert forced_prefix(read_chat({"messages": HI, "tools": [WEATHER], "tool_choice": choice})) == []


def test_submit_fields():
    request = {"messages": HI, "temperature": 0.5, "top_k": -1, "seed": -1, "logprobs": True, "top_logprobs": 3}
    request |= {"stop_token_ids": [5], "logit_bias": {"7": 1.5}, "n": 2, "priority": 1, "cache_salt": "s", "stop": "x"}
    submit = chat_submit(read_chat(request), "r1", [1, 2, 3], max_context=10)
    assert (submit.request_id, submit.token_ids.tolist(), submit.max_tokens, submit.n) == ("r1", [1, 2, 3], 7, 2)
    assert submit.stop_ids == (200002, 199999, 200012, 5)
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0.5, 0, 2**64 - 1)
    assert (submit.logprobs, submit.logit_bias, submit.priority, submit.cache_salt) == (3, ((7, 1.5),), 1, "s")
    assert submit.stop_sequences == ()
    with pytest.raises(RequestError, match=r"prompt of 3 tokens \+ max_tokens 8 = 11; the context is 10 tokens"):
        chat_submit(read_chat({"messages": HI, "max_tokens": 8}), "r", [1, 2, 3], max_context=10)
    with pytest.raises(RequestError, match="prompt of 10 tokens; the context is 10 tokens"):
        chat_submit(read_chat({"messages": HI}), "r", [1] * 10, max_context=10)
