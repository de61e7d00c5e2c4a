"""The table of a rank's tensors, and the cuts of every mapping."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from gptoss_trt.build_engine.spec import (
    Formats,
    ModelConfig,
    ParallelMapping,
    SpecError,
    check_mapping,
    expected_tensors,
    rank_share,
)

GPT_OSS_20B = ModelConfig(
    num_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    experts_per_token=4,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=201088,
    layer_types=("sliding_attention", "full_attention") * 12,
)
BYTES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}
MAPPINGS = [
    ParallelMapping(tp, ep, dp)
    for tp, ep, dp in itertools.product((1, 2, 4, 8), repeat=3)
    if tp * dp <= 8 and (tp * dp) % ep == 0
]


def widths(mapping: ParallelMapping, field: str) -> list[int]:
    shares = [rank_share(GPT_OSS_20B, mapping, rank) for rank in range(mapping.world)]
    return [getattr(share, field)[1] - getattr(share, field)[0] for share in shares]


def test_intermediates_are_cut_as_designed() -> None:
    assert widths(ParallelMapping(tp=2), "intermediates") == [1536, 1344]
    assert widths(ParallelMapping(tp=4), "intermediates") == [768, 768, 768, 576]
    assert widths(ParallelMapping(tp=8), "intermediates") == [384] * 7 + [192]
    assert widths(ParallelMapping(tp=8, ep=4), "intermediates") == [1536, 1344] * 4
    assert widths(ParallelMapping(tp=2, dp=4), "intermediates") == [384] * 7 + [192]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_every_mapping_covers_the_model_once(mapping: ParallelMapping) -> None:
    shares = [rank_share(GPT_OSS_20B, mapping, rank) for rank in range(mapping.world)]
    first_group = shares[: mapping.tp]
    for field, total in (("q_heads", 64), ("kv_heads", 8), ("vocab", 201088)):
        edges = [getattr(share, field) for share in first_group]
        assert [edges[0][0], *(end for _, end in edges)] == [*(start for start, _ in edges), total]
        assert all(start % 128 == 0 for start, _ in edges) or field != "vocab"
    cells = {(share.experts, share.intermediates) for share in shares}
    assert len(cells) == mapping.world
    assert sum((e[1] - e[0]) * (i[1] - i[0]) for e, i in cells) == 32 * 2880
    assert sum(share.adds_attention_bias for share in first_group) == 1
    assert sum(share.adds_expert_bias for share in shares) == mapping.ep


def test_sizes_of_the_real_model() -> None:
    def stored(experts: str, dense: str) -> float:
        table = expected_tensors(GPT_OSS_20B, Formats(experts=experts, dense=dense), ParallelMapping(), 0)
        return sum(math.prod(shape) * BYTES[dtype] for shape, dtype in table.values()) / 1e9

    assert stored("mxfp4", "bf16") == pytest.approx(10.15 + 3.6, abs=0.1)
    assert stored("fp8_block128", "bf16") == pytest.approx(19.1 + 3.6, abs=0.1)


def test_fp8_scales_begin_anew_at_q_k_and_v() -> None:
    formats = Formats(dense="fp8_block128")
    unsharded = expected_tensors(GPT_OSS_20B, formats, ParallelMapping(), 0)
    assert unsharded["layers.0.attention.qkv.weight_scale"] == ((40, 23), "F32")
    tp8 = expected_tensors(GPT_OSS_20B, formats, ParallelMapping(tp=8), 0)
    assert tp8["layers.0.attention.qkv.weight"] == ((640, 2880), "F8_E4M3")
    assert tp8["layers.0.attention.qkv.weight_scale"] == ((6, 23), "F32")
    assert tp8["layers.0.attention.out.weight_scale"] == ((23, 4), "F32")
    assert tp8["layers.0.moe.down.blocks"] == ((32, 2880, 12, 16), "U8")


def test_fp8_kv_brings_its_scales() -> None:
    table = expected_tensors(GPT_OSS_20B, Formats(kv="fp8"), ParallelMapping(), 0)
    assert table["layers.3.attention.k_scale"] == table["layers.3.attention.v_scale"] == ((1,), "F32")


@pytest.mark.parametrize(
    ("change", "mapping", "message"),
    [
        ({"num_kv_heads": 2}, {"tp": 4}, "tp 4 does not divide 2 KV heads"),
        ({"num_experts": 4}, {"tp": 8, "ep": 8}, "ep 8 does not divide 4 experts"),
        ({"intermediate_size": 192}, {"tp": 4}, "192 expert intermediates are 2 cuts of 128, too few for 4"),
        ({"vocab_size": 200}, {"tp": 4}, "200 vocabulary rows are 2 cuts of 128"),
        ({"head_dim": 96, "num_kv_heads": 4}, {"tp": 2}, "leaves 192 rows of k and v"),
    ],
)
def test_refusals_name_the_sizes(change: dict[str, int], mapping: dict[str, int], message: str) -> None:
    config = dataclasses.replace(GPT_OSS_20B, **change)
    with pytest.raises(SpecError, match=message):
        check_mapping(config, Formats(dense="fp8_block128"), ParallelMapping(**mapping))


def test_other_sizes_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="tp is 3; allowed: 1, 2, 4, 8"):
        ParallelMapping(tp=3)
    with pytest.raises(SpecError, match="rank 2 is outside"):
        rank_share(GPT_OSS_20B, ParallelMapping(tp=2), 2)
    with pytest.raises(SpecError, match="sm90_v1"):
        expected_tensors(GPT_OSS_20B, Formats(weight_layout="sm90_v1"), ParallelMapping(), 0)
