"""Every op of torch.ops.gptoss_trt on the GPU against its CPU implementation, at the real models' widths.

EXACT where the format says so (quantisation, indices, tables); worst row elsewhere. Outputs are poisoned first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.ops import dispatch
from gptoss_trt.reference import moe_route as route_reference

OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
FEW_OPS = ("dense", "dense_fp8")
H, INTER, HEADS, KV_HEADS, D, BLOCK_TOKENS = 2880, 2880, 64, 8, 64, 64


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(*shape, dtype=dtype)
    out.view(torch.uint8).fill_(0x7B)
    return out


def both(op: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
    """The outputs of `op` on the CPU and on the GPU, from the same inputs and the same poison."""

    def copy(device: str) -> list[Any]:
        moved = [x.to(device).clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        outs = [out.clone().to(device) if out is not None else None for out in outputs]
        getattr(OPS, op)(*moved, *outs)
        return [out.cpu() if out is not None else None for out in outs]

    want, got = copy("cpu"), copy("cuda")
    torch.cuda.synchronize()
    return got, want


def assert_rows(got: torch.Tensor, want: torch.Tensor, eps: float) -> None:
    got, want = got.float(), want.float()
    worst = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-6)
    assert float(worst.max()) < eps, f"worst row {int(worst.argmax())}: {float(worst.max()):.3g}"


def exact(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def adversarial(tokens: int, width: int) -> torch.Tensor:
    x = torch.randn(tokens, width)
    x[0] = 0
    x[1, width // 2] = 1e4
    x[2] *= 1e-30
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("group", [128, 64, 0])
def test_act_quant_is_exact(group: int) -> None:
    scales = poisoned(-(-H // (group or 1)), 300) if group else None
    got, want = both("act_quant", (adversarial(300, H), group), (poisoned(300, H, dtype=E4M3), scales))
    for a, b in zip(got, want, strict=True):
        if a is not None:
            exact(a, b)


@pytest.fixture(params=["cuda", "triton"])
def pinned(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation of the norms in turn."""
    ops = ("rmsnorm_quant", "moe_combine_norm", "rmsnorm_route")
    for op in ops:
        dispatch.select(op, request.param)
    yield request.param
    for op in ops:
        dispatch.select(op, None)


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


def test_slots_and_rope() -> None:
    query_start = torch.tensor([0, 70, 71], dtype=torch.int32)
    positions = torch.cat([torch.arange(60, 130), torch.tensor([4000, 0])]).to(torch.int32)
    table = torch.randperm(80).to(torch.int32).reshape(1, 80).repeat(2, 1)
    got, want = both(
        "kv_slots", (positions, query_start, table, None, BLOCK_TOKENS), (poisoned(72, dtype=torch.int32),)
    )
    exact(got[0], want[0])
    qkv, cos_sin = bf16(72, (HEADS + 2 * KV_HEADS) * D), torch.randn(4096, D)
    caches = [torch.zeros(80, KV_HEADS, BLOCK_TOKENS, D, dtype=torch.bfloat16) for _ in range(2)]
    outputs = (poisoned(72, HEADS, D, dtype=torch.bfloat16), *caches)
    got, want = both("rope_kv_append", (qkv, positions, cos_sin, want[0], 1.0, 1.0), outputs)
    for a, b in zip(got, want, strict=True):
        assert float((a != b).float().mean()) < 1e-3  # one ulp where a fused multiply-add rounds once
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tiles", ["", "64/1", "64/2", "64/3", "128/1", "128/2", "256/1"])
@pytest.mark.parametrize("tokens", [1, 5, 17, 64, 65, 200, 700])
def test_dense_fp8_rope_kv_append_is_its_two_ops(tokens: int, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every cut of the product; tokens without a slot leave the cache alone. Heads of two ranks and of eight."""
    from gptoss_trt.ops import dense

    if tiles:
        monkeypatch.setattr(dense, "takes", lambda *_: False)
        monkeypatch.setattr(dense, "tiles_for", lambda *_: dense._tiles_of(tiles))
    for heads, kv_heads in ((HEADS, KV_HEADS), (8, 1)):
        segments = [heads * D, kv_heads * D, kv_heads * D]
        rows = sum(-(-segment // 128) for segment in segments)
        x, x_scale = torch.randn(tokens, H).to(E4M3).cuda(), torch.rand(23, tokens).cuda()
        weight, unit = torch.randn(sum(segments), H).to(E4M3).cuda(), torch.rand(rows, 23).cuda() / 50
        bias, cos_sin = bf16(sum(segments)).cuda(), torch.randn(4096, D).cuda()
        positions = torch.randint(4096, (tokens,)).to(torch.int32).cuda()
        slots = torch.randperm(16 * BLOCK_TOKENS)[:tokens].to(torch.int32).cuda()
        slots[tokens // 3 :: 7] = -1
        want, got = (
            [poisoned(tokens, heads, D, dtype=torch.bfloat16).cuda()]
            + [poisoned(16, kv_heads, BLOCK_TOKENS, D, dtype=torch.bfloat16).cuda() for _ in "kv"]
            for _ in range(2)
        )
        qkv = torch.empty(tokens, sum(segments), dtype=torch.bfloat16, device="cuda")
        dense.dense_fp8(x, x_scale, weight, unit, segments, bias, qkv)
        OPS.rope_kv_append(qkv, positions, cos_sin, slots, 1.0, 1.0, *want)
        OPS.dense_fp8_rope_kv_append(
            x, x_scale, weight, unit, segments, bias, positions, cos_sin, slots, 1.0, 1.0, *got
        )
        for a, b in zip(got, want, strict=True):
            assert float((a != b).float().mean()) < 1e-3  # one ulp where a fused multiply-add rounds once
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=2**-7)
        exact(got[2].cpu(), want[2].cpu())


def paged(contexts: list[int], window: int) -> tuple[torch.Tensor, ...]:
    """k, v, table, first block: blocks below the window are not kept; unused blocks hold NaN."""
    needed = [-(-context // BLOCK_TOKENS) for context in contexts]
    first = [max(0, c - 1 - window) // BLOCK_TOKENS if window else 0 for c in contexts]
    total = sum(needed) + 2
    k, v = (torch.full((total, KV_HEADS, BLOCK_TOKENS, D), float("nan")) for _ in range(2))
    order = torch.randperm(total).tolist()
    table = torch.full((len(contexts), max([1, *needed])), -1, dtype=torch.int32)
    for s, count in enumerate(needed):
        for entry in range(first[s], count):
            block = order.pop()
            table[s, entry - first[s]] = block
            k[block], v[block] = torch.randn(2, KV_HEADS, BLOCK_TOKENS, D)
    return k.to(torch.bfloat16), v.to(torch.bfloat16), table, torch.tensor(first, dtype=torch.int32)


@pytest.mark.parametrize("window", [0, 128])
def test_attention_decode(window: int) -> None:
    contexts = [1, 127, 128, 129, 1025, 3000, 0]
    k, v, table, first = paged(contexts, window)
    q, sinks = bf16(len(contexts), HEADS, D), bf16(HEADS) + 3
    inputs = (q, k, v, table, first if window else None, torch.tensor(contexts, dtype=torch.int32), sinks, window,
              0.125, 1.0, 1.0)  # fmt: skip
    got, want = both("attention_decode", inputs, (poisoned(len(contexts), HEADS, D, dtype=torch.bfloat16),))
    assert_rows(got[0], want[0], 2**-6)


@pytest.mark.parametrize("window", [0, 128])
def test_attention_prefill(window: int) -> None:
    contexts = [300, 1, 129]
    k, v, table, _ = paged(contexts, 0)
    q, sinks = bf16(430, HEADS, D), bf16(HEADS) + 3
    query_start = torch.tensor([0, 300, 301, 430], dtype=torch.int32)
    inputs = (q, k, v, table, None, query_start, torch.tensor(contexts, dtype=torch.int32), sinks, window,
              0.125, 1.0, 1.0)  # fmt: skip
    got, want = both("attention_prefill", inputs, (poisoned(430, HEADS, D, dtype=torch.bfloat16),))
    assert_rows(got[0], want[0], 2**-6)


@pytest.mark.parametrize(
    ("mxfp4", "h_group", "tokens"),
    [(True, 128, 1), (True, 128, 200), (True, 64, 9), (True, 0, 9), (False, 128, 9), (False, 64, 1), (False, 0, 1)],
)
def test_expert_products(mxfp4: bool, h_group: int, tokens: int) -> None:
    experts, top_k = 4, 2
    torch.manual_seed(tokens)

    def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        if mxfp4:
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            return blocks, torch.randint(118, 121, (experts, rows, columns // 32), dtype=torch.uint8)
        codes = (torch.randn(experts, rows, columns) * 8).to(E4M3)
        return codes, torch.full((experts, -(-rows // 128), -(-columns // 128)), 2.0**-10)

    q, scales = torch.empty(tokens, H, dtype=E4M3), torch.empty(-(-H // 128), tokens)
    OPS.act_quant(bf16(tokens, H), 128, q, scales)
    up, up_scale = weights(2 * INTER, H)
    down, down_scale = weights(H, INTER)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    if tokens == 200:
        ids[:] = torch.tensor([2, 1])  # several M-blocks for two experts, none for the others
    flat = ids.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    active = torch.full((experts + 1,), -1, dtype=torch.int32)
    used = counts.nonzero().reshape(-1)
    active[0], active[1 : 1 + len(used)] = len(used), used.to(torch.int32)
    slots = torch.sort(flat, stable=True).indices.to(torch.int32)
    rows = tokens * top_k
    h_scale = torch.zeros(-(-INTER // h_group), rows) if h_group else None
    inputs = (q, scales, up, up_scale, bf16(experts, 2 * INTER), offsets, active, slots, top_k, 7.0, 1.702, "plain",
              h_group)  # fmt: skip
    got, want = both("moe_gate_up", inputs, (torch.zeros(rows, INTER, dtype=E4M3), h_scale))
    # The products may err by 2^-12 of the sum of absolute terms (about 24 here, the largest result about 11), which is
    # up to 2^-8 of the largest code: small codes then move by several of their steps, large ones by one.
    codes = want[0].float()
    difference = (got[0].float() - codes).abs()
    assert float((difference - codes.abs() / 8).max()) <= 448 * 2.0**-8
    assert float((difference > 0).float().mean()) < 0.15
    assert float(difference.square().mean().sqrt() / codes.square().mean().sqrt()) < 2.0**-5
    inputs = (want[0], want[1], down, down_scale, bf16(experts, H), torch.rand(tokens, top_k), offsets, active, slots,
              "plain", h_group)  # fmt: skip
    got, want = both("moe_down", inputs, (poisoned(tokens, top_k, H, dtype=torch.bfloat16),))
    assert_rows(got[0].reshape(rows, H), want[0].reshape(rows, H), 2**-7)


@pytest.mark.parametrize("tokens", [1, 8, 13, 50])
def test_dense_products(tokens: int) -> None:
    rows = 5120
    x, weight, bias = bf16(tokens, H), bf16(rows, H, scale=0.02), bf16(rows)
    got, want = both("dense", (x, weight, bias), (poisoned(tokens, rows, dtype=torch.bfloat16),))
    assert_rows(got[0], want[0], 2**-7)
    got, want = both("dense", (x, weight, None), (poisoned(tokens, rows),))
    assert_rows(got[0], want[0], 1e-4)
    q, scales = torch.empty(tokens, H, dtype=E4M3), torch.empty(23, tokens)
    OPS.act_quant(x, 128, q, scales)
    codes, weight_scale = (torch.randn(rows, H) * 8).to(E4M3), torch.rand(40, 23) * 2.0**-8
    inputs = (q, scales, codes, weight_scale, [4096, 512, 512], bias)
    got, want = both("dense_fp8", inputs, (poisoned(tokens, rows),))
    assert_rows(got[0], want[0], 1e-3)


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
@pytest.mark.parametrize(("rows", "columns"), [(5120, H), (H, 4096), (264, 192), (20, 64)])
def test_products_of_few_tokens(implementation: str, rows: int, columns: int) -> None:
    """Against the CPU; the same bits for a token alone and among few; FP8 segments begin new scales."""
    x, weight, bias = bf16(16, columns), bf16(rows, columns, scale=0.02), bf16(rows)
    q, scales = torch.empty(16, columns, dtype=E4M3), torch.empty(-(-columns // 128), 16)
    OPS.act_quant(x, 128, q, scales)
    segments = [rows // 16 * 8, rows // 32 * 8, rows - rows // 16 * 8 - rows // 32 * 8] if rows > 200 else []
    unit = torch.rand(sum(-(-s // 128) for s in segments or [rows]), -(-columns // 128)) * 2.0**-8
    codes = (torch.randn(rows, columns) * 8).to(E4M3)
    try:
        for op in FEW_OPS:
            dispatch.select(op, implementation)
        for tokens in (1, 3, 8, 9, 16):
            outputs = (poisoned(tokens, rows),)
            got, want = both("dense", (x[:tokens].clone(), weight, bias), outputs)
            assert_rows(got[0], want[0], 1e-4)
            some = (q[:tokens].clone(), scales[:, :tokens].contiguous(), codes, unit, segments, bias)
            got_fp8, want_fp8 = both("dense_fp8", some, outputs)
            assert_rows(got_fp8[0], want_fp8[0], 1e-3)
            if tokens == 1:
                alone = (got[0], got_fp8[0])
                continue
            if tokens <= (4 if implementation == "cuda" else 8):  # then tiles take over
                exact(got_fp8[0][:1], alone[1])
            if implementation == "cuda" and tokens <= 8:  # else cuBLAS, which may take another kernel
                exact(got[0][:1], alone[0])
    finally:
        for op in FEW_OPS:
            dispatch.select(op, None)


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
