"""What holds for any ids at all: chunking, truncation, token soup, bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_trt.build_engine import vocabulary
from gptoss_trt.runtime.harmony import HarmonyStream, Tokenizer

TOKENIZER = Tokenizer.load()
TOOLS = ["get_weather", "a"]
MARKERS = [200002, 200003, 200005, 200006, 200007, 200008, 200012, 199998, 199999]
WORDS = [
    *("assistant", "user", "analysis", "commentary", "final", " to=", "functions", ".get", "_weather", "json", " code"),
    *("{", '"a"', "}", " We", " must", ".", "\n", " ", "日", "é", "😀", "<|", "|>", "end", "<|end|>"),
]
WORD_IDS = [TOKENIZER.encode_ordinary(word) for word in WORDS]
BYTES = [vocabulary.token_bytes().index(bytes([value])) for value in (0x41, 0x80, 0x9F, 0xC3, 0xE6, 0xF0, 0xFF)]

soup = st.lists(
    st.one_of(
        st.sampled_from(MARKERS).map(lambda number: [number]),
        st.sampled_from(WORD_IDS),
        st.sampled_from(BYTES).map(lambda number: [number]),
        st.integers(0, vocabulary.VOCABULARY_SIZE - 1).map(lambda number: [number]),
    ),
    max_size=60,
).map(lambda parts: [number for part in parts for number in part])
# Soup of markers alone meets few interesting headers: so also well-formed pieces, in any order.
PIECES = [
    TOKENIZER.encode(text)
    for text in (
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>", "We see. "),
        *(" to=functions.a<|channel|>commentary json<|message|>", "{}<|call|>", "<|return|>", "<|channel|>analysis "),
        *(
            "<|start|>user<|message|>",
            "<|channel|>commentary to=functions.a <|constrain|>json",
            "<|message|>",
            "日本😀",
        ),
    )
]
ordered = st.lists(st.sampled_from(PIECES), max_size=14).map(lambda parts: [n for part in parts for n in part])
completions = st.one_of(soup, ordered)
options = st.fixed_dictionaries({"parallel_tool_calls": st.booleans()})
reasons = st.sampled_from(["stop", "length", "cancelled"])


def merged(events):
    """Events with neighbouring deltas of one channel joined: what chunking may not change."""
    out: list[list] = []
    for event in events:
        head, text = list(event[:-1]), event[-1]
        if out and out[-1][:-1] == head and event[0] in ("content", "reasoning", "tool_args"):
            out[-1][-1] += text
        else:
            out.append([*head, text])
    return out


@settings(max_examples=400, deadline=None)
@given(ids=completions, cuts=st.lists(st.integers(0, 80), max_size=8), kwargs=options, reason=reasons)
def test_any_chunking_gives_the_same_events(ids, cuts, kwargs, reason):
    whole = HarmonyStream(TOOLS, **kwargs)
    expected = merged(whole.push(ids) + whole.finish(reason))
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    stream = HarmonyStream(TOOLS, **kwargs)
    events = [event for a, b in zip(edges, edges[1:], strict=False) for event in stream.push(ids[a:b])]  # noqa: RUF007
    assert merged(events + stream.finish(reason)) == expected
    single = HarmonyStream(TOOLS, **kwargs)
    events = [event for number in ids for event in single.push([number])]
    assert merged(events + single.finish(reason)) == expected
    assert all(text for kind, *_, text in events if kind != "finish"), "an empty event"


@settings(max_examples=400, deadline=None)
@given(ids=completions, kwargs=options, reason=reasons)
def test_nothing_raises_leaks_or_doubles(ids, kwargs, reason):
    stream = HarmonyStream(TOOLS, **kwargs)
    events = stream.push(ids) + stream.finish(reason)
    assert [event[0] for event in events].count("finish") == 1 == len(events) - events.index(events[-1])
    shown = "".join(event[-1] for event in events if event[0] in ("content", "reasoning", "tool_args"))
    # Every run of ordinary tokens between two special ones; what is shown is in them, in order, once.
    runs: list[bytes] = [b""]
    for number in ids:
        if number in TOKENIZER.special_ids:
            runs.append(b"")
        else:
            runs[-1] += TOKENIZER.token_bytes(number)
    source = "".join(run.decode("utf-8", "replace") for run in runs)
    position = 0
    for character in shown:
        position = source.find(character, position) + 1
        assert position > 0, (shown, source)
    markers = sum(shown.count(text) - source.count(text) for text in ("<|", "|>"))
    assert markers <= 0


messages = st.lists(
    st.tuples(st.sampled_from(["analysis", "final", "commentary", "tool"]), st.text(min_size=1, max_size=30)),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(parts=messages, cut=st.integers(0, 400), last=st.sampled_from(["<|end|>", ""]))
def test_no_character_of_a_well_formed_completion_is_lost(parts, cut, last):
    ids: list[int] = []
    expected: dict[str, str] = {"reasoning": "", "content": "", "tool_args": ""}
    for place, (channel, text) in enumerate(parts):
        if place:
            ids += TOKENIZER.encode("<|end|><|start|>assistant")
        to = "commentary to=functions.a json" if channel == "tool" else channel
        ids += TOKENIZER.encode(f"<|channel|>{to}<|message|>") + TOKENIZER.encode_ordinary(text)
        name = {"analysis": "reasoning", "tool": "tool_args"}.get(channel, "content")
        expected[name] += text
    stream = HarmonyStream(TOOLS)
    events = stream.push(ids + TOKENIZER.encode(last)) + stream.finish("stop")
    seen = {name: "".join(event[-1] for event in events if event[0] == name) for name in expected}
    assert seen == expected
    assert events[-1][1] == ("tool_calls" if any(channel == "tool" for channel, _ in parts) else "stop")

    short = HarmonyStream(TOOLS)
    events = short.push(ids[:cut]) + short.finish("length")
    for name, text in expected.items():
        prefix = "".join(event[-1] for event in events if event[0] == name)
        assert text.startswith(prefix.rstrip("\ufffd"))
