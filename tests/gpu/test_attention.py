"""The library's attention kernels against the CPU ops, in every plan: window edges, cut ranges, ragged chunks, padding.

Cache rows that no query may see hold NaN, so a key or value read too many shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.ops import attention, library

OPS = torch.ops.gptoss_trt
D, GROUP, BLOCK_TOKENS = 64, 8, 64
TOLERANCE = 2**-6  # worst element of a row over the row's largest
DECODE_PLANS = (0, 1, 2, 3)
PREFILL_PLANS = {0: (0, 1, 2), 128: (0, 2, 3, 4)}
REPEATS = 200


@dataclass
class Paged:
    """Queries and a cache of shuffled blocks; blocks below `first` are not kept."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    first: torch.Tensor | None
    starts: torch.Tensor
    contexts: torch.Tensor
    sinks: torch.Tensor
    window: int

    @classmethod
    def make(
        cls, contexts: list[int], fresh: list[int], window: int, kv_heads: int = 8, padding: int = 0, width: int = 0
    ) -> Paged:
        needed = [-(-context // BLOCK_TOKENS) for context in contexts]
        lows = [max(0, c - n - window + 1) // BLOCK_TOKENS for c, n in zip(contexts, fresh, strict=True)]
        first = [min(low, need) if window else 0 for low, need in zip(lows, needed, strict=True)]
        total = sum(needed) + 2
        k, v = (torch.full((total, kv_heads, BLOCK_TOKENS, D), float("nan")) for _ in range(2))
        order = torch.randperm(total).tolist()
        table = torch.full((len(contexts), max([1, width, *needed])), -1, dtype=torch.int32)
        for s, context in enumerate(contexts):
            for entry in range(first[s], needed[s]):
                block = order.pop()
                table[s, entry - first[s]] = block
                held = min(BLOCK_TOKENS, context - entry * BLOCK_TOKENS)
                k[block, :, :held], v[block, :, :held] = torch.randn(2, kv_heads, held, D)
        starts = torch.tensor([0, *fresh]).cumsum(0).to(torch.int32)
        q = torch.randn(sum(fresh) + padding, kv_heads * GROUP, D)
        sinks = torch.randn(kv_heads * GROUP) + 3
        return cls(
            q.to(torch.bfloat16), k.to(torch.bfloat16), v.to(torch.bfloat16), table,
            torch.tensor(first, dtype=torch.int32) if window else None,
            starts, torch.tensor(contexts, dtype=torch.int32), sinks.to(torch.bfloat16), window,
        )  # fmt: skip

    def cuda(self) -> Paged:
        fields = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in vars(self).items()}
        return Paged(**fields)

    def decode(self, options: attention.Options | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, 77.0)
        inputs = (self.q, self.k, self.v, self.table, self.first, self.contexts, self.sinks, self.window, 0.125)
        if options is None:
            OPS.attention_decode(*inputs, 1.0, 1.0, out)
        else:
            attention.attention_decode(*inputs, 1.0, 1.0, out, options=options)
        return out

    def prefill(self, options: attention.Options | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, 77.0)
        where = (self.q, self.k, self.v, self.table, self.first, self.starts, self.contexts)
        if options is None:
            OPS.attention_prefill(*where, self.sinks, self.window, 0.125, 1.0, 1.0, out)
        else:
            attention.attention_prefill(*where, self.sinks, self.window, 0.125, 1.0, 1.0, out, options=options)
        return out

    def quantised(
        self, prefill: bool, options: attention.Options = attention.DEFAULT
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [T, heads * D] and scales of the output in e4m3."""
        tokens, heads = self.q.shape[:2]
        codes = torch.full((tokens, heads * D), 77.0, device=self.q.device).to(torch.float8_e4m3fn)
        scales = torch.full((heads * D // 128, tokens), 77.0, device=self.q.device)
        where = (self.q, self.k, self.v, self.table, self.first)
        how = (self.contexts, self.sinks, self.window, 0.125, 1.0, 1.0, codes, scales)
        if prefill:
            attention.attention_prefill(*where, self.starts, *how, options=options)
        else:
            attention.attention_decode(*where, *how, options=options)
        return codes, scales


def assert_quantises(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """That codes and scales are act_quant of the bf16 output, but for the sign of zeros."""
    wanted, unit = torch.empty_like(codes), torch.empty_like(scales)
    OPS.act_quant(out.flatten(1), 128, wanted, unit)
    assert torch.equal(scales, unit)
    assert torch.equal(codes.float(), wanted.float())


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.cpu().float(), want.float()
    error = (got - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-3)
    return float(torch.nan_to_num(error, nan=float("inf")).max())


def options(plan: int, parts: int = 0) -> attention.Options:
    return attention.Options(plan, parts, library.DEPENDENT_LAUNCH)


@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize("window", [0, 128])
def test_decode_in_every_plan_and_cut(window: int, kv_heads: int) -> None:
    contexts = [1, 15, 16, 17, 127, 128, 129, 192, 1025, 3000, 0]
    case = Paged.make(contexts, [1] * len(contexts), window, kv_heads, width=0 if window else 64)
    want, card = case.decode(), case.cuda()
    for plan in DECODE_PLANS:
        for parts in (0,) if window else (0, 1, 5, 32):
            got = card.decode(options(plan, parts))
            assert worst(got, want) < TOLERANCE, (plan, parts)
            assert torch.count_nonzero(got[-1]) == 0


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_decode_with_smaller_blocks(block_tokens: int) -> None:
    case = Paged.make([300, 64, 5], [1, 1, 1], 0)
    each = BLOCK_TOKENS // block_tokens
    split = [
        x.view(len(x), 8, each, block_tokens, D).transpose(1, 2).reshape(len(x) * each, 8, block_tokens, D)
        for x in (case.k, case.v)
    ]
    table = (case.table[..., None] * each + torch.arange(each, dtype=torch.int32)).flatten(1)
    want = case.decode()
    case.k, case.v, case.table = (*(x.contiguous() for x in split), table.contiguous())
    assert attention.takes_decode(case.q, case.k, 3)
    assert worst(case.cuda().decode(options(0)), want) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(
    ("contexts", "fresh"),
    [
        ([300, 1, 129, 70, 1000, 65], [300, 1, 129, 5, 200, 65]),
        ([3000], [512]),
        ([777], [777]),
        ([40 + i for i in range(40)], [1 + i % 9 for i in range(40)]),
        ([8, 9, 63, 64, 65, 127, 128, 136, 1025], [8, 3, 63, 64, 1, 127, 2, 9, 1025]),
        ([100 + i for i in range(150)], [1] * 149 + [70]),
    ],
    ids=["ragged", "chunk", "one", "many", "edges", "hundreds"],
)
def test_prefill_in_every_plan(contexts: list[int], fresh: list[int], window: int, kv_heads: int) -> None:
    case = Paged.make(contexts, fresh, window, kv_heads, padding=30)
    want, card = case.prefill(), case.cuda()
    for plan in PREFILL_PLANS[window]:
        got = card.prefill(options(plan))
        assert worst(got, want) < TOLERANCE, plan
        assert torch.count_nonzero(got[-30:]) == 0


@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("window", [0, 128])
def test_quantised_output_is_that_of_the_other(window: int, kv_heads: int) -> None:
    contexts = [1, 15, 129, 1025, 3000, 0]
    card = Paged.make(contexts, [1] * len(contexts), window, kv_heads, width=0 if window else 64).cuda()
    for plan in DECODE_PLANS:
        for parts in (0,) if window else (0, 1, 5):
            chosen = options(plan, parts)
            assert_quantises(card.decode(chosen), *card.quantised(False, chosen))
    card = Paged.make([300, 1, 129, 70, 1000], [300, 1, 129, 5, 200], window, kv_heads, padding=30).cuda()
    card.q[7] *= 1e4  # one key's value alone
    for plan in PREFILL_PLANS[window]:
        assert_quantises(card.prefill(options(plan)), *card.quantised(True, options(plan)))
    few = Paged.make([300, 129, 20], [3, 1, 5], window, kv_heads, padding=3).cuda()
    assert_quantises(few.prefill(), *few.quantised(True))


def test_a_chunk_gives_what_the_whole_prompt_gives() -> None:
    case = Paged.make([1000], [1000], 0).cuda()
    whole = case.prefill(options(0))
    parts = []
    for begin, end in ((0, 24), (24, 500), (500, 501), (501, 1000)):
        part = Paged(**vars(case))
        part.q = case.q[begin:end].contiguous()
        part.starts = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        part.contexts = torch.tensor([end], dtype=torch.int32, device="cuda")
        parts.append(part.prefill(options(0)))
    assert worst(torch.cat(parts), whole.cpu()) < TOLERANCE


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(
    "slope", ["older larger", "newer larger", "far below 0", "one step", "one key", "now and then"]
)
def test_prefill_of_scores_far_apart(slope: str, window: int) -> None:
    """Weights are relative to a base that follows a row's largest score only when it must."""
    case = Paged.make([700, 130], [400, 130], window, kv_heads=2)
    first = 0 if case.first is None else int(case.first[0])
    kept = 11 - first
    blocks, rows = case.table[0, :kept].long(), torch.arange(64 * first, 704).view(kept, 1, BLOCK_TOKENS, 1)
    common = torch.ones(D, dtype=torch.bfloat16)
    factor, offset = {
        "older larger": (12 - rows / 60, 0), "newer larger": (rows / 60, 0), "far below 0": (1, -40 * common),
        "one step": (1, 30 * common * (rows < 350)), "one key": (1, 3000 * common * (rows == 333)),
        "now and then": (1 + 19 * (rows % 50 == 7), 0),
    }[slope]  # fmt: skip
    case.k[blocks] = (case.k[blocks] * factor + offset).to(torch.bfloat16)
    case.q += 3 * common
    case.sinks -= 2000
    want, card = case.prefill(), case.cuda()
    for plan in PREFILL_PLANS[window][1:]:
        assert worst(card.prefill(options(plan)), want) < TOLERANCE, plan


@pytest.mark.parametrize("sink", [30.0, -30.0])
def test_the_sink_counts_once(sink: float) -> None:
    case = Paged.make([1500, 40], [1, 1], 0, width=32)
    case.sinks = torch.full_like(case.sinks, sink)
    want, card = case.decode(), case.cuda()
    card.starts = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    for got in (card.decode(options(0, 1)), card.decode(options(0, 8)), card.prefill(options(0))):
        assert worst(got, want) < TOLERANCE


@pytest.mark.parametrize("sink", [60.0, -30.0, -900.0])
def test_sinks_far_from_the_scores_of_a_window(sink: float) -> None:
    case = Paged.make([600, 40], [500, 40], 128, kv_heads=2)
    case.sinks = torch.full_like(case.sinks, sink)
    want, card = case.prefill(), case.cuda()
    for plan in PREFILL_PLANS[128][1:]:
        assert worst(card.prefill(options(plan)), want) < TOLERANCE, plan


def test_results_repeat_under_load() -> None:
    decode = Paged.make([2000, 1, 700], [1, 1, 1], 0, width=32).cuda()
    prefill = Paged.make([900, 300], [700, 300], 128).cuda()
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    expected = decode.decode(options(0)), prefill.prefill(options(0))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        with torch.cuda.stream(other):
            noise @ noise
        different += (decode.decode(options(0)) != expected[0]).sum()
        different += (prefill.prefill(options(0)) != expected[1]).sum()
    assert int(different) == 0


def test_a_graph_gives_the_same_bits() -> None:
    case = Paged.make([2000, 1, 700, 0], [1, 1, 1, 1], 0, width=32).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = case.decode(options(0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = [case.decode(options(0)) for _ in range(5)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, eager) for out in outs)


def test_nan_in_one_cache_stays_in_its_sequence() -> None:
    case = Paged.make([500, 200], [1, 1], 0, width=32).cuda()
    case.k[case.table[0, 3].long()] = float("nan")
    torch.cuda.synchronize()  # a dependent launch reads keys of earlier steps ahead of its wait
    got = case.decode(options(0))
    assert bool(got[0].isnan().all()) and not bool(got[1].isnan().any())


@pytest.mark.parametrize("window", [0, 128])
def test_few_tokens_of_each_sequence(window: int) -> None:
    even = Paged.make([300, 8, 2000], [4, 4, 4], window, width=0 if window else 32)
    assert worst(even.cuda().decode(options(0)), even.decode()) < TOLERANCE
    ragged = Paged.make([300, 8, 2000, 130], [3, 8, 1, 5], window, padding=7)
    assert attention.takes_decode(ragged.q, ragged.k, 4)
    got, want = ragged.cuda().prefill(options(0)), ragged.prefill()
    assert worst(got, want) < TOLERANCE
    assert torch.count_nonzero(got[-7:]) == 0


@pytest.mark.parametrize("window", [0, 128])
def test_an_fp8_cache_goes_to_triton(window: int) -> None:
    case = Paged.make([300, 65], [1, 1], window)
    case.k, case.v = case.k.to(torch.float8_e4m3fn), case.v.to(torch.float8_e4m3fn)
    assert not attention.takes_decode(case.q, case.k, 2) and not attention.takes_prefill(case.q, case.k)
    want, card = case.decode(), case.cuda()
    assert worst(card.decode(options(0)), want) < 2 * TOLERANCE
    assert worst(card.prefill(options(0)), want) < 2 * TOLERANCE
