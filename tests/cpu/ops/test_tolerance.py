"""The comparison itself: what each class lets through, and that one bad row among many is seen."""

from __future__ import annotations

import pytest
import torch

from gptoss_trt.reference.tolerance import Exact, Row, Ulp, assert_close, compare_tokens, ulp, ulp_distance, worst


def test_ulp_distance_counts_representable_numbers() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 2.0**-133], dtype=torch.bfloat16)
    y = torch.tensor([1.0078125, -1.0078125, -0.0, -(2.0**-133)], dtype=torch.bfloat16)
    assert ulp_distance(x, y).tolist() == [1, 1, 0, 2]
    assert ulp(x[:2]).tolist() == [2**-7, 2**-7]
    with pytest.raises(TypeError, match="no ulp distance"):
        ulp_distance(x, y.float())


def test_exact_sees_the_sign_of_zero_and_takes_nan() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert worst(Exact(), nan, nan.clone()) == 0
    assert worst(Exact(), nan, torch.tensor([float("nan"), -0.0])) > 1


def test_one_bad_row_of_4096_is_named() -> None:
    expected = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    actual = expected.clone()
    assert_close("attention_decode", actual, expected)
    actual[1234] = 0
    with pytest.raises(AssertionError, match=r"row 1234 of 4096 .* 1 rows are outside"):
        assert_close("attention_decode", actual, expected)


def test_row_uses_the_bound_or_one_ulp() -> None:
    expected = torch.tensor([[1.0, 100.0]])
    assert worst(Row(1e-3), expected + torch.tensor([[0.09, 0.0]]), expected) < 1
    assert worst(Row(1e-3), expected + torch.tensor([[0.09, 0.0]]), expected, torch.tensor([[1.0, 100.0]])) > 1
    coarse = expected.to(torch.bfloat16)
    assert worst(Row(0.0), coarse + torch.tensor([[2**-7, 0.0]], dtype=torch.bfloat16), coarse) == 1
    assert worst(Row(1.0), torch.tensor([[float("nan"), 1.0]]), expected) == float("inf")
    assert worst(Ulp(2), coarse, coarse) == 0


def test_tokens_may_differ_only_within_the_margin() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.999], [3.0, 0.0, 1.0]])
    assert compare_tokens([1, 0], [1, 0], logits, 1e-2) is None
    assert compare_tokens([2, 1], [1, 0], logits, 1e-2) is None  # behind a tie anything may follow
    message = compare_tokens([1, 2], [1, 0], logits, 1e-2)
    assert message is not None
    assert message.startswith("token 1 is 2, not 0: its logit is 2 lower")
