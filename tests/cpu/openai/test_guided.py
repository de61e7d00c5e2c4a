"""Grammars of chat turns, compiled over the real vocabulary: what they let through; random walks stay valid."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE
from gptoss_trt.runtime.engine.guides import GuideError
from gptoss_trt.runtime.engine.guides_llguidance import LlguidanceCompiler
from gptoss_trt.runtime.engine.messages import Guide
from gptoss_trt.runtime.harmony import HarmonyStream, Tokenizer
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.chat_request import forced_prefix, read_chat
from gptoss_trt.runtime.openai.completion_request import read_completion
from gptoss_trt.runtime.openai.submission import chat_submit, completion_submit

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
GOOD = '{"city": "Oslo", "days": 3}'
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}}
THOUGHT = '<|channel|>analysis<|message|>Let me {think] "about" 🙂.<|end|><|start|>assistant'
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "unevaluatedItems": False}}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
# Special tokens, and single characters that end a JSON text's parts: a walk that prefers them comes to an end.
ENDS = torch.zeros(VOCABULARY_SIZE, dtype=torch.bool)
ENDS[199_998:] = True
ENDS[[Tokenizer.load().encode(text)[0] for text in '"},:4']] = True


@pytest.fixture(scope="module")
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(VOCABULARY_SIZE)


def guides_of(**more: Any) -> tuple[Guide, ...]:
    return chat_submit(read_chat({"messages": HI, **more}), "r", [1], max_context=100).guides


def allowed(matcher: Any) -> torch.Tensor:
    row = torch.zeros(VOCABULARY_SIZE)
    matcher.mask(row)
    return row == 0


def refused_at(compiler: LlguidanceCompiler, guides: tuple[Guide, ...], text: str) -> str | None:
    """The first token of `text` that the guides forbid."""
    matcher = compiler.compile(guides)
    for number in Tokenizer.load().encode(text):
        if not allowed(matcher)[number]:
            return Tokenizer.load().token_bytes(number).decode()
        matcher.accept(number)
    return None


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>final<|message|>{GOOD}<|return|>",
        f"{THOUGHT}<|channel|>final<|message|>{GOOD}<|return|>",
        f"{THOUGHT}{THOUGHT}<|channel|>final <|constrain|>json<|message|>{GOOD}<|return|>",
        f"{THOUGHT}<|channel|>final<|constrain|>json<|message|>{GOOD}<|return|>",
        '<|channel|>final<|message|>{\n  "city": "Å",\n  "days": 9\n}<|return|>',
    ],
)
def test_what_a_schema_lets_through(compiler: LlguidanceCompiler, text: str) -> None:
    assert refused_at(compiler, guides_of(**FORMAT), text) is None


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (GOOD, '{"'),  # no header at all
        (f"<|channel|>final {GOOD}", ' {"'),  # no <|message|>
        (f"<|channel|>final <|constrain|> json<|message|>{GOOD}", " json"),
        ("<|channel|>finally", "finally"),
        ("<|channel|>commentary<|message|>Sure:", "comment"),  # would be content
        ("<|start|>assistant<|channel|>final<|message|>", "<|start|>"),
        ('<|channel|>final<|message|>{"city": 3', " "),
        ('<|channel|>final<|message|>{"town', "town"),
        ('<|channel|>final<|message|>{"city": "a much too long name', None),
        (f"<|channel|>final<|message|>{GOOD} and more", " and"),
        (f"<|channel|>final<|message|>{GOOD}<|end|>", "<|end|>"),
        ('<|channel|>final<|message|>{"city": "Oslo"<|return|>', "<|return|>"),
        ("<|channel|>analysis<|message|>Hm.<|return|>", "<|return|>"),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final", "<|channel|>"),
    ],
)
def test_no_way_around_a_schema(compiler: LlguidanceCompiler, text: str, token: str | None) -> None:
    found = refused_at(compiler, guides_of(**FORMAT), text)
    assert found is not None
    assert token is None or found.startswith(token.strip()) or found == token, found


def test_analysis_is_untouched(compiler: LlguidanceCompiler) -> None:
    matcher = compiler.compile(guides_of(**FORMAT))
    for number in Tokenizer.load().encode("<|channel|>analysis<|message|>"):
        matcher.accept(number)
    for number in Tokenizer.load().encode("Any {thing: [at all"):
        assert int(allowed(matcher).sum()) == 199_998 + 1, "every ordinary token, and the end of the message"
        matcher.accept(number)


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, {}]}'], ["[1]", "4", '"x"']),
        ({"guided_choice": ["yes", 'no "x"']}, ["yes", 'no "x"'], ["maybe", " yes"]),
        ({"guided_regex": r"\d+/[a-z]\.\n"}, ["12/a.\n"], ["a", "12/ax"]),
        ({"structured_outputs": {"regex": r"\/\\[/]"}}, ["/\\/"], ["//"]),
        ({"structured_outputs": {"choice": ["1"]}}, ["1"], ["2"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"guided_json": json.dumps(SCHEMA)}, [GOOD], ["{}"]),
    ],
)
def test_the_kinds_on_both_routes(compiler: LlguidanceCompiler, more: Any, good: list[str], bad: list[str]) -> None:
    routes = [("<|channel|>final<|message|>", guides_of(**more))]
    if "response_format" not in more:
        completion = completion_submit(read_completion({"prompt": "x", **more}), "r", [1], max_context=100)
        routes.append(("", completion.guides))
    for header, guides in routes:
        for text in good:
            assert refused_at(compiler, guides, f"{header}{text}<|return|>") is None
        for text in bad:
            assert refused_at(compiler, guides, f"{header}{text}<|return|>") is not None


def walk(compiler: LlguidanceCompiler, guides: tuple[Guide, ...], seed: int, start: str) -> list[int]:
    """`start` and then random allowed tokens until a stop id. Short tokens and ends are preferred, so that it ends."""
    chance = random.Random(seed)
    tokenizer = Tokenizer.load()
    matcher = compiler.compile(guides)
    ids = tokenizer.encode(start)
    for number in ids:
        assert allowed(matcher)[number]
        matcher.accept(number)
    while not ids or ids[-1] not in HARMONY_STOP_IDS:
        row = allowed(matcher)
        assert row.any(), tokenizer.decode(ids)
        assert len(ids) < 300, tokenizer.decode(ids)
        preferred = row & ENDS if chance.random() < 0.7 else row
        choices = (preferred if preferred.any() else row).nonzero()[:, 0]
        number = int(choices[chance.randrange(len(choices))])
        ids.append(number)
        matcher.accept(number)
    return ids


def test_random_walks_give_valid_json(compiler: LlguidanceCompiler) -> None:
    for seed in range(4):
        ids = walk(compiler, guides_of(**FORMAT), seed, THOUGHT if seed % 2 else "<|channel|>final")
        stream = HarmonyStream()
        events = [*stream.push(ids), *stream.finish("stop")]
        content = "".join(event[1] for event in events if event[0] == "content")
        value = json.loads(content)
        assert set(value) == {"city", "days"}
        assert 1 <= value["days"] <= 9
        assert len(value["city"]) <= 12


@pytest.mark.parametrize(("choice", "tools"), [("required", [WEATHER, OTHER]), ("required", [WEATHER])])
def test_random_walks_of_forced_calls(compiler: LlguidanceCompiler, choice: Any, tools: list[Any]) -> None:
    more = {"tools": tools, "tool_choice": choice}
    prefix = forced_prefix(read_chat({"messages": HI, **more}))
    names = set()
    for seed in range(3):
        ids = walk(compiler, guides_of(**more), seed, "")
        stream = HarmonyStream(["get_weather", "get"])
        events = [*stream.push([*prefix, *ids]), *stream.finish("stop")]
        (name,) = [event[2] for event in events if event[0] == "tool_name"]
        value = json.loads("".join(event[2] for event in events if event[0] == "tool_args"))
        assert isinstance(value, dict)
        assert name == "get" or set(value) == {"city", "days"}
        names.add(name)
    assert names <= {"get_weather", "get"}


def test_a_format_lets_tools_be_called(compiler: LlguidanceCompiler) -> None:
    guides = guides_of(**FORMAT, tools=[WEATHER, {"type": "python"}])
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert refused_at(compiler, guides, f"{THOUGHT}{call}not even JSON<|call|>") is None
    assert (
        refused_at(compiler, guides, f'{THOUGHT} to=functions.get_weather<|channel|>commentary<|message|>{{"a') is None
    )
    assert refused_at(compiler, guides, f"{THOUGHT}<|channel|>analysis to=python code<|message|>1 + 1<|call|>") is None
    assert refused_at(compiler, guides, "<|channel|>commentary to=functions.other<|message|>") == ".other"


def test_strict_functions_are_guided_when_they_are_called(compiler: LlguidanceCompiler) -> None:
    assert guides_of(tools=[WEATHER]) == ()
    guides = guides_of(tools=[STRICT])
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert refused_at(compiler, guides, f"{THOUGHT}{call}{GOOD}<|call|>") is None
    assert refused_at(compiler, guides, f"{THOUGHT}{call}not JSON<|call|>") is not None
    assert refused_at(compiler, guides, f"{THOUGHT}<|channel|>final<|message|>free text<|return|>") is None
    preamble = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    assert refused_at(compiler, guides, f"{preamble}{call}{GOOD}<|call|>") is None
    assert guides_of(tools=[STRICT], tool_choice="none") == ()


@pytest.mark.parametrize(
    "guide",
    [
        Guide("regex", "(a"),
        Guide("json_schema", '{"type": "objekt"}'),
        Guide("json_schema", '{"if": {}}'),
        Guide("json_schema", "[]"),
        Guide("json_schema", "{"),
        Guide("choice", "[]"),
        Guide("ebnf", "start: nothing"),
        Guide("json_schema", '{"pattern": "' + "a" * (1 << 20) + '"}'),
        Guide("regex", "(a|b)*" * 3000 + "c{9000}"),
    ],
)
def test_guides_that_cannot_be_compiled(compiler: LlguidanceCompiler, guide: Guide) -> None:
    with pytest.raises(GuideError, match=r"guide"):
        compiler.compile((guide,))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 3, "max_tokens": 9}, "min_tokens"),
        ({"guided_regex": "a", "tools": [WEATHER], "tool_choice": "required"}, "guided_regex"),
    ],
)
def test_formats_that_are_refused(more: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_chat({"messages": HI, **more})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_regex_does_not_leave_its_literal() -> None:
    (guide,) = guides_of(guided_regex="a/\nstart: /b")
    literals = re.findall(r"^answer: .*$", guide.grammar, re.M)
    assert literals == [r"answer: /a\/\nstart: \/b/"]


def test_triggers_and_end_ids(compiler: LlguidanceCompiler) -> None:
    """The engine's contract for guides that hold in a part of the output only."""
    encode = Tokenizer.load().encode
    trigger = tuple(encode("go:"))
    matcher = compiler.compile((Guide("choice", '["yes"]', trigger, (200007,)),))
    for number in (*encode("anything "), *trigger):
        assert allowed(matcher).all()
        matcher.accept(number)
    (yes,) = encode("yes")
    assert allowed(matcher)[yes]
    assert not allowed(matcher)[encode(" no")[0]]
    matcher.accept(yes)
    assert allowed(matcher).nonzero()[:, 0].tolist() == [200007]
    matcher.accept(200007)
    assert allowed(matcher).all()
