"""The Triton attention kernels against the CPU ops: sinks, windows, split ranges, ragged chunks, FP8 caches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.triton_kernels import attention

pytestmark = pytest.mark.interpret
OPS = torch.ops.gptoss_trt
KV_HEADS, GROUP, D, BLOCK_TOKENS = 2, 8, 64, 16
HEADS = KV_HEADS * GROUP


@dataclass
class Cache:
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    first: torch.Tensor | None


def make_cache(
    contexts: list[int], windowed_from: list[int] | None = None, dtype: torch.dtype = torch.bfloat16
) -> Cache:
    """Shuffled blocks for each context; blocks below windowed_from are not kept. Unused blocks hold NaN."""
    needed = [-(-context // BLOCK_TOKENS) for context in contexts]
    first = windowed_from or [0] * len(contexts)
    total = sum(needed) + 3
    k, v = (torch.full((total, KV_HEADS, BLOCK_TOKENS, D), float("nan")) for _ in range(2))
    order = torch.randperm(total).tolist()
    table = torch.full((len(contexts), max([1, *needed])), -1, dtype=torch.int32)
    for s, count in enumerate(needed):
        for entry in range(first[s], count):
            block = order.pop()
            table[s, entry - first[s]] = block
            k[block], v[block] = torch.randn(2, KV_HEADS, BLOCK_TOKENS, D)
    starts = torch.tensor(first, dtype=torch.int32) if windowed_from else None
    return Cache(k.to(dtype), v.to(dtype), table, starts)


def sinks(size: float = 3.0) -> torch.Tensor:
    return (torch.randn(HEADS) + size).to(torch.bfloat16)


def assert_rows_close(got: torch.Tensor, want: torch.Tensor, eps: float = 2**-6) -> None:
    """Worst row: the largest difference over the row's largest magnitude."""
    difference = (got.float() - want.float()).abs().amax(-1)
    size = want.float().abs().amax(-1).clamp(min=1e-3)
    assert float((difference / size).max()) < eps


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize("sink", [3.0, 30.0, -30.0])
def test_prefill_of_ragged_chunks(window: int, sink: float) -> None:
    contexts, fresh = [70, 33, 1, 48], [70, 5, 1, 17]
    query_start = torch.tensor([0, 70, 75, 76, 93], dtype=torch.int32)
    lows = (
        [max(0, c - n - window + 1) // BLOCK_TOKENS for c, n in zip(contexts, fresh, strict=True)] if window else None
    )
    cache = make_cache(contexts, lows)
    q = torch.randn(95, HEADS, D).to(torch.bfloat16)  # two rows of padding
    context_lens, sink_logits = torch.tensor(contexts, dtype=torch.int32), sinks(sink)
    got, want = (torch.full_like(q, 77.0) for _ in range(2))
    for function, out in ((attention.attention_prefill, got), (OPS.attention_prefill, want)):
        function(q, cache.k, cache.v, cache.table, cache.first, query_start, context_lens, sink_logits, window,
                 0.125, 1.0, 1.0, out)  # fmt: skip
    assert_rows_close(got, want)
    assert torch.count_nonzero(got[93:]) == 0


@pytest.mark.parametrize("context", [1, 31, 32, 33, 600])
@pytest.mark.parametrize("window", [0, 32])
def test_decode_at_window_edges_and_over_splits(context: int, window: int) -> None:
    contexts = [context, 5, 0]
    lows = [max(0, c - window) // BLOCK_TOKENS for c in contexts] if window else None
    cache = make_cache(contexts, lows)
    q, sink_logits = torch.randn(3, HEADS, D).to(torch.bfloat16), sinks()
    got, want = (torch.full_like(q, 77.0) for _ in range(2))
    for function, out in ((attention.attention_decode, got), (OPS.attention_decode, want)):
        function(q, cache.k, cache.v, cache.table, cache.first, torch.tensor(contexts, dtype=torch.int32), sink_logits,
                 window, 0.125, 1.0, 1.0, out)  # fmt: skip
    assert_rows_close(got, want)
    assert torch.count_nonzero(got[2]) == 0


@pytest.mark.parametrize("queries", [2, 4])
def test_decode_of_several_tokens(queries: int) -> None:
    contexts = [40, 9]
    cache = make_cache(contexts)
    q, sink_logits = torch.randn(2 * queries, HEADS, D).to(torch.bfloat16), sinks()
    got, want = (torch.full_like(q, 77.0) for _ in range(2))
    for function, out in ((attention.attention_decode, got), (OPS.attention_decode, want)):
        function(q, cache.k, cache.v, cache.table, None, torch.tensor(contexts, dtype=torch.int32), sink_logits, 0,
                 0.125, 1.0, 1.0, out)  # fmt: skip
    assert_rows_close(got, want)


def test_fp8_cache_with_scales() -> None:
    cache = make_cache([50], dtype=torch.float8_e4m3fn)
    q, sink_logits = torch.randn(1, HEADS, D).to(torch.bfloat16), sinks()
    got, want = (torch.full_like(q, 77.0) for _ in range(2))
    for function, out in ((attention.attention_decode, got), (OPS.attention_decode, want)):
        function(q, cache.k, cache.v, cache.table, None, torch.tensor([50], dtype=torch.int32), sink_logits, 0, 0.125,
                 0.5, 2.0, out)  # fmt: skip
    assert_rows_close(got, want, 2**-5)


def test_dropping_the_sink_would_be_seen() -> None:
    cache = make_cache([20])
    q = torch.randn(1, HEADS, D).to(torch.bfloat16)
    outs = []
    for sink in (3.0, -100.0):
        out = torch.empty_like(q)
        attention.attention_decode(q, cache.k, cache.v, cache.table, None, torch.tensor([20], dtype=torch.int32),
                                   torch.full((HEADS,), sink).to(torch.bfloat16), 0, 0.125, 1.0, 1.0, out)  # fmt: skip
        outs.append(out)
    with pytest.raises(AssertionError):
        assert_rows_close(*outs)


def test_blocks_of_other_sizes_are_refused() -> None:
    q = torch.zeros(1, HEADS, D, dtype=torch.bfloat16)
    cache = torch.zeros(2, KV_HEADS, 12, D, dtype=torch.bfloat16)
    table, ones = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="not of 12"):
        attention.attention_decode(q, cache, cache, table, None, ones, sinks(), 0, 0.125, 1.0, 1.0, q)
