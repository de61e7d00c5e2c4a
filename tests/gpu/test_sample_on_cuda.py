"""The kernels that draw tokens at the vocabulary's full size, against the CPU op."""

from __future__ import annotations

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt

VOCABULARY = 201_088


def sampled(logits: torch.Tensor, temperature: torch.Tensor, share: torch.Tensor, device: str) -> torch.Tensor:
    rows = len(logits)
    tokens = torch.full((2, rows), 77, dtype=torch.int32, pin_memory=device == "cuda")
    fed = torch.full((rows,), 77, dtype=torch.int32, device=device)
    turn = torch.ones(1, dtype=torch.int32, device=device)
    torch.ops.gptoss_trt.sample(logits.to(device), temperature.to(device), share.to(device), turn, tokens, fed)
    torch.cuda.synchronize()
    assert torch.equal(fed.cpu(), tokens[1].clamp(min=0)) and bool((tokens[0] == 77).all())
    return tokens[1].clone()


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


@pytest.mark.parametrize(("rows", "words"), [(1, 320), (128, 6400), (256, 300_000)])
def test_inputs_come_from_pinned_memory(rows: int, words: int) -> None:
    at = 256
    memory, ids = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (words, rows))
    for _ in range(20):
        host = torch.randint(0, 1000, (words,), dtype=torch.int32).pin_memory()
        host[at : at + rows] = torch.randint(-1, 256, (rows,), dtype=torch.int32)[: words - at]
        drawn = torch.randint(2000, 3000, (256,), dtype=torch.int32, device="cuda")
        torch.ops.gptoss_trt.feed(host, drawn, at, memory, ids)
        source = host[at : at + rows]
        want = torch.where(source >= 0, drawn.cpu()[source.clamp(min=0).long()], host[:rows])
        assert torch.equal(memory.cpu(), host) and torch.equal(ids.cpu(), want)


def test_draws_repeat_and_do_not_depend_on_company() -> None:
    logits = torch.randn(64, VOCABULARY, device="cuda") * 3
    temperature, share = torch.ones(64, device="cuda"), torch.rand(64, device="cuda")
    together = sampled(logits, temperature, share, "cuda")
    for row in (0, 1, 63):
        part = slice(row, row + 1)
        assert sampled(logits[part], temperature[part], share[part], "cuda").item() == together[row]
    for _ in range(20):
        assert torch.equal(sampled(logits, temperature, share, "cuda"), together)
