"""The kernels that draw tokens at the vocabulary's full size, against the CPU op."""

from __future__ import annotations

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt

VOCABULARY = 201_088


def sampled(logits: torch.Tensor, temperature: torch.Tensor, share: torch.Tensor, device: str) -> torch.Tensor:
    tokens, fed = (torch.full((len(logits),), 77, dtype=torch.int32, device=device) for _ in range(2))
    torch.ops.gptoss_trt.sample(logits.to(device), temperature.to(device), share.to(device), tokens, fed)
    assert torch.equal(fed, tokens.clamp(min=0))
    return tokens.cpu()


@pytest.mark.parametrize("rows", [1, 3, 128])
def test_tokens_are_the_cpu_s_but_for_rounding(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, VOCABULARY, generator=generator) * 4
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(rows)[:rows].contiguous()
    share = torch.rand(rows, generator=generator)
    if rows > 4:
        logits[4, [9000, 1024, 1023]] = 90.0  # the lowest of equals
        logits[5, 77], logits[6, 201_087], logits[7] = float("nan"), float("inf"), float("-inf")
    got, want = (sampled(logits, temperature, share, device) for device in ("cuda", "cpu"))
    assert torch.equal(got[::4], want[::4])
    assert torch.equal(got < 0, want < 0)
    for row in (got != want).nonzero()[:, 0].tolist():
        running = (logits[row].double() / float(temperature[row])).softmax(-1).cumsum(-1)
        token = int(got[row])
        before = float(running[token - 1]) if token else 0.0
        assert before - 1e-5 <= float(share[row]) <= float(running[token]) + 1e-5


def test_draws_repeat_and_do_not_depend_on_company() -> None:
    logits = torch.randn(64, VOCABULARY, device="cuda") * 3
    temperature, share = torch.ones(64, device="cuda"), torch.rand(64, device="cuda")
    together = sampled(logits, temperature, share, "cuda")
    for row in (0, 1, 63):
        part = slice(row, row + 1)
        assert sampled(logits[part], temperature[part], share[part], "cuda").item() == together[row]
    for _ in range(20):
        assert torch.equal(sampled(logits, temperature, share, "cuda"), together)
