"""Speculation changes how fast tokens come and nothing else: the engine over a tiny model that reads everything back
from its paged KV cache, with good, bad and no drafts."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from habit_bench import OPTIONS, VOCABULARY, Bench, HabitModel, Knowing

from gptoss_trt.runtime.engine.messages import Error, Finished, Guide, Sampling, Submit
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.model import GptOssModel, GraphedModel


def free_drafts(bench: Bench) -> None:
    """Drafts as if a pass of the draft model, which is as large as the target here, took no time."""
    speculator = bench.core._scheduler._speculator
    assert speculator is not None and speculator.pass_cost == pytest.approx(1.0)
    speculator.pass_cost = 0.0


def loads() -> list[Submit]:
    """Requests of every kind, each with a seed."""
    rnd = random.Random(11)
    greedy, usual = Sampling(temperature=0.0, seed=1), Sampling(temperature=0.8, seed=5)
    kinds: list[dict[str, Any]] = [
        {"sampling": greedy},
        {"sampling": usual},
        {"sampling": replace(usual, top_p=0.8)},
        {"sampling": replace(usual, top_k=3, temperature=1.3)},
        {"sampling": replace(usual, min_p=0.05)},
        {"sampling": replace(usual, repetition_penalty=1.3)},
        {"sampling": replace(greedy, presence_penalty=1.5, frequency_penalty=0.4)},
        {"sampling": usual, "n": 3},
        {"sampling": greedy, "stop_ids": (3, 5, 8, 13)},
        {"sampling": usual, "stop_ids": (3, 5, 8, 13), "min_tokens": 9},
        {"sampling": usual, "stop_sequences": ((2, 9), (4,), (11,))},
        {"sampling": greedy, "bad_sequences": ((7,), (6, 20)), "logit_bias": ((4, 3.0),)},
        {"sampling": greedy, "logprobs": 2},
        {"sampling": usual, "logprobs": 0, "prompt_logprobs": 1},
        {"sampling": usual, "guides": (Guide("regex", "even"),)},
        {"sampling": greedy, "max_tokens": 1},
        {"sampling": greedy, "max_tokens": 2},
    ]
    submits = []
    for number, kind in enumerate(kinds):
        stem = [rnd.randrange(VOCABULARY) for _ in range(6)]
        prompt = tuple((stem * 6)[: rnd.randrange(2, 30)])
        submits.append(Submit(f"r{number}", prompt, **{"max_tokens": 30, **kind}))
    return submits


def plain(submits: list[Submit], **fields: Any) -> Bench:
    bench = Bench(**fields)
    for submit in submits:
        bench.submit(submit)
    return bench.run()


@pytest.fixture(scope="module")
def expected() -> Bench:
    return plain(loads())


def assert_same(bench: Bench, expected: Bench) -> None:
    assert bench.ids == expected.ids
    assert bench.ends.keys() == expected.ends.keys()
    for key, end in bench.ends.items():
        other = expected.ends[key]
        assert isinstance(end, Finished) and isinstance(other, Finished)
        assert (end.reason, end.usage.completion_tokens) == (other.reason, other.usage.completion_tokens)
        assert end.prompt_logprobs == other.prompt_logprobs
    for key, entries in expected.logprobs.items():
        got = bench.logprobs[key]
        assert [[token for token, _ in e.top] for e in got] == [[token for token, _ in e.top] for e in entries]
        assert [e.logprob for e in got] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    assert bench.core.stats()["kv"]["full"]["used"] == 0


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_every_kind_of_request_gets_the_tokens_it_gets_without_drafts(
    expected: Bench, graphed: bool, wrong: float
) -> None:
    bench = Bench(graphed=graphed).speculate(Knowing(expected.ids, wrong))
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert_same(bench, expected)
    counters = bench.counters()
    drafted, accepted = counters["draft_tokens"], counters["accepted_draft_tokens"]
    assert drafted > 50 and counters["generated_tokens"] == sum(map(len, expected.ids.values()))
    assert accepted == drafted if wrong == 0.0 else accepted < 0.95 * drafted
    assert sum(end.usage.draft_tokens for end in bench.ends.values() if isinstance(end, Finished)) == drafted
    if wrong == 0.0:
        assert len(bench.model.steps) < 0.6 * len(expected.model.steps)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_ngrams_give_the_same_tokens_in_fewer_steps(expected: Bench, graphed: bool) -> None:
    bench = Bench(replace(OPTIONS, speculation="ngram"), graphed=graphed)
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert_same(bench, expected)
    assert bench.counters()["accepted_draft_tokens"] > 10


def test_pauses_and_tight_pools_change_nothing(expected: Bench) -> None:
    bench = Bench(kv_bytes=2_600).speculate(Knowing(expected.ids, 0.3))
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert bench.counters()["preemptions"] > 0 and bench.counters()["accepted_draft_tokens"] > 20
    assert_same(bench, expected)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_of_its_own_cache(expected: Bench, same: bool, graphed: bool) -> None:
    draft = HabitModel() if same else HabitModel(seed=99)
    options = replace(OPTIONS, speculation="draft", draft_engine="unused")
    given = GraphedModel(cast(GptOssModel, draft)) if graphed else draft
    bench = Bench(options, kv_bytes=40_000, draft=given, graphed=graphed)
    free_drafts(bench)
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert_same(bench, expected)
    counters = bench.counters()
    if same:  # it draws with the target's random numbers: wrong only where penalties, masks or guides changed a token
        assert counters["accepted_draft_tokens"] > 0.6 * counters["draft_tokens"] > 50
    passes = Counter(sequences == tokens for sequences, tokens in draft.steps)
    assert not (graphed and same) or passes[True] > 4 * passes[False], (
        "catching up takes steps of several tokens a sequence"
    )
    drafter = bench.core._scheduler._speculator._drafter  # type: ignore[union-attr]
    drafter._forget_ended()  # type: ignore[attr-defined]
    cache = drafter._cache  # type: ignore[attr-defined]
    assert cache.full.used == cache.window.used == 0


def test_a_draft_model_with_too_small_a_cache_only_drafts_less(expected: Bench) -> None:
    draft = HabitModel()
    bench = Bench(replace(OPTIONS, speculation="draft", draft_engine="unused"), kv_bytes=5_200, draft=draft)
    free_drafts(bench)
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert_same(bench, expected)


def test_a_draft_model_that_fails_is_done_without(expected: Bench) -> None:
    draft = HabitModel()
    draft.failing = set(range(0, VOCABULARY, 3))
    bench = Bench(replace(OPTIONS, speculation="draft", draft_engine="unused"), kv_bytes=40_000, draft=draft)
    free_drafts(bench)
    for submit in loads():
        bench.submit(submit)
    bench.run()
    assert_same(bench, expected)


def test_a_draft_that_the_model_fails_on_fails_nobody_else(expected: Bench) -> None:
    """NaN behind an accepted draft is that of the sequence; behind a wrong one nobody looks at it."""
    submits = [submit for submit in loads() if submit.request_id in ("r0", "r16")]
    answer, other = expected.ids["r0", 0], expected.ids["r16", 0]
    harmless = {token for submit in submits for token in submit.token_ids} | set(other)
    bench = Bench().speculate(Knowing({("r0", 0): answer}, 0.0))
    bench.model.failing = {next(token for token in answer if token not in harmless)}
    for submit in submits:
        bench.submit(submit)
    bench.run()
    failed = bench.ends["r0", None]
    assert isinstance(failed, Error) and "not finite" in failed.message
    assert bench.ids["r16", 0] == other
    wrong = Bench().speculate(Knowing({("r0", 0): [39 - t for t in answer]}, 0.0))
    wrong.model.failing = set(range(VOCABULARY)) - set(answer) - set(submits[0].token_ids)
    wrong.submit(submits[0])
    wrong.run()
    assert wrong.ids["r0", 0] == answer


def test_cancelling_between_steps_frees_everything(expected: Bench) -> None:
    bench = Bench().speculate(Knowing(expected.ids, 0.2))
    for submit in loads():
        bench.submit(submit)
    rnd = random.Random(2)
    while bench.core.has_work():
        bench.run(1)
        if rnd.random() < 0.3:
            bench.core.cancel((1, f"r{rnd.randrange(len(loads()))}"))
    assert bench.core.stats()["kv"]["full"]["used"] == bench.core.stats()["kv"]["window"]["used"] == 0
    for key, ids in bench.ids.items():
        assert ids == expected.ids[key][: len(ids)]


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_the_distribution_of_sampled_tokens_is_the_targets(graphed: bool) -> None:
    """Chi-square of the second and third token of 1,500 unseeded-like requests, drafts being always the most likely
    ones, against the model's own distribution behind the tokens before."""
    answers: dict[tuple[Any, ...], list[int]] = {}
    options = replace(OPTIONS, max_batch=64, step_tokens=512, max_queue=4096)

    class Likeliest:
        def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
            return [self._one(sequence.tokens, count) for sequence, count in wanted]

        @staticmethod
        def _one(tokens: list[int], count: int) -> list[int]:
            text = list(tokens)
            for _ in range(count):
                text.append(int(_logits(table, text).argmax()))
            return text[len(tokens) :]

    bench = Bench(options, kv_bytes=200_000, graphed=graphed)
    bench.model.table = bench.model.table / 4  # flat: every token is likely enough to be counted
    table = bench.model.table
    bench.speculate(Likeliest(), 2)
    for number in range(1500):
        bench.submit(Submit(f"r{number}", (1, 2), 3, sampling=Sampling(temperature=0.7, top_p=0.9, seed=number)))
    answers = bench.run().ids
    assert bench.counters()["accepted_draft_tokens"] > 100
    first = Counter(ids[0] for ids in answers.values()).most_common(1)[0][0]
    for text, place in (((1, 2), 0), ((1, 2, first), 1)):
        counted = Counter(ids[place] for ids in answers.values() if [*text[2:]] == ids[:place])
        probabilities = _nucleus((_logits(table, list(text)) / 0.7).softmax(-1), 0.9)
        assert_likely(counted, probabilities)


def _logits(table: torch.Tensor, seen: list[int]) -> torch.Tensor:
    number = 7
    for token in seen:
        number = (number * 31 + token + 1) % 997
    return table[(seen[-1] * 41 + seen[-2]) % 997] + 0.05 * table[number]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, ids = probabilities.sort(descending=True)
    kept = ordered.where(ordered.cumsum(0) - ordered < top_p, torch.tensor(0.0))
    return torch.zeros_like(probabilities).scatter(0, ids, kept / kept.sum())


def assert_likely(counted: Counter[int], probabilities: torch.Tensor) -> None:
    """Chi-square over tokens expected at least 5 times, the others together; limit: mean + 4 standard deviations."""
    total = sum(counted.values())
    assert all(probabilities[token] > 0 for token in counted)
    cells, rest = [], [0.0, 0.0]
    for token, probability in enumerate(probabilities.tolist()):
        cell = (counted[token], probability * total)
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
    cells += [(rest[0], rest[1])] if rest[1] > 1 else []  # type: ignore[list-item]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert freedom >= 3 and statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)
