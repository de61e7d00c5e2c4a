"""Where drafts come from: repeated text, and how many tokens are tried."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.messages import IDS, Submit
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.length import PRIOR, Acceptance, StepCost, draft_lengths
from gptoss_trt.runtime.engine.speculation.ngram import (
    CANDIDATES,
    LONGEST_MATCH,
    SHORTEST_MATCH,
    NgramDrafter,
    NgramIndex,
)
from gptoss_trt.runtime.engine.speculation.speculator import CPU_COST, CUDA_COST, Speculator
from gptoss_trt.runtime.launch.serve_cli import parse_engine_options

FREE = StepCost(((1, 1.0), (1000, 1.0)))
DEAR = StepCost(((1, 1.0), (1000, 1000.0)))


def sequence(tokens: list[int], *, prompt: int = 1, max_tokens: int = 1000) -> Sequence:
    submit = Submit("r", tuple(tokens[:prompt]), max_tokens)
    return Sequence(Request((0, "r"), submit, 0, 0, 0, b""), 0, array(IDS, tokens))


def drafted(tokens: list[int], count: int) -> list[int]:
    return NgramDrafter().draft([(sequence(tokens), count)])[0]


def slow_match(tokens: list[int]) -> int:
    """The end of the longest match of the list's end, looked for everywhere."""
    best, longest = 0, SHORTEST_MATCH - 1
    for end in range(len(tokens) - 1, SHORTEST_MATCH - 1, -1):
        length = 0
        while length < min(end, LONGEST_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > longest:
            best, longest = end, length
    return best


def test_what_followed_last_time_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert drafted([*text, 50, 51, 3, 4, 5], 3) == [6, 7, 8]
    assert drafted([*text, 50, 51, 4, 5], 3) == []  # two tokens are no match
    assert drafted([*text, 50, 51], 3) == []
    assert drafted([1, 2], 3) == [] and drafted([1], 3) == []


def test_the_longest_match_wins_and_the_newest_of_equals() -> None:
    assert drafted([9, 1, 2, 3, 70, 8, 1, 2, 3, 80, 9, 1, 2, 3], 1) == [70]
    assert drafted([9, 1, 2, 3, 70, 9, 1, 2, 3, 80, 9, 1, 2, 3], 1) == [80]


def test_a_match_that_runs_into_the_end_goes_on_as_a_repetition() -> None:
    assert drafted([5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafted([7, 7, 7, 7], 4) == [7, 7, 7, 7]


def test_the_index_finds_what_a_slow_search_finds() -> None:
    rnd = random.Random(4)
    for _ in range(40):
        tokens: list[int] = []
        index = NgramIndex()
        for _ in range(60):
            tokens.append(rnd.randrange(3))
            index.extend(tokens)
            assert index.indexed == (len(tokens) if len(tokens) >= SHORTEST_MATCH else 0)
            found, true = index.match(tokens), slow_match(tokens)
            if tokens.count(tokens[-1]) <= CANDIDATES:  # else older places may be left out
                assert found == true


def test_a_long_prompt_is_indexed_in_bounded_parts() -> None:
    tokens = [*range(1000), 5, 6, 7]
    index = NgramIndex()
    index.extend(tokens, 300)
    assert index.indexed == 300 and index.match(tokens) == 8
    index.extend(tokens, 300)
    assert index.indexed == 600
    index.extend(tokens, 10_000)
    assert index.indexed == len(tokens) and index.match(tokens) == 8


def test_costs_lie_on_lines_between_points() -> None:
    cost = StepCost(((1, 1.0), (5, 2.0), (9, 6.0)))
    assert [cost(rows) for rows in (1, 3, 5, 6, 9)] == [1.0, 1.5, 2.0, 3.0, 6.0]
    assert cost(10) == float("inf") and cost.most_rows == 9


@pytest.mark.parametrize("cost", [CPU_COST, CUDA_COST])
def test_lengths_are_the_best_of_all_choices(cost: StepCost) -> None:
    rnd = random.Random(8)
    for _ in range(30):
        rates = [rnd.random() for _ in range(2)]
        limits = [rnd.randrange(-1, 5) for _ in range(2)]
        rows = rnd.choice((2, 5, 20))

        def speed(lengths: tuple[int, int], rates: list[float] = rates, rows: int = rows) -> float:
            tokens = sum(sum(rate**k for k in range(n + 1)) for rate, n in zip(rates, lengths, strict=True))
            return tokens / cost(rows + sum(lengths)) / (cost.drafting if sum(lengths) else 1.0)

        chosen = draft_lengths(rates, limits, rows, cost)
        choices = [(a, b) for a in range(max(0, limits[0]) + 1) for b in range(max(0, limits[1]) + 1)]
        assert speed((chosen[0], chosen[1])) == pytest.approx(max(map(speed, choices)))


def test_passes_of_a_drafter_are_counted() -> None:
    assert draft_lengths([0.9], [8], 1, FREE, 0.1)[0] > draft_lengths([0.9], [8], 1, FREE, 0.4)[0] > 0
    assert draft_lengths([0.9], [8], 1, FREE, 1.0) == [0]
    # A pass drafts for all sequences, so a bad one may ride on a good one's.
    assert draft_lengths([0.4], [1], 1, FREE, 0.5) == [0] and draft_lengths([0.4, 0.9], [1, 1], 2, FREE, 0.5) == [1, 1]


def test_large_batches_and_bad_drafts_get_none() -> None:
    assert draft_lengths([0.9], [8], 1, FREE) == [8]
    assert draft_lengths([0.9], [8], 1, DEAR) == [0]
    assert draft_lengths([0.02], [8], 1, CPU_COST) == [0]
    most = CUDA_COST.most_rows
    assert sum(draft_lengths([0.9] * most, [8] * most, most, CUDA_COST)) == 0
    assert sum(draft_lengths([0.9] * (most + 1), [8] * (most + 1), most + 1, CUDA_COST)) == 0
    assert draft_lengths([], [], 0, CPU_COST) == []


def test_acceptance_is_learned_and_failure_is_tried_again_ever_more_rarely() -> None:
    known = Acceptance()
    assert known.rate == pytest.approx(PRIOR[0] / PRIOR[1])
    for tokens in range(0, 100, 5):
        known.add(4, 4, tokens)
    assert known.rate > 0.95
    for tokens in range(100, 130):
        known.add(4, 0, tokens)
    assert known.rate < 0.1
    assert known.hope(131) == known.rate and known.hope(129 + 256) == pytest.approx(PRIOR[0] / PRIOR[1])


class Fixed:
    """Drafts the same token always; remembers how many were wanted."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def draft(self, wanted: object) -> list[list[int]]:
        self.wanted = [count for _, count in wanted]  # type: ignore[attr-defined]
        return [[7] * count for count in self.wanted]


def test_drafts_keep_to_max_tokens_and_to_the_budget() -> None:
    drafter = Fixed()
    speculator = Speculator(drafter, 6, FREE)
    near, last, far = (sequence([1, 2, 3], max_tokens=most) for most in (5, 3, 100))
    drafts = speculator.drafts([near, last, far], 3, 100)
    assert {k: len(v) for k, v in drafts.items()} == {near: 2, far: 6}
    drafts = speculator.drafts([near, last, far], 3, 5)
    assert {k: len(v) for k, v in drafts.items()} == {near: 2, far: 3}
    assert speculator.drafts([near, last, far], 3, 0) == {}
    with pytest.raises(ValueError, match="at least 1"):
        Speculator(drafter, 0, FREE)


def test_a_sequence_that_repeats_nothing_is_hardly_drafted_for() -> None:
    speculator, rows = Speculator(Fixed(), 6, CUDA_COST), 0
    alone = sequence([1, 2], max_tokens=2000)
    for _ in range(1000):
        draft = speculator.drafts([alone], 1, 100).get(alone, ())
        alone.tokens.append(1)
        if draft:
            speculator.learn(alone, len(draft), 0)
        rows += len(draft)
    assert alone.draft_tokens == rows and alone.accepted_draft_tokens == 0
    assert 0 < rows < 100


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculation": "ngrams"}, "did you mean ngram"),
        ({"speculation": "eagle"}, "allowed: none, ngram, draft, eagle3; did you mean eagle3"),
        ({"speculation": "eagle3"}, "'eagle3', which needs draft_engine=PATH"),
        ({"speculation": "draft"}, "needs draft_engine=PATH"),
        ({"speculation": "ngram", "draft_engine": "x"}, "only draft and eagle3 read one"),
        ({"draft_tokens": 3}, "draft_tokens is 3, but speculation is 'none'"),
        ({"speculation": "ngram", "draft_tokens": 33}, "0..32"),
    ],
)
def test_impossible_options_say_what_is_wrong(options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineLoadError, match=text):
        EngineOptions(**options)


def test_options_come_from_texts_and_the_draft_engine_is_an_absolute_path() -> None:
    options = parse_engine_options(["speculation=draft", "draft_engine=some/engine", "draft_tokens=3"])
    assert options.draft_engine == str(Path("some/engine").absolute()) and options.resolved("cpu").draft_tokens == 3
    assert EngineOptions(speculation="ngram").resolved("cuda").draft_tokens == 8
    assert EngineOptions().resolved("cpu").draft_tokens == 0
