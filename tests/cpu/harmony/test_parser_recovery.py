"""Malformed completions of the kinds that public bug reports describe, one row each, and the options."""

from __future__ import annotations

import pytest

from gptoss_trt.build_engine import vocabulary
from gptoss_trt.runtime.harmony import HarmonyStream, Tokenizer

TOKENIZER = Tokenizer.load()
ARGS = '{"city":"Oslo"}'
CALL = ["get_weather", ARGS]
TO = "to=functions.get_weather"
FINAL = "<|start|>assistant<|channel|>final<|message|>hi<|return|>"
THINK = "<|channel|>analysis<|message|>t<|end|>"
LONG = "word " * 400

# text -> (content, reasoning, calls, finish reason)
ROWS = {
    # recipients: position, spelling, glue
    f"<|channel|>commentary {TO} <|constrain|>json<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|start|>assistant {TO}<|channel|>commentary json<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"{THINK}<|start|>assistant {TO}<|channel|>commentary<|message|>{ARGS}<|call|>": (None, "t", [CALL], "tool_calls"),
    f" {TO}<|channel|>commentary {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f" to=assistant<|channel|>commentary {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f" {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary{TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary to= functions.get_weather<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f'<|channel|>commentary to="functions.get_weather"<|message|>{ARGS}<|call|>': (None, None, [CALL], "tool_calls"),
    f"<|channel|>final {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>thoughts {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary to=get_weather<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}commentary<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}code<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary to=functions.functions.get_weather<|message|>{ARGS}<|call|>": (
        None,
        None,
        [CALL],
        "tool_calls",
    ),
    f"<|channel|>commentary to=Functions:get_weather<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary––commentary {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"\n\t{TO}\n<|channel|>\ncommentary\n<|constrain|>\njson\n<|message|>{ARGS}<|call|>": (
        None,
        None,
        [CALL],
        "tool_calls",
    ),
    "<|channel|>commentary to=functions.web-browsing json<|message|>{}<|call|>": (
        None,
        None,
        [["web-browsing", "{}"]],
        "tool_calls",
    ),
    "<|channel|>analysis to=browser.search code<|message|>{}<|call|>": (
        None,
        None,
        [["browser.search", "{}"]],
        "tool_calls",
    ),
    "<|channel|>commentary to=user<|message|>hello<|return|>": ("hello", None, [], "stop"),
    "<|channel|>commentary to=all<|message|>hello<|end|>": ("hello", None, [], "stop"),
    "<|channel|>analysis to=assistant<|message|>hm<|end|>": (None, "hm", [], "stop"),
    "<|channel|>final to=user<|message|>hello<|return|>": ("hello", None, [], "stop"),
    # content types
    f"<|channel|>commentary {TO} <|constrain|>JSON<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO} <|constrain|><|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}<|constrain|>json<|constrain|>json<|message|>{ARGS}<|call|>": (
        None,
        None,
        [CALL],
        "tool_calls",
    ),
    f"<|channel|>commentary json {TO}<|message|>{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    "<|channel|>final<|constrain|>json<|message|>{}<|return|>": ("{}", None, [], "stop"),
    "<|channel|>final json<|message|>{}<|return|>": ("{}", None, [], "stop"),
    "<|channel|>finaljson<|message|>{}<|return|>": ("{}", None, [], "stop"),
    "<|channel|>commentary<|constrain|>json<|message|>{}<|return|>": ("{}", None, [], "stop"),
    # missing markers
    f"<|channel|>analysis<|message|>t{FINAL}": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|start|><|channel|>final<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|start|>assistantfinal<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|start|>assistant final<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|><|start|>assistantHello there.<|return|>": ("Hello there.", "t", [], "stop"),
    "<|channel|>analysis<|message|>t<|end|>Sorry, I can't.<|return|>": ("Sorry, I can't.", "t", [], "stop"),
    "<|message|>hi<|return|>": ("hi", None, [], "stop"),
    "<|channel|><|message|>hi<|return|>": ("hi", None, [], "stop"),
    "<|channel|>final Sorry.<|return|>": ("Sorry.", None, [], "stop"),
    "<|channel|>final Sorry, no.<|end|>": ("Sorry, no.", None, [], "stop"),
    f"<|channel|>analysis We must see.{FINAL}": ("hi", "We must see.", [], "stop"),
    "<|channel|>analysis We must see.<|channel|>final<|message|>hi<|return|>": ("hi", "We must see.", [], "stop"),
    f"<|channel|>commentary {TO} <|constrain|>json{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO} json {ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}{ARGS}<|call|>": (None, None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}<|message|>{ARGS}{FINAL}": ("hi", None, [CALL], "tool_calls"),
    f"<|channel|>commentary {TO}<|message|>{ARGS}<|channel|>final<|message|>hi": ("hi", None, [CALL], "tool_calls"),
    # bare text and stray words
    "Hello": ("Hello", None, [], "stop"),
    "Hello.<|end|>": ("Hello.", None, [], "stop"),
    "Hello there<|endoftext|>": ("Hello there", None, [], "stop"),
    f"We must refuse.<|end|>{FINAL}": ("hi", "We must refuse.", [], "stop"),
    f"We must refuse.{FINAL}": ("hi", "We must refuse.", [], "stop"),
    "We must refuse.<|channel|>final<|message|>hi<|return|>": ("hi", "We must refuse.", [], "stop"),
    "zz<|channel|>final<|message|>hi<|return|>": ("hi", None, [], "stop"),
    f"{THINK}zz yy {FINAL}": ("hi", "t", [], "stop"),
    f"{THINK}<|start|>assistant zz yy<|channel|>final<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    f"{THINK}assistant<|channel|>final<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    "<|channel|>final<|message|>hi<|end|>trailing words here<|return|>": ("hi", None, [], "stop"),
    "<|channel|>final zz<|message|>hi<|return|>": ("hi", None, [], "stop"),
    LONG + "<|return|>": (LONG, None, [], "stop"),
    f"<|channel|>analysis {LONG}<|end|>{FINAL}": ("hi", LONG, [], "stop"),
    "assistants help.<|return|>": ("assistants help.", None, [], "stop"),
    "x to=5 is code.<|return|>": ("x to=5 is code.", None, [], "stop"),
    # doubled markers
    f"<|channel|><|channel|>analysis<|message|>t<|end|>{FINAL}": ("hi", "t", [], "stop"),
    f"<|channel|>analysis<|message|><|message|>t<|end|><|end|><|start|>{FINAL}": ("hi", "t", [], "stop"),
    "<|channel|>analysis<|channel|>final<|message|>hi<|return|><|return|>": ("hi", None, [], "stop"),
    "<|start|>assistant<|channel|>final<|message|>hi<|return|>": ("hi", None, [], "stop"),
    "<|startoftext|><|channel|>final<|message|>h<|constrain|>i<|reserved_200100|>!<|return|>": (
        "hi!",
        None,
        [],
        "stop",
    ),
    # channels
    "<|channel|>Final<|message|>hi<|return|>": ("hi", None, [], "stop"),
    "<|channel|>thoughts hm hm<|end|>" + FINAL: ("hi", None, [], "stop"),
    f"<|channel|>final<|message|>hi<|end|><|start|>assistant{THINK}": ("hi", "t", [], "stop"),
    "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>": (
        "ab",
        None,
        [],
        "stop",
    ),
    "<|channel|>commentary<|message|>First.<|end|>" + FINAL: ("First.hi", None, [], "stop"),
    f"<|channel|>analysis<|message|><|end|>{FINAL}": ("hi", None, [], "stop"),
    # somebody else's turn
    f"{THINK}<|start|>user<|channel|>final<|message|>and now?<|end|>{FINAL}": (None, "t", [], "stop"),
    f"{THINK}<|start|>user and now?<|end|>{FINAL}": (None, "t", [], "stop"),
    f"{THINK}user<|message|>and now?<|end|>{FINAL}": (None, "t", [], "stop"),
    f"{THINK}<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>7<|end|>{FINAL}": (
        None,
        "t",
        [],
        "stop",
    ),
    f"{THINK}<|start|>get_weather<|channel|>commentary <|constrain|>json<|message|>{ARGS}<|call|>": (
        None,
        "t",
        [CALL],
        "tool_calls",
    ),
    f"{THINK}<|start|>bash<|channel|>commentary<|message|>x<|end|>{FINAL}": (None, "t", [], "stop"),
    f"{THINK}<|start|>bash<|message|>x<|end|>{FINAL}": (None, "t", [], "stop"),
    f"{THINK}<|start|>asistant<|channel|>final<|message|>hi<|return|>": ("hi", "t", [], "stop"),
    f"{THINK}<|start|>Assistant<|channel|>commentary<|message|>hi<|end|>": ("hi", "t", [], "stop"),
    f"{THINK}<|start|>zz<|channel|>commentary {TO}<|message|>{ARGS}<|call|>": (None, "t", [CALL], "tool_calls"),
    f"<|channel|>final<|message|>hi<|end|><|start|>system<|message|>obey<|end|>{FINAL}": ("hi", None, [], "stop"),
    # after a terminal
    f"<|channel|>commentary {TO}<|message|>{ARGS}<|call|>{FINAL}": (None, None, [CALL], "tool_calls"),
    f"<|channel|>final<|message|>hi<|return|>{FINAL}": ("hi", None, [], "stop"),
    "<|channel|>final<|message|>hi<|endoftext|>more": ("hi", None, [], "stop"),
    "<|channel|>final<|message|>hi<|call|>more": ("hi", None, [], "stop"),
    "<|return|>": (None, None, [], "stop"),
    "<|channel|>final<|return|>": (None, None, [], "stop"),
    "<|end|><|end|>": (None, None, [], "stop"),
    "": (None, None, [], "stop"),
    # calls
    f"<|channel|>commentary {TO}<|message|><|call|>": (None, None, [["get_weather", ""]], "tool_calls"),
    f"<|channel|>commentary {TO}<|call|>": (None, None, [["get_weather", ""]], "tool_calls"),
    "<|channel|>commentary to=functions.<|message|>{}<|call|>": (None, None, [["functions", "{}"]], "tool_calls"),
}


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("text", ROWS, ids=[text[:100] for text in ROWS])
def test_recovery(text, chunk, parse):
    result = parse(TOKENIZER.encode(text), ["get_weather"], chunk)
    assert (result["content"], result["reasoning"], result["calls"], result["finish"][0]) == ROWS[text]


WHOLE = (
    f"{THINK}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    f"<|start|>assistant {TO}<|channel|>commentary <|constrain|>json<|message|>{ARGS}<|call|>"
)


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_cut_anywhere_gives_a_prefix(reason, parse):
    ids = TOKENIZER.encode(WHOLE)
    for cut in range(len(ids)):
        result = parse(ids[:cut], ["get_weather"], reason=reason)
        assert "I look.".startswith(result["content"] or "")
        assert result["reasoning"] in (None, "t")
        assert all(name == "get_weather" and ARGS.startswith(text) for name, text in result["calls"])
        assert result["finish"] == ("length", None)


@pytest.mark.parametrize(
    "text", [" to", " to=", " to=functions.get", "<|start|>assistant to=func", "<|channel|>analysis zz"]
)
def test_a_header_cut_short_shows_nothing(text, parse):
    assert parse(TOKENIZER.encode(text), reason="length")["parts"] == []


def test_bare_text_cut_short_is_shown(parse):
    assert parse(TOKENIZER.encode("Sor"), reason="length")["content"] == "Sor"


def test_terminal_token_wins_over_a_length_reason(parse):
    assert parse(TOKENIZER.encode(WHOLE), ["get_weather"], reason="length")["finish"] == ("tool_calls", None)


def test_bytes_of_a_character_do_not_join_across_messages(parse):
    byte = vocabulary.token_bytes().index
    ids = [*TOKENIZER.encode("<|channel|>analysis<|message|>A"), byte(b"\xf0"), byte(b"\x9f")]
    ids += [*TOKENIZER.encode("<|end|><|start|>assistant<|channel|>final<|message|>"), byte(b"\x98"), byte(b"\x80")]
    result = parse(ids)
    assert (result["reasoning"], result["content"]) == ("A\ufffd", "\ufffd\ufffd")


def test_bytes_of_a_character_do_not_join_across_a_marker_in_bare_text(parse):
    byte = vocabulary.token_bytes().index
    for marker in (200003, 199998, 200100):
        assert parse([byte(b"\xc3"), marker, byte(b"\xa9")])["content"] == "\ufffd\ufffd"
    ids = [byte(b"\xc3"), 200007, byte(b"\xa9"), 200007]
    assert parse([*ids, *TOKENIZER.encode(FINAL)])["reasoning"] == "\ufffd\ufffd"


def test_bytes_of_a_character_split_between_header_and_text(parse):
    ids = TOKENIZER.encode("<|channel|>final " + "日本語の長い文" * 40)
    for chunk in (1, None):
        assert parse(ids, chunk=chunk)["content"] == "日本語の長い文" * 40


def test_parallel_tool_calls_false_keeps_the_first(parse):
    second = f"<|start|>assistant<|channel|>commentary {TO}<|message|>{{}}<|call|>"
    for between in ("<|end|>", ""):
        text = f"<|channel|>commentary {TO}<|message|>{ARGS}{between}{second}"
        assert parse(TOKENIZER.encode(text), ["get_weather"], parallel_tool_calls=False)["calls"] == [CALL]
        assert len(parse(TOKENIZER.encode(text), ["get_weather"])["calls"]) == 2


def test_options():
    with pytest.raises(TypeError, match="ignore_eos"):
        HarmonyStream([], ignore_eos=True)
    with pytest.raises(ValueError, match="'done'; allowed: stop, length, cancelled"):
        HarmonyStream([], engine_finish="done")
    stream = HarmonyStream([], engine_finish="length")
    with pytest.raises(ValueError, match="201088 is outside the vocabulary"):
        stream.push([201_088])
    assert stream.finish() == [("finish", "length", None)]
    with pytest.raises(RuntimeError):
        stream.push([1])
    with pytest.raises(RuntimeError):
        stream.finish()


def test_declared_names_may_carry_the_namespace(parse):
    ids = TOKENIZER.encode(f"<|channel|>commentary {TO}json<|message|>{ARGS}<|call|>")
    assert parse(ids, ["functions.get_weather"])["calls"] == [CALL]


def test_long_bare_text_streams_before_its_end():
    stream = HarmonyStream([])
    assert any(stream.push([token_id]) for token_id in TOKENIZER.encode(LONG))
