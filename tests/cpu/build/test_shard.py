"""Cuts as numbers: what every rank takes of every weight."""

from __future__ import annotations

import dataclasses

import pytest

from gptoss_trt.build_engine import shard
from gptoss_trt.build_engine.spec import ModelConfig, ParallelMapping
from gptoss_trt.build_engine.synthetic import small_config

BIG = dataclasses.replace(
    small_config(), hidden_size=2880, intermediate_size=2880, num_heads=64, num_kv_heads=8, head_dim=64, num_experts=32,
    vocab_size=201088,
)  # fmt: skip


def cuts(stem: str, config: ModelConfig, **mapping: int) -> list[shard.Cut]:
    take = shard.cut_expert if stem.startswith(("gate_up", "down")) else shard.cut_attention_and_dense
    return [take(stem, config, share) for share in shard.shares(config, ParallelMapping(**mapping))]


def test_gate_up_takes_both_rows_of_an_intermediate() -> None:
    assert [cut.rows for cut in cuts("gate_up.weight", BIG, tp=2)] == [((0, 3072),), ((3072, 5760),)]
    assert [cut.scale_rows() for cut in cuts("gate_up.weight", BIG, tp=2)] == [((0, 24),), ((24, 45),)]
    assert [cut.columns for cut in cuts("down.weight", BIG, tp=2)] == [(0, 1536), (1536, 2880)]
    assert [cut.scale_columns() for cut in cuts("down.weight", BIG, tp=2)] == [(0, 12), (12, 23)]


def test_qkv_takes_the_rows_of_its_heads() -> None:
    third = cuts("attention.qkv.weight", BIG, tp=8)[3]
    assert third.rows == ((1536, 2048), (4096 + 192, 4096 + 256), (4608 + 192, 4608 + 256))
    assert third.shape == (640, 2880)


def test_ranks_that_share_a_block_both_keep_its_scale() -> None:
    """At TP8 k and v of a rank are 64 rows: half a block of 128."""
    second, third = cuts("attention.qkv.weight", BIG, tp=8)[2:4]
    assert second.scale_rows() == ((8, 12), (33, 34), (37, 38))
    assert third.scale_rows() == ((12, 16), (33, 34), (37, 38))


def test_one_rank_adds_a_bias() -> None:
    assert [cut.zero for cut in cuts("attention.out.bias", BIG, tp=2, dp=2)] == [False, True, False, True]
    assert [cut.zero for cut in cuts("down.bias", BIG, tp=4, ep=2)] == [False, True, False, True]
    assert not any(cut.zero for cut in cuts("attention.qkv.bias", BIG, tp=4))


def test_vocabulary_chunks_meet_the_ranks() -> None:
    first, second = (cut.rows[0] for cut in cuts("lm_head.weight", BIG, tp=2))
    assert first == (0, 786 * 128)
    assert second == (786 * 128, 201088)
    assert shard.local_rows(first, (785 * 128, 787 * 128)) == ((785 * 128, 786 * 128), 785 * 128)
    assert shard.local_rows(second, (785 * 128, 787 * 128)) == ((786 * 128, 787 * 128), 0)
    assert shard.local_rows(second, (0, 128)) is None


def test_unknown_weights_have_no_cut() -> None:
    with pytest.raises(KeyError, match="rope"):
        cuts("attention.rope", BIG)
    with pytest.raises(KeyError, match="scale"):
        cuts("down.scale", BIG)
