"""Paged attention against a dense softmax with a sink: window edges, chunks, both pools, an FP8 cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from gptoss_trt.ops import ops
from gptoss_trt.reference.tolerance import TOLERANCES, assert_close, worst

_BF16, _I32, _FP8 = torch.bfloat16, torch.int32, torch.float8_e4m3fn

Random = Callable[..., torch.Tensor]
Outputs = Callable[..., torch.Tensor]

_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 32, 16
_SCALE = _DIM**-0.5


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=_I32)


def _dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int, first: int
) -> torch.Tensor:
    """One softmax over all keys and the sink, query by query and head by head. q [n, heads, D]; k, v [L, kv, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        position = first + i
        low = max(0, position - window + 1) if window else 0
        for head in range(_HEADS):
            keys = k[low : position + 1, head // (_HEADS // _KV_HEADS)].double()
            logits = torch.cat((keys @ q[i, head].double() * _SCALE, sinks[head].double().view(1)))
            weights = torch.softmax(logits, 0)[:-1]
            out[i, head] = weights @ v[low : position + 1, head // (_HEADS // _KV_HEADS)].double()
    return out


@dataclass
class Paged:
    """Sequences laid into a cache in shuffled blocks; what no query may read is NaN."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    first: torch.Tensor | None


def _paged(lengths: list[int], random: Random, freed_before: list[int] | None = None) -> Paged:
    """`freed_before`: positions below it are gone from the cache (window pool), rounded down to whole blocks."""
    total = sum(-(-length // _BLOCK) for length in lengths) + 1
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
    caches = [torch.full((total, _KV_HEADS, _BLOCK, _DIM), float("nan"), dtype=_BF16) for _ in range(2)]
    first = [(f // _BLOCK) for f in freed_before] if freed_before else [0] * len(lengths)
    widest = max(-(-length // _BLOCK) - f for length, f in zip(lengths, first, strict=True))
    table = torch.full((len(lengths), widest), -1, dtype=_I32)
    ks, vs = [], []
    for s, length in enumerate(lengths):
        k, v = random(length, _KV_HEADS, _DIM), random(length, _KV_HEADS, _DIM)
        ks.append(k)
        vs.append(v)
        for block in range(first[s], -(-length // _BLOCK)):
            physical = order.pop()
            table[s, block - first[s]] = physical
            for cache, values in zip(caches, (k, v), strict=True):
                part = values[block * _BLOCK : (block + 1) * _BLOCK]
                cache[physical, :, : len(part)] = part.transpose(0, 1)
    return Paged(ks, vs, *caches, table, _ints(*first) if freed_before else None)


def _decode(
    paged: Paged, q: torch.Tensor, lengths: list[int], sinks: torch.Tensor, window: int, out: torch.Tensor
) -> None:
    ops.attention_decode(
        q, paged.k_cache, paged.v_cache, paged.table, paged.first, _ints(*lengths), sinks, window, _SCALE, 1.0, 1.0, out
    )


def _prefill(
    paged: Paged,
    q: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    sinks: torch.Tensor,
    window: int,
    out: torch.Tensor,
) -> None:
    ops.attention_prefill(
        q, paged.k_cache, paged.v_cache, paged.table, paged.first, _ints(*starts), _ints(*lengths), sinks, window,
        _SCALE, 1.0, 1.0, out,
    )  # fmt: skip


_SINKS = torch.tensor([3.0, -2.0, 3.5, 2.5], dtype=_BF16)


@pytest.mark.parametrize("window", [0, 128, 17])
def test_decode_at_window_edges(window: int, random: Random, outputs: Outputs) -> None:
    lengths = [1, 16, 17, 127, 128, 129, 144, 145, 300]
    freed = [max(0, n - window) for n in lengths] if window else None
    paged = _paged(lengths, random, freed)
    q = random(len(lengths), _HEADS, _DIM) * 3
    out = outputs(len(lengths), _HEADS, _DIM, dtype=_BF16)
    _decode(paged, q, lengths, _SINKS, window, out)
    for s, n in enumerate(lengths):
        expected = _dense_attention(q[s : s + 1], paged.k[s], paged.v[s], _SINKS, window, n - 1)
        assert_close("attention_decode", out[s], expected[0].to(_BF16))


def test_the_tolerance_sees_a_window_off_by_one_and_a_lost_sink(random: Random) -> None:
    paged = _paged([300], random)
    q = random(1, _HEADS, _DIM) * 3
    q[0, 0] = paged.k[0][300 - 128, 0] * 4  # the oldest visible key matters
    right = _dense_attention(q, paged.k[0], paged.v[0], _SINKS, 128, 299)[0]
    tolerance = TOLERANCES["attention_decode"]
    for window, sinks in ((127, _SINKS), (128, _SINKS - 100.0), (129, _SINKS + 1.0)):
        wrong = _dense_attention(q, paged.k[0], paged.v[0], sinks, window, 299)[0]
        assert worst(tolerance, wrong.to(_BF16), right.to(_BF16)) > 1, (window, sinks)


@pytest.mark.parametrize("window", [0, 128])
def test_prefill_of_ragged_chunks(window: int, random: Random, outputs: Outputs) -> None:
    lengths, new = [5, 260, 129, 200], [5, 150, 1, 200]
    freed = [max(0, n - m - window + 1) for n, m in zip(lengths, new, strict=True)] if window else None
    paged = _paged(lengths, random, freed)
    starts = [0, 5, 155, 156, 356]
    q = random(360, _HEADS, _DIM) * 2  # four rows of padding
    out = outputs(360, _HEADS, _DIM, dtype=_BF16)
    _prefill(paged, q, starts, lengths, _SINKS, window, out)
    assert not bool(out[356:].any())
    for s, n in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        expected = _dense_attention(q[rows], paged.k[s], paged.v[s], _SINKS, window, n - new[s])
        assert_close("attention_prefill", out[rows].flatten(1), expected.to(_BF16).flatten(1))


@pytest.mark.parametrize("window", [0, 128])
def test_one_piece_chunks_and_single_tokens_agree_to_the_bit(window: int, random: Random, outputs: Outputs) -> None:
    n = 290
    paged = _paged([n], random)
    q = random(n, _HEADS, _DIM) * 2
    whole = outputs(n, _HEADS, _DIM, dtype=_BF16)
    _prefill(paged, q, [0, n], [n], _SINKS, window, whole)
    for cuts in ([0, 127, 128, 256, n], [0, 1, 130, n]):
        for low, high in itertools.pairwise(cuts):
            part = outputs(high - low, _HEADS, _DIM, dtype=_BF16)
            _prefill(paged, q[low:high], [0, high - low], [high], _SINKS, window, part)
            assert torch.equal(part, whole[low:high])
    for position in (0, 126, 127, 128, 129, n - 1):
        one = outputs(1, _HEADS, _DIM, dtype=_BF16)
        _decode(paged, q[position : position + 1], [position + 1], _SINKS, window, one)
        assert torch.equal(one[0], whole[position])


def test_several_queries_a_sequence_and_padding(random: Random, outputs: Outputs) -> None:
    lengths = [40, 0, 9]
    paged = _paged([40, 1, 9], random)
    q = random(9, _HEADS, _DIM)
    out = outputs(9, _HEADS, _DIM, dtype=_BF16)
    _decode(paged, q, lengths, _SINKS, 0, out)
    assert not bool(out[3:6].any())
    for s in (0, 2):
        rows = slice(3 * s, 3 * s + 3)
        expected = _dense_attention(q[rows], paged.k[s], paged.v[s], _SINKS, 0, lengths[s] - 3)
        assert_close("attention_decode", out[rows].flatten(1), expected.to(_BF16).flatten(1))


def test_fp8_cache_with_scales(random: Random, outputs: Outputs) -> None:
    paged = _paged([50], random)
    k_scale, v_scale = 0.5, 0.25
    k8 = (paged.k_cache.float() / k_scale).nan_to_num(0).to(_FP8)
    v8 = (paged.v_cache.float() / v_scale).nan_to_num(0).to(_FP8)
    k = (paged.k[0].float() / k_scale).to(_FP8).float() * k_scale
    v = (paged.v[0].float() / v_scale).to(_FP8).float() * v_scale
    q = random(1, _HEADS, _DIM)
    out = outputs(1, _HEADS, _DIM, dtype=_BF16)
    ops.attention_decode(q, k8, v8, paged.table, None, _ints(50), _SINKS, 0, _SCALE, k_scale, v_scale, out)
    assert_close("attention_decode", out[0], _dense_attention(q, k, v, _SINKS, 0, 49)[0].to(_BF16))


def test_large_logits_and_sinks_stay_finite(random: Random, outputs: Outputs) -> None:
    paged = _paged([20], random)
    q = random(1, _HEADS, _DIM) * 1e4
    sinks = torch.tensor([1e4, -1e4, 0.0, 3e38], dtype=_BF16)
    out = outputs(1, _HEADS, _DIM, dtype=_BF16)
    _decode(paged, q, [20], sinks, 0, out)
    assert bool(out.isfinite().all())
    assert not bool(out[0, 3].any())  # the sink takes everything


def test_a_missing_block_is_named(random: Random, outputs: Outputs) -> None:
    paged = _paged([40], random)
    paged.table[0, 1] = -1
    with pytest.raises(ValueError, match="sequence 0 needs keys 0 to 39, entries 0 to 2 of its block table"):
        _decode(paged, random(1, _HEADS, _DIM), [40], _SINKS, 0, outputs(1, _HEADS, _DIM, dtype=_BF16))
    with pytest.raises(ValueError, match="sequence 0 has 3 queries but a context of 2 keys"):
        _prefill(paged, random(3, _HEADS, _DIM), [0, 3], [2], _SINKS, 0, outputs(3, _HEADS, _DIM, dtype=_BF16))


def test_empty_batch(outputs: Outputs) -> None:
    from gptoss_trt.ops import attention as on_gpu  # brings Triton, whose interpreter the interpret tier chooses first

    cache = torch.zeros(1, _KV_HEADS, _BLOCK, _DIM, dtype=_BF16)
    empty = torch.zeros(0, _HEADS, _DIM, dtype=_BF16)
    table = torch.zeros(0, 1, dtype=_I32)
    out = outputs(0, _HEADS, _DIM, dtype=_BF16)
    numbers = (_SINKS, 0, _SCALE, 1.0, 1.0)
    ops.attention_prefill(empty, cache, cache, table, None, _ints(0), _ints(), *numbers, out)
    decode = (empty, cache, cache, table, None, _ints(), *numbers)
    quantised = outputs(0, _HEADS * _DIM, dtype=_FP8), outputs(1, 0, dtype=torch.float32)
    ops.attention_decode(*decode, out)
    ops.attention_decode_quant(*decode, *quantised)
    on_gpu.attention_decode(*decode, out)
    on_gpu.attention_decode_quant(*decode, *quantised)
