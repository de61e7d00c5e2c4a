"""Norms and quantisation on the GPU against the CPU: every source and output, and the same bits whatever the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_case import E4M3, OPS, H, adversarial, assert_rows, bf16, both, exact, poisoned


@pytest.mark.parametrize("group", [128, 64, 0])
def test_act_quant_is_exact(group: int) -> None:
    scales = poisoned(-(-H // (group or 1)), 300) if group else None
    got, want = both("act_quant", (adversarial(300, H), group), (poisoned(300, H, dtype=E4M3), scales))
    for a, b in zip(got, want, strict=True):
        if a is not None:
            exact(a, b)


@pytest.mark.parametrize("hidden", [H, 256, 72])
@pytest.mark.parametrize("outputs", ["normed", "quantised", "both"])
@pytest.mark.parametrize("delta", [False, True])
def test_rmsnorm_quant(hidden: int, outputs: str, delta: bool, pinned: str) -> None:
    normed = poisoned(33, hidden, dtype=torch.bfloat16) if outputs != "quantised" else None
    quantised = (
        (poisoned(33, hidden, dtype=E4M3), poisoned(-(-hidden // 128), 33)) if outputs != "normed" else (None,) * 2
    )
    residual = adversarial(33, hidden)
    more = bf16(33, hidden) if delta else None
    got, want = both("rmsnorm_quant", (residual, more, bf16(hidden), 1e-5), (normed, *quantised))
    check_norm(got, want, hidden)


@pytest.mark.parametrize("hidden", [H, 3072, 2888, 72, 3080])
@pytest.mark.parametrize("delta", [False, True])
def test_norms_of_many_tokens_have_the_bits_of_few(hidden: int, delta: bool) -> None:
    """A warp has a token of many without a delta, a block of threads one of few."""
    tokens, few = 1500, 300
    start, gain = adversarial(tokens, hidden).cuda(), bf16(hidden).cuda()
    more = bf16(tokens, hidden).cuda() if delta else None

    def run(first: int, last: int) -> list[torch.Tensor]:
        residual, rows = start[first:last].clone(), last - first
        out = [poisoned(rows, hidden, dtype=torch.bfloat16).cuda(), poisoned(rows, hidden, dtype=E4M3).cuda()]
        scales = poisoned(-(-hidden // 128), rows).cuda()
        OPS.rmsnorm_quant(residual, None if more is None else more[first:last], gain, 1e-5, *out, scales)
        return [residual, *out, scales.T.flatten()]

    parts = [run(first, first + few) for first in range(0, tokens, few)]
    for whole, pieces in zip(run(0, tokens), zip(*parts, strict=True), strict=True):
        exact(whole.cpu(), torch.cat([piece.view(torch.uint8) for piece in pieces]).view(whole.dtype).cpu())


def check_norm(got: list[Any], want: list[Any], hidden: int) -> None:
    """Normed, quantised, scales: one ulp where the mean's last bit differs."""
    if got[0] is not None:
        assert_rows(got[0], want[0], 2**-7)
        assert float((got[0] != want[0]).float().mean()) < 1e-3
    if got[1] is not None:
        torch.testing.assert_close(got[2], want[2], rtol=2**-7, atol=0)
        wide = [x[1].float() * x[2].T.repeat_interleave(128, 1)[:, :hidden] for x in (got, want)]
        assert_rows(wide[0], wide[1], 2**-3)
        assert float((wide[0] != wide[1]).float().mean()) < 1e-1


@pytest.mark.parametrize(("tokens", "hidden"), [(1, H), (65, H), (7, 256)])
@pytest.mark.parametrize("local", [(0, 32), (8, 16)])
def test_moe_combine_norm(tokens: int, hidden: int, local: tuple[int, int], pinned: str) -> None:
    """Rows of experts elsewhere, and of padding, hold NaN."""
    ids = torch.stack([torch.randperm(32)[:4] for _ in range(tokens)]).to(torch.int32)
    ids[-1] = -1
    rows = bf16(tokens, 4, hidden)
    rows[(ids < local[0]) | (ids >= sum(local))] = float("nan")
    outputs = (
        bf16(tokens, hidden), poisoned(tokens, hidden, dtype=torch.bfloat16), poisoned(tokens, hidden, dtype=E4M3),
        poisoned(-(-hidden // 128), tokens),
    )  # fmt: skip

    def run(device: str) -> list[torch.Tensor]:
        residual, *out = (x.clone().to(device) for x in outputs)
        OPS.moe_combine_norm(rows.to(device), ids.to(device), *local, residual, gain.to(device), 1e-5, *out)
        return [x.cpu() for x in (residual, *out)]

    gain = bf16(hidden)
    got, want = run("cuda"), run("cpu")
    exact(got[0], want[0])
    check_norm(got[1:], want[1:], hidden)


def test_combine_and_embedding() -> None:
    rows, ids = bf16(37, 4, H), torch.randint(0, 32, (37, 4), dtype=torch.int32)
    residual = bf16(37, H)
    outputs = (poisoned(37, H, dtype=torch.bfloat16), poisoned(37, H, dtype=E4M3), poisoned(23, 37))
    got, want = both("moe_combine_norm", (rows, ids, 0, 32, residual, bf16(H), 1e-5), outputs)
    assert_rows(got[0], want[0], 2**-7)
    got, want = both("moe_combine", (rows, ids, 8, 8, False), (poisoned(37, H),))
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    got, want = both("embedding", (torch.tensor([3, 99, 40], dtype=torch.int32), bf16(90, H), 0),
                     (poisoned(3, H, dtype=torch.bfloat16),))  # fmt: skip
    exact(got[0], want[0])


def test_dependent_launches_in_a_graph_give_the_same_bits() -> None:
    """Kernels that start before their predecessors end, 200 times with other work beside them."""
    weights = [bf16(H, H, scale=0.02).cuda() for _ in range(6)]
    gain, start = bf16(H).cuda(), bf16(4, H).cuda()

    def chain() -> torch.Tensor:
        residual = start.clone()
        for weight in weights:
            normed, delta = torch.empty_like(residual), torch.empty_like(residual)
            OPS.rmsnorm_quant(residual, None, gain, 1e-5, normed, None, None)
            OPS.dense(normed, weight, None, delta)
            OPS.rmsnorm_quant(residual, delta, gain, 1e-5, normed, None, None)
        return normed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = chain()
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for turn in range(200):
        if turn % 2:
            with torch.cuda.stream(beside):
                noise @ noise
        graph.replay()
        assert torch.equal(got, want), f"replay {turn} differs"
