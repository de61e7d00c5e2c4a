"""Answers put together from any chunking, and the numbers of the metrics page, without a server."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gptoss_trt.client.protocol import METRICS
from gptoss_trt.runtime.engine.messages import Finished, TokenLogprobs, Tokens, Usage
from gptoss_trt.runtime.engine.metrics import Histogram, Statistics
from gptoss_trt.runtime.harmony import TextStream, Tokenizer
from gptoss_trt.runtime.triton_models.answers import Place, Results, TextAnswer, TokenAnswer
from gptoss_trt.runtime.triton_models.generation import Wanted
from gptoss_trt.runtime.triton_models.readings import HISTOGRAM_SOURCES, observations, readings

STREAMED = Wanted(True, False, True, False, False, True)
WHOLE = Wanted(False, False, True, False, False, True)
END = Finished("r", 0, "length", Usage(3, 5))
PLACE = Place(0, 0)


def tokens(*ids: int) -> Tokens:
    return Tokens("r", 0, ids, tuple(TokenLogprobs(-float(i)) for i in ids))


def test_token_answer_streams_what_is_new() -> None:
    answer = TokenAnswer(PLACE, STREAMED, (7, 8, 9))
    assert answer.take() is None
    answer.push(tokens(1, 2))
    answer.push(tokens(3))
    first = answer.take()
    assert first is not None
    assert first["output_ids"].tolist() == [[[1, 2, 3]]]
    assert first["cum_log_probs"].tolist() == [[-6.0]]
    assert answer.take() is None
    answer.push(tokens(4))
    answer.finish(END)
    last = answer.take()
    assert last is not None
    assert (last["output_ids"].tolist(), last["output_log_probs"].tolist()) == ([[[4]]], [[[-4.0]]])
    assert (last["cum_log_probs"].tolist(), last["num_output_tokens"].tolist()) == ([[-10.0]], [[4]])
    assert last["finish_reason"].tolist() == [b"length"]


def test_a_last_response_without_tokens_has_an_empty_tensor() -> None:
    answer = TokenAnswer(PLACE, STREAMED, (7,))
    answer.finish(END)
    last = answer.take()
    assert last is not None
    assert (last["output_ids"].shape, last["sequence_length"].tolist()) == ((1, 1, 0), [[0]])


def test_token_answer_waits_and_begins_with_the_prompt() -> None:
    answer = TokenAnswer(PLACE, WHOLE, (7, 8))
    answer.push(tokens(1))
    assert answer.take() is None
    answer.finish(END)
    last = answer.take()
    assert last is not None
    assert last["output_ids"].tolist() == [[[7, 8, 1]]]
    assert last["output_log_probs"].tolist() == [[[-1.0]]], "of the generated tokens"


def text_answer(stop_words: list[str], streaming: bool = True) -> TextAnswer:
    results = Results(PLACE, STREAMED if streaming else WHOLE, 3)
    return TextAnswer(
        results, TextStream(), streaming=streaming, prompt_text="", stop_words=stop_words, stop_ids=(200002,)
    )


@pytest.mark.parametrize("seed", range(20))
def test_text_is_the_same_for_any_chunking(seed: int) -> None:
    generator = random.Random(seed)
    text = "Zoë 👩‍👩‍👧 said: 你好! Then she STOPPED and left."
    ids = [*Tokenizer.load().encode(text), 200002]
    stop_words = generator.choice([[], ["STOPPED"], ["ED an", "never"], ["!"]])
    answer = text_answer(stop_words)
    pieces, place, complete = [], 0, False
    while place < len(ids) and not complete:
        size = generator.randint(1, 4)
        complete = answer.push(Tokens("r", 0, tuple(ids[place : place + size])))
        place += size
        taken = answer.take()
        pieces.append(taken["text_output"][0].decode() if taken else "")
    answer.finish(Finished("r", 0, "stop", Usage(3, 5)))
    last = answer.take()
    assert last is not None
    whole = "".join(pieces) + last["text_output"][0].decode()
    cut = min((text.find(word) for word in stop_words if word in text), default=len(text))
    assert whole == text[:cut]
    assert last["finish_reason"].tolist() == [b"stop"]


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_counts_and_log_probabilities_end_where_the_stop_word_does(size: int) -> None:
    ids = Tokenizer.load().encode("Once upon a time there was a fox")
    want = replace(WHOLE, log_probs=True, num_output_tokens=True)
    answer = TextAnswer(
        Results(PLACE, want, 3), TextStream(), streaming=False, prompt_text="", stop_words=["a time"], stop_ids=()
    )
    for place in range(0, len(ids), size):
        part = tuple(ids[place : place + size])
        if answer.push(Tokens("r", 0, part, tuple(TokenLogprobs(-0.5) for _ in part))):
            break
    answer.finish(Finished("r", 0, "cancelled", Usage(3, 8)))
    last = answer.take()
    assert last is not None
    assert last["text_output"][0] == b"Once upon "
    assert last["output_log_probs"].tolist() == [[[-0.5] * 4]]
    assert (last["cum_log_probs"].item(), last["num_output_tokens"].item()) == (-2.0, 4)


def moved(before: dict[str, Any] | None, after: dict[str, Any]) -> Histogram:
    """A page's histogram that has taken the observations on top of `before`."""
    page = Histogram(tuple(bound for bound, _ in after["buckets"]))
    for state in ([(None, before)] if before else []) + [(before, after)]:
        for value in observations(*state):
            page.add(value)
    return page


def test_observations_move_a_histogram_exactly() -> None:
    generator = random.Random(3)
    source = Histogram((10.0, 50.0, 100.0, 500.0, 1000.0))
    for _ in range(40):
        source.add(generator.choice([0, 1, 10, 11, 50, 99, 100, 700, 5000]))
    before = source.as_dict()
    for _ in range(60):
        source.add(generator.choice([3, 10, 49, 51, 1000, 1001, 90000]))
    after = source.as_dict()
    page = moved(before, after).as_dict()
    assert page["buckets"] == after["buckets"]
    assert (page["count"], page["sum"]) == (after["count"], pytest.approx(after["sum"]))


def test_observations_begin_anew_with_a_new_engine() -> None:
    old, new = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for _ in range(5):
        old.add(0.5)
    new.add(1.5)
    values = observations(old.as_dict(), new.as_dict())
    assert values == [pytest.approx(1.5)]


def test_readings_cover_the_table() -> None:
    levels = {
        "requests": dict.fromkeys(("active", "max", "scheduled", "context", "waiting"), 1),
        "kv": dict.fromkeys(
            ("full", "window"), dict.fromkeys(("max", "free", "used", "tokens_per", "reused", "fraction"), 2)
        ),
        "inflight": dict.fromkeys(("total_context_tokens", "generation_requests", "paused_requests"), 3),
    }
    stats = {**levels, **Statistics().as_dict()}
    expected = {
        (family.name, value)
        for family in METRICS.values()
        if family.kind != "histogram"
        for value in family.values or ("",)
    }
    assert set(readings(stats)) == expected
    assert set(HISTOGRAM_SOURCES) == {family.name for family in METRICS.values() if family.kind == "histogram"}


def test_a_prompt_that_waits_is_neither_cached_nor_computed() -> None:
    """A counter that fell when a waiting prompt turned out to be cached would look like a new engine's."""
    statistics, seen = Statistics(), []
    levels = {"requests": {}, "kv": {"full": {}, "window": dict.fromkeys(("max", "free", "used"), 0)}, "inflight": {}}
    for begin in (False, True, False, True):
        if begin:
            statistics.scheduled(0.1, 50, 48)
        else:
            statistics.submitted(50)
        counted = readings({**levels, **statistics.as_dict()})
        seen.append(tuple(counted["gptoss_trt_prefix_cache_tokens", source] for source in ("cached", "computed")))
    assert seen == [(0, 0), (48, 2), (48, 2), (96, 4)]


def test_page_buckets_are_bounds_of_the_engine_s_histograms() -> None:
    histograms = Statistics().as_dict()["histograms"]
    for family, source in HISTOGRAM_SOURCES.items():
        bounds = {bound for bound, _ in histograms[source]["buckets"]}
        assert set(METRICS[family].buckets) <= bounds, family
