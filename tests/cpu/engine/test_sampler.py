"""Choosing tokens: distributions, penalties, masks, log-probabilities, and independence of the batch."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch

from gptoss_trt.runtime.engine.messages import IDS, Guide, Sampling, Submit
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler, uniform
from gptoss_trt.runtime.engine.sequence import Request, Sequence

VOCABULARY = 1000


def sequence(
    prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), seed: int = 0, index: int = 0, **fields: Any
) -> Sequence:
    submit = Submit("r", prompt, 100, **fields)
    request = Request((1, "r"), submit, 0, 0, seed, b"")
    return Sequence(request, index, array(IDS, (*prompt, *output)))


def logits(*rows: dict[int, float], fill: float = -100.0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    out = torch.full((len(rows), vocabulary), fill)
    for row, values in zip(out, rows, strict=True):
        for token, value in values.items():
            row[token] = value
    return out


def choose(row: torch.Tensor, **fields: Any) -> int | None:
    return Sampler().sample(row.clone().reshape(1, -1), [sequence(**fields)])[0].token


def frequencies(row: torch.Tensor, sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    sequences = [sequence(seed=seed, sampling=sampling) for seed in range(draws)]
    outcomes = Sampler().sample(row.expand(draws, -1).clone(), sequences)
    counts: dict[int, float] = {}
    for outcome in outcomes:
        assert outcome.token is not None
        counts[outcome.token] = counts.get(outcome.token, 0.0) + 1 / draws
    return counts


ROW = {5: 3.0, 6: 2.0, 7: 1.0, 8: 0.0}


def softmax(values: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    powers = {token: math.exp(value / temperature) for token, value in values.items()}
    return {token: power / sum(powers.values()) for token, power in powers.items()}


@pytest.mark.parametrize(
    ("sampling", "kept", "temperature"),
    [
        (Sampling(), (5, 6, 7, 8), 1.0),
        (Sampling(temperature=2.0), (5, 6, 7, 8), 2.0),
        (Sampling(top_k=2), (5, 6), 1.0),
        (Sampling(top_k=3, temperature=0.5), (5, 6, 7), 0.5),
        (Sampling(top_p=0.85), (5, 6), 1.0),  # 0.64 + 0.24 reach it
        (Sampling(top_p=0.6), (5,), 1.0),
        (Sampling(top_k=3, top_p=0.9), (5, 6), 1.0),  # of the best three: 0.67, 0.24, 0.09
        (Sampling(min_p=0.2), (5, 6), 1.0),  # e^-1 = 0.37 of the best stays, e^-2 = 0.14 goes
        (Sampling(top_p=0.99, min_p=0.1), (5, 6, 7), 1.0),
        (Sampling(top_k=1), (5,), 1.0),
        (Sampling(temperature=0.0), (5,), 1.0),
        (Sampling(top_p=0.0), (5,), 1.0),
    ],
)
def test_the_distribution_is_the_filters(sampling: Sampling, kept: tuple[int, ...], temperature: float) -> None:
    seen = frequencies(logits(ROW), sampling)
    expected = softmax({token: ROW[token] for token in kept}, temperature)
    assert set(seen) <= set(expected)
    for token, probability in expected.items():
        deviation = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(seen.get(token, 0.0) - probability) < 5 * deviation + 1e-6


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    row = torch.linspace(1.0, 0.0, VOCABULARY)
    seen = frequencies(row, Sampling(top_p=0.8))
    probabilities = row.softmax(0)
    width = int((probabilities.cumsum(0) < 0.8).sum()) + 1
    assert width > 256 and max(seen) < width and max(seen) > width * 0.95


def test_flat_logits_draw_from_the_whole_vocabulary() -> None:
    seen = frequencies(torch.zeros(VOCABULARY), Sampling(), draws=8000)
    assert len(seen) > 0.98 * VOCABULARY


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((24, 5 * VOCABULARY), generator=generator) * 3
    kinds = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(top_k=5),
        Sampling(top_k=400, top_p=0.5),
        Sampling(top_p=0.9),
        Sampling(min_p=0.05),
        Sampling(temperature=3.0, top_p=0.99),
        Sampling(repetition_penalty=1.3, presence_penalty=0.5, top_k=40),
    ]
    sequences = [
        sequence(prompt=(row,), output=(row, 3), seed=row, sampling=kinds[row % len(kinds)]) for row in range(len(rows))
    ]
    together = [outcome.token for outcome in Sampler().sample(rows.clone(), sequences)]
    alone = [Sampler().sample(rows[i : i + 1].clone(), [sequences[i]])[0].token for i in range(len(rows))]
    backwards = [outcome.token for outcome in Sampler().sample(rows.flip(0).clone(), sequences[::-1])]
    assert together == alone == backwards[::-1]


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 512, 1000])
def test_every_column_can_be_drawn_and_no_other(vocabulary: int) -> None:
    for token in {0, vocabulary // 2, vocabulary - 1}:
        seen = frequencies(logits({token: 0.0}, fill=-200.0, vocabulary=vocabulary)[0], Sampling(), draws=50)
        assert seen == {token: pytest.approx(1.0)}


def test_a_draw_over_many_blocks_follows_the_weights() -> None:
    row = logits({3: 1.0, 700: 1.0, 701: 0.0, 4999: 2.0}, vocabulary=5000)[0]
    seen, expected = frequencies(row, Sampling()), softmax({3: 1.0, 700: 1.0, 701: 0.0, 4999: 2.0})
    assert all(abs(seen[token] - expected[token]) < 0.04 for token in expected) and len(seen) == 4


def test_random_numbers_differ_by_seed_sequence_and_position() -> None:
    numbers = {uniform(seed, index, position) for seed in range(10) for index in range(10) for position in range(10)}
    assert len(numbers) == 1000 and all(0 <= number < 1 for number in numbers)
    assert uniform(2**64 - 1, 0, 0) != uniform(0, 0, 0)


def test_penalties_and_bias_change_the_logits_as_defined() -> None:
    row = {5: 2.0, 6: -2.0, 7: 1.9, 8: 1.0}
    assert choose(logits(row), sampling=Sampling(temperature=0.0)) == 5
    assert choose(logits(row), prompt=(5,), sampling=Sampling(temperature=0.0, repetition_penalty=1.1)) == 7
    repetition = Sampling(temperature=0.0, repetition_penalty=1.1)
    assert choose(logits({6: -2.0, 7: -2.1}), prompt=(6,), sampling=repetition) == 7
    once, twice = (5,), (5, 5)
    presence = Sampling(temperature=0.0, presence_penalty=0.2)
    frequency = Sampling(temperature=0.0, frequency_penalty=0.06)
    assert choose(logits(row), output=once, sampling=presence) == 7
    assert choose(logits(row), prompt=(1, 5), sampling=presence) == 5  # over the output only
    assert choose(logits(row), output=once, sampling=frequency) == 5
    assert choose(logits(row), output=twice, sampling=frequency) == 7
    assert choose(logits(row), sampling=Sampling(temperature=0.0), logit_bias=((8, 0.6), (8, 0.6))) == 8


def test_penalties_follow_the_output_from_step_to_step() -> None:
    sampler, one = Sampler(), sequence(sampling=Sampling(temperature=0.0, presence_penalty=5.0))
    chosen = []
    for _ in range(4):
        token = sampler.sample(logits(ROW), [one])[0].token
        assert token is not None
        chosen.append(token)
        one.tokens.append(token)
    assert chosen == [5, 6, 7, 8]


def test_min_tokens_and_bad_sequences_mask() -> None:
    greedy = Sampling(temperature=0.0)
    assert choose(logits(ROW), sampling=greedy, stop_ids=(5, 6), min_tokens=1) == 7
    assert choose(logits(ROW), output=(9,), sampling=greedy, stop_ids=(5,), min_tokens=1) == 5
    assert choose(logits(ROW), sampling=greedy, bad_sequences=((5,),)) == 6
    assert choose(logits(ROW), output=(9,), sampling=greedy, bad_sequences=((9, 5), (8, 6))) == 6
    assert choose(logits(ROW), output=(8,), sampling=greedy, bad_sequences=((9, 5),)) == 5


def test_bad_rows_fail_alone() -> None:
    rows = logits(ROW, ROW, ROW, ROW)
    rows[1, 77] = math.nan
    rows[2, 3] = math.inf
    sequences = [sequence(sampling=Sampling(temperature=0.0)) for _ in range(4)]
    sequences[3] = sequence(bad_sequences=tuple((token,) for token in range(VOCABULARY)))
    outcomes = Sampler().sample(rows, sequences)
    assert [outcome.token for outcome in outcomes] == [5, None, None, None]
    assert [outcome.failure for outcome in outcomes] == [None, NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED]
    assert [outcome.code for outcome in outcomes[1:]] == ["INTERNAL", "INTERNAL", "INVALID_ARGUMENT"]


def test_logprobs_are_the_models_own() -> None:
    penalised = sequence(prompt=(5,), logprobs=3, sampling=Sampling(temperature=0.0, repetition_penalty=9.0))
    outcome = Sampler().sample(logits(ROW), [penalised])[0]
    expected = logits(ROW)[0].log_softmax(0)
    assert outcome.token == 6 and outcome.logprobs is not None
    assert outcome.logprobs.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    assert [token for token, _ in outcome.logprobs.top] == [5, 6, 7]
    assert [value for _, value in outcome.logprobs.top] == pytest.approx(expected[5:8].tolist(), abs=1e-6)
    none = Sampler().sample(logits(ROW), [sequence(logprobs=0, sampling=Sampling(temperature=0.0))])[0].logprobs
    assert none is not None and none.top == ()


class Alternating:
    """A matcher that allows the ids 7 and 8 in turn."""

    failure = ""

    def __init__(self) -> None:
        self.turn = 7

    def mask(self, row: torch.Tensor) -> None:
        allowed = row[self.turn].clone()
        row.fill_(-math.inf)
        row[self.turn] = allowed

    def accept(self, token: int) -> None:
        assert token == self.turn
        self.turn = 15 - self.turn


def test_a_guide_masks_and_follows_each_sequence() -> None:
    sampler = Sampler(lambda _: Alternating())
    both = [sequence(guides=(Guide("regex", "x"),), seed=seed) for seed in range(2)]
    for expected in (7, 8, 7):
        for one in both if expected != 8 else both[:1]:
            assert sampler.sample(logits(ROW), [one])[0].token == (expected if one is both[0] else one_turn(one))
            one.tokens.append(expected)


def one_turn(one: Sequence) -> int:
    return 7 if one.output_tokens % 2 == 0 else 8
