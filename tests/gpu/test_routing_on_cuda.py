"""Routing on the GPU against the CPU: the router's product, the choice of experts, rows sorted by expert."""

from __future__ import annotations

import pytest
import torch
from op_case import E4M3, OPS, H, assert_rows, bf16, both, exact, poisoned

from gptoss_trt.reference import moe_route as route_reference


def routing_weights_agree(got: torch.Tensor, want: torch.Tensor) -> None:
    """A sum in another order may round a logit to the other bf16 neighbour: up to 2^-5 below 8, a share of a row's
    weights. Few rows do."""
    torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-9)
    near = ((got - want).abs() <= 2**-7 * want + 2**-9).all(-1)
    assert int((~near).sum()) <= max(1, len(want) // 50)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 128), (7, 32), (200, 128)])
def test_moe_route_orders_ties_by_index(tokens: int, experts: int) -> None:
    x, weight, bias = bf16(tokens, H), bf16(experts, H, scale=0.02), bf16(experts)
    weight[9], bias[9] = weight[4], bias[4]
    outputs = (
        poisoned(tokens, 4, dtype=torch.int32), poisoned(tokens, 4), poisoned(experts + 1, dtype=torch.int32),
        poisoned(experts + 1, dtype=torch.int32), poisoned(tokens * 4, dtype=torch.int32),
    )  # fmt: skip
    got, want = both("moe_route", (x, weight, bias, None, 0, experts), outputs)
    same = (got[0] == want[0]).all(-1)
    # fp32 sums in another order may round a logit to the other bf16 neighbour: a near tie, counted.
    assert float(same.float().mean()) > 0.95
    ids = got[0].reshape(-1).long()
    assert got[4].tolist() == torch.sort(ids, stable=True).indices.tolist()
    assert got[2].diff().tolist() == torch.bincount(ids, minlength=experts).tolist()
    routing_weights_agree(got[1][same], want[1][same])


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(1, 128), (8, 32), (16, 128), (17, 32), (3, 32), (13, 128), (3, 8), (4, 8), (14, 8), (14, 16), (7, 6),
     (64, 32), (64, 128), (129, 128), (200, 32), (300, 128), (512, 128), (2100, 32), (2100, 128)],
)  # fmt: skip
def test_rmsnorm_route_is_its_two_ops(tokens: int, experts: int, counted: bool, pinned: str) -> None:
    """`counted`: the last token is padding. Few experts lie in registers more than once, which sums must not count."""
    hidden = H if experts > 16 else 256
    real = tokens - 1 if counted else tokens
    residual, delta, weight = bf16(tokens, hidden), bf16(tokens, hidden), bf16(hidden)
    router, bias = bf16(experts, hidden, scale=hidden**-0.5), bf16(experts)
    count = torch.tensor([real], dtype=torch.int32) if counted else None
    groups = -(-hidden // 128)
    outputs = (
        poisoned(tokens, hidden, dtype=torch.bfloat16), poisoned(tokens, hidden, dtype=E4M3), poisoned(groups, tokens),
        poisoned(tokens, 4, dtype=torch.int32), poisoned(tokens, 4), poisoned(experts + 1, dtype=torch.int32),
        poisoned(experts + 1, dtype=torch.int32), poisoned(tokens * 4, dtype=torch.int32),
    )  # fmt: skip
    got, want = both("rmsnorm_route", (residual, delta, weight, 1e-5, router, bias, count, 0, experts), outputs)
    exact(got[0], want[0])
    assert_rows(got[1].float() * got[2].T.repeat_interleave(128, 1)[:, :hidden],
                want[1].float() * want[2].T.repeat_interleave(128, 1)[:, :hidden], 2**-3)  # fmt: skip
    same = (got[3] == want[3]).all(-1)
    assert int(same.sum()) >= tokens - 1 - tokens // 50  # a near tie of bf16 logits may fall the other way
    routing_weights_agree(got[4][same], want[4][same])
    chosen = got[3][:real].reshape(-1).long()
    used = torch.bincount(chosen, minlength=experts)
    assert got[5].tolist() == [0, *used.cumsum(0).tolist()]
    active = used.nonzero().reshape(-1).tolist()
    assert got[6].tolist() == [len(active), *active, *[-1] * (experts - len(active))]
    assert got[7].tolist() == torch.sort(chosen, stable=True).indices.tolist() + [-1] * (4 * (tokens - real))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"), [(513, H, 32), (2100, 3072, 8), (1029, 2888, 30), (700, 72, 4), (8192, H, 32)]
)
def test_a_resident_router_leaves_the_norm_its_bits(
    tokens: int, hidden: int, experts: int, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against norm, cuBLAS's product and choice; without delta the residual is updated in place, which leaves it."""
    from gptoss_trt.ops import rmsnorm_route

    residual, weight = bf16(tokens, hidden, scale=3.0).cuda(), bf16(hidden).cuda()
    residual[0], residual[1, hidden // 2] = 0, 1e4
    more = bf16(tokens, hidden).cuda() if delta else None
    router, bias = bf16(experts, hidden, scale=hidden**-0.5).cuda(), bf16(experts).cuda()
    count = torch.tensor([tokens - 3], dtype=torch.int32, device="cuda")

    def run() -> list[torch.Tensor]:
        updated = residual.clone() if more is None else poisoned(tokens, hidden, dtype=torch.bfloat16).cuda()
        out = [poisoned(tokens, hidden, dtype=E4M3).cuda(), poisoned(-(-hidden // 128), tokens).cuda()]
        out += [poisoned(tokens, 4, dtype=torch.int32).cuda(), poisoned(tokens, 4).cuda()]
        out += [poisoned(size, dtype=torch.int32).cuda() for size in (experts + 1, experts + 1, 4 * tokens)]
        source = updated if more is None else residual
        rmsnorm_route.rmsnorm_route_many(
            source, more, weight, 1e-5, router, bias, count, 0, experts, updated, out[0], out[1], *out[2:]
        )
        return [updated, *out]

    got = run()
    monkeypatch.setattr(rmsnorm_route, "is_resident", lambda *_: False)
    want = run()
    for a, b in zip(got[:3], want[:3], strict=True):
        exact(a, b)
    same = (got[3] == want[3]).all(-1)
    assert int((~same).sum()) <= tokens // 100  # a near tie of bf16 logits may fall the other way
    routing_weights_agree(got[4][same], want[4][same])
    rows = route_reference.sort_rows(got[3].cpu(), 0, experts)
    for a, b in zip(got[5:], (rows.offsets, rows.active, rows.slots), strict=True):
        exact(a.cpu(), b)


@pytest.mark.parametrize("tokens", [1, 700, 8191, 32768])
@pytest.mark.parametrize(("first", "local"), [(0, 32), (8, 16), (0, 128)])
def test_rows_of_many_tokens(tokens: int, first: int, local: int) -> None:
    """Uneven experts, some without rows; the last tokens are padding."""
    from gptoss_trt.ops.rmsnorm_route import sort_rows

    experts = 128 if local == 128 else 32
    ids = (torch.rand(tokens, 4).pow(3) * experts).to(torch.int32)
    ids[tokens - tokens // 9 :] = -1
    outputs = [poisoned(n, dtype=torch.int32).cuda() for n in (local + 1, local + 1, tokens * 4)]
    sort_rows(ids.cuda(), first, local, *outputs)
    want = route_reference.sort_rows(ids, first, local)
    for got, expected in zip(outputs, (want.offsets, want.active, want.slots), strict=True):
        exact(got.cpu(), expected)


@pytest.mark.parametrize(("tokens", "experts"), [(9, 128), (64, 32), (256, 32), (700, 128)])
def test_norms_and_routing_repeat_beside_other_work(tokens: int, experts: int) -> None:
    """Two layers' worth in a graph, 100 times: clusters, tickets and kernels that begin early leave the same bits."""
    router, bias, gain = bf16(experts, H, scale=0.02).cuda(), bf16(experts).cuda(), bf16(H).cuda()
    start, rows = bf16(tokens, H).cuda(), bf16(tokens, 4, H, scale=0.1).cuda()

    def chain() -> list[torch.Tensor]:
        residual, kept = start.clone(), []
        for _ in range(2):
            updated = torch.empty_like(residual)
            quantised, scales = torch.empty_like(residual, dtype=E4M3), torch.empty(23, tokens, device="cuda")
            ids = torch.empty(tokens, 4, dtype=torch.int32, device="cuda")
            sizes = (experts + 1, experts + 1, tokens * 4)
            lists = [torch.empty(size, dtype=torch.int32, device="cuda") for size in sizes]
            routed = (ids, torch.empty(tokens, 4, device="cuda"), *lists)
            OPS.rmsnorm_route(
                residual, None, gain, 1e-5, router, bias, None, 0, experts, updated, quantised, scales, *routed
            )
            normed = torch.empty_like(residual)
            OPS.moe_combine_norm(rows, ids, 0, experts, updated, gain, 1e-5, normed, None, None)
            residual = normed
            kept += [updated, quantised.view(torch.uint8), scales, *routed, normed]
        return kept

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
        want = [x.clone() for x in chain()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = chain()
    noise, beside = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for turn in range(100):
        if turn % 2:
            with torch.cuda.stream(beside):
                noise @ noise
        graph.replay()
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"replay {turn} differs in output {number}"
