"""The Triton kernels that draw tokens against the CPU op, in the interpreter."""

from __future__ import annotations

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.triton_kernels import feed as triton_feed
from gptoss_trt.triton_kernels import sample as triton_sample

pytestmark = pytest.mark.interpret
NAN, INF = float("nan"), float("inf")


def sampled(logits: torch.Tensor, temperature: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the kernels and of the CPU; what is fed must follow from them."""
    results = []
    for function in (triton_sample.sample, torch.ops.gptoss_trt.sample):
        rows = len(logits)
        tokens, fed = torch.full((2, rows + 3), 77, dtype=torch.int32), torch.full((rows,), 77, dtype=torch.int32)
        function(logits, temperature, share, torch.tensor([1], dtype=torch.int32), tokens, fed)
        assert torch.equal(fed, tokens[1, :rows].clamp(min=0))
        assert bool((tokens[0] == 77).all()) and bool((tokens[1, rows:] == 77).all())
        function(logits, temperature, share, None, tokens, fed)
        assert torch.equal(tokens[0], tokens[1])
        results.append(tokens[1, :rows])
    return results[0], results[1]


def assert_share(logits: torch.Tensor, temperature: float, share: float, token: int) -> None:
    """The token's part of the cumulated softmax holds the share, within rounding, and it can be drawn."""
    weights = (logits.double() / temperature).softmax(-1)
    running = weights.cumsum(-1)
    before = float(running[token - 1]) if token else 0.0
    assert before - 1e-5 <= share <= float(running[token]) + 1e-5
    assert float(weights[token]) > 0  # the sums themselves may be equal: they end at 1


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 5000, 20_000])
def test_tokens_are_the_cpu_s_but_for_rounding(vocabulary: int) -> None:
    rows = 24
    logits = torch.randn(rows, vocabulary) * 3
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(rows // 4)
    share = torch.rand(rows)
    share[:4], share[4:8] = 0.0, 1 - 2**-24
    got, want = sampled(logits, temperature, share)
    assert torch.equal(got[::4], want[::4])
    assert int((got != want)[8:].sum()) <= 2
    for row in range(rows):
        if temperature[row]:
            assert_share(logits[row], float(temperature[row]), float(share[row]), int(got[row]))


def test_the_lowest_of_equals_is_the_best() -> None:
    logits = torch.zeros(3, 4000)
    logits[1, [1023, 1024, 3999]] = 5.0
    logits[2, [3000, 2500]] = 5.0
    got, want = sampled(logits, torch.zeros(3), torch.full((3,), 0.9))
    assert got.tolist() == want.tolist() == [0, 1023, 2500]


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.randn(7, 3000)
    logits[1, 5] = NAN
    logits[2, 2999] = INF
    logits[3, :2900] = -INF  # masked columns are no fault
    logits[4] = -INF
    logits[5, 1030], logits[5, 7] = NAN, INF
    logits[6] = NAN
    for temperature in (0.0, 1.0):
        got, want = sampled(logits, torch.full((7,), temperature), torch.full((7,), 0.4))
        assert got.tolist()[1:3] == want.tolist()[1:3] == [-1, -1]
        assert got.tolist()[4:] == want.tolist()[4:] == [-1, -1, -1]
        assert got[0] == want[0] and got[3] == want[3] >= 2900


def test_columns_of_no_weight_are_never_drawn() -> None:
    """Masked columns before, between and behind those that count, at both ends of the share."""
    logits = torch.full((64, 4500), -INF)
    logits[:, 1500:3500:7] = torch.randn(1, len(range(1500, 3500, 7)))
    share = torch.linspace(0, 1 - 2**-24, 64)
    got, _ = sampled(logits, torch.ones(64), share)
    assert bool(torch.isfinite(logits.gather(1, got.long()[:, None])).all())
    assert int(got[0]) == 1500 and int(got.diff().min()) >= 0


@pytest.mark.parametrize(("rows", "words"), [(1, 96), (5, 64), (300, 5000)])
def test_tokens_are_fed_from_the_host_or_from_the_step_before(rows: int, words: int) -> None:
    at = -(-rows // 32) * 32
    host = torch.randint(0, 1000, (words,), dtype=torch.int32)
    host[at : at + rows] = torch.randint(-1, 256, (rows,), dtype=torch.int32)
    drawn = torch.randint(2000, 3000, (256,), dtype=torch.int32)
    results = []
    for function in (triton_feed.feed, torch.ops.gptoss_trt.feed):
        memory, ids = torch.zeros(words, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        function(host, drawn, at, memory, ids)
        assert torch.equal(memory, host)
        results.append(ids.tolist())
    want = [int(drawn[s]) if s >= 0 else int(host[r]) for r, s in enumerate(host[at : at + rows].tolist())]
    assert results == [want, want]


def test_no_rows() -> None:
    got, want = sampled(torch.empty(0, 300), torch.empty(0), torch.empty(0))
    assert got.tolist() == want.tolist() == []
