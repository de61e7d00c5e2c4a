"""Ops that are two others in one phase: the same bits, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gptoss_trt.ops import ops
from gptoss_trt.ops.checks import ArgumentError
from gptoss_trt.ops.prepare import RopeConfig, rope_table
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.act_quant import act_quant

_BF16, _F32, _I32, _FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn
_HEADS, _KV_HEADS, _D, _BLOCK = 4, 1, 64, 16

Random = Callable[..., torch.Tensor]
Outputs = Callable[..., torch.Tensor]


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=_I32)


def _same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [0, 3])
def test_dense_fp8_rope_kv_append(tokens: int, random: Random, outputs: Outputs) -> None:
    segments = [_HEADS * _D, _KV_HEADS * _D, _KV_HEADS * _D]
    parts = [fp8_block.quantise(random(rows, 320, dtype=_F32)) for rows in segments]
    weight = torch.cat([part.weight.view(torch.uint8) for part in parts]).view(_FP8)
    product = (
        *act_quant(random(tokens, 320)), weight, torch.cat([part.scale for part in parts]), segments,
        random(sum(segments)),
    )  # fmt: skip
    rotation = (_ints(5, 0, 9)[:tokens], rope_table(RopeConfig(), 16, torch.device("cpu")), _ints(17, -1, 3)[:tokens])

    def results() -> list[torch.Tensor]:
        caches = [torch.zeros(2, _KV_HEADS, _BLOCK, _D, dtype=_BF16) for _ in "kv"]
        return [outputs(tokens, _HEADS, _D, dtype=_BF16), *caches]

    want, got = results(), results()
    qkv = outputs(tokens, sum(segments), dtype=_BF16)
    ops.dense_fp8(*product, qkv)
    ops.rope_kv_append(qkv, *rotation, 1.0, 1.0, *want)
    ops.dense_fp8_rope_kv_append(*product, *rotation, 1.0, 1.0, *got)
    assert _same(got, want)
    assert tokens == 0 or bool(got[1].any())
    kept = results()  # keys and values alone: the same, by the rows and scales behind q's
    values, scales, weight, units, segments, bias = product
    behind = (weight[segments[0] :], units[2:], [0, *segments[1:]], bias[segments[0] :])
    ops.dense_fp8_rope_kv_append(values, scales, *behind, *rotation, 1.0, 1.0, kept[0][:, :0].clone(), *kept[1:])
    assert _same(kept[1:], want[1:])
    with pytest.raises(
        ArgumentError, match=r"segments are \[192, 64, 128\]; the rows of q, k and v are \[256, 64, 64\]"
    ):
        ops.dense_fp8_rope_kv_append(*product[:4], [192, 64, 128], None, *rotation, 1.0, 1.0, *got)


@pytest.mark.parametrize("tokens", [0, 5])
def test_dense_fp8_add(tokens: int, random: Random, outputs: Outputs) -> None:
    weight = fp8_block.quantise(random(192, 320, dtype=_F32))
    product = (*act_quant(random(tokens, 320)), weight.weight, weight.scale, [], random(192))
    delta, residual = outputs(tokens, 192, dtype=_BF16), random(tokens, 192)
    ops.dense_fp8(*product, delta)
    want = (residual.float() + delta.float()).to(_BF16)
    ops.dense_fp8_add(*product, residual)
    assert _same([residual], [want])
    with pytest.raises(ArgumentError, match="weight_scale has 2 rows, segments need 3"):
        ops.dense_fp8_add(*product[:4], [64, 64, 64], None, residual)


@pytest.mark.parametrize("prefill", [False, True])
def test_quantised_attention(prefill: bool, random: Random, outputs: Outputs) -> None:
    q = random(2, _HEADS, _D)
    starts = (_ints(0, 1, 2),) if prefill else ()
    inputs = (
        q, random(2, _KV_HEADS, _BLOCK, _D), random(2, _KV_HEADS, _BLOCK, _D), _ints(0, 1).view(2, 1), None, *starts,
        _ints(9, 16), random(_HEADS), 0, _D**-0.5, 1.0, 1.0,
    )  # fmt: skip
    name = "attention_prefill" if prefill else "attention_decode"
    out = outputs(2, _HEADS, _D, dtype=_BF16)
    getattr(ops, name)(*inputs, out)
    want, got = ([outputs(2, _HEADS * _D, dtype=_FP8), outputs(2, 2, dtype=_F32)] for _ in range(2))
    ops.act_quant(out.flatten(1), 128, *want)
    getattr(ops, f"{name}_quant")(*inputs, *got)
    assert _same(got, want)
    with pytest.raises(ArgumentError, match="quantised has 192 columns; 4 heads have 64 each"):
        getattr(ops, f"{name}_quant")(*inputs, torch.zeros(2, 192).to(_FP8), torch.zeros(2, 2))
