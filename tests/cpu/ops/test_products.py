"""Dense and expert products against exact sums of the same FP8 numbers, and the mistakes that must be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from gptoss_trt.ops import ops, weight_layout
from gptoss_trt.ops.cpu_weights import Fp16Product, Fp32Product, ProductCache, make_product
from gptoss_trt.reference import fp8_block, mxfp4
from gptoss_trt.reference.act_quant import act_dequant, act_quant
from gptoss_trt.reference.moe_route import sort_rows
from gptoss_trt.reference.product import absolute_bound
from gptoss_trt.reference.tolerance import TOLERANCES, assert_close, ulp_distance, worst

_BF16, _F32, _I32, _FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn

Random = Callable[..., torch.Tensor]
Outputs = Callable[..., torch.Tensor]


@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
@pytest.mark.parametrize("out_dtype", [_BF16, _F32])
def test_dense(tokens: int, out_dtype: torch.dtype, random: Random, outputs: Outputs) -> None:
    x, weight, bias = random(tokens, 90), random(70, 90), random(70)
    if tokens:
        x[0, 7] = 3000.0
    out = outputs(tokens, 70, dtype=out_dtype)
    ops.dense(x, weight, bias, out)
    exact = x.double() @ weight.double().T
    bound = absolute_bound(x, weight) + bias.abs()
    assert_close("dense", out, (exact + bias).to(out_dtype), bound)
    without = outputs(tokens, 70, dtype=out_dtype)
    ops.dense(x, weight, None, without)
    assert_close("dense", without, exact.to(out_dtype), bound)


@pytest.mark.parametrize("segments", [(), (256, 40, 40)])
def test_dense_fp8_with_segments(segments: tuple[int, ...], random: Random, outputs: Outputs) -> None:
    parts = segments or (336,)
    quantised = [fp8_block.quantise(random(rows, 320, dtype=_F32) * 2.0**i) for i, rows in enumerate(parts)]
    weight = torch.cat([q.weight.view(torch.uint8) for q in quantised]).view(_FP8)
    scale = torch.cat([q.scale for q in quantised])
    codes, x_scale = act_quant(random(9, 320))
    bias = random(336)
    out = outputs(9, 336, dtype=_F32)
    ops.dense_fp8(codes, x_scale, weight, scale, list(segments), bias, out)
    wide = torch.cat([fp8_block.dequantise(q.weight, q.scale, torch.float64) for q in quantised])
    x = act_dequant(codes, x_scale).double()
    assert_close("dense_fp8", out, (x @ wide.T + bias).float(), absolute_bound(x, wide))


def test_dense_fp8_refuses_wrong_segments(random: Random) -> None:
    q = fp8_block.quantise(random(336, 320, dtype=_F32))
    codes, x_scale = act_quant(random(1, 320))
    out = torch.zeros(1, 336)
    with pytest.raises(ValueError, match="add up to 300, weight has 336 rows"):
        ops.dense_fp8(codes, x_scale, q.weight, q.scale, [200, 100], None, out)
    with pytest.raises(ValueError, match="weight_scale has 3 rows, segments need 4"):
        ops.dense_fp8(codes, x_scale, q.weight, q.scale, [200, 136], None, out)


@dataclass
class Layer:
    """One expert layer: H and I with tails, more rows for an expert than a block, an expert with none."""

    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]
    gate_up_wide: torch.Tensor
    down_wide: torch.Tensor
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor
    x: tuple[torch.Tensor, torch.Tensor]
    ids: torch.Tensor
    weights: torch.Tensor


_H, _I, _E = 288, 224, 4


def _layer(storage: str, random: Random, tokens: int = 150) -> Layer:
    packed, wide = [], []
    for rows, columns in ((2 * _I, _H), (_H, _I)):
        values = random(_E, rows, columns, dtype=_F32) / columns**0.5
        values[:, :128] *= 16  # neighbouring blocks differ, so a neighbour's scale shows
        blocks, scales, _ = mxfp4.encode(values)
        if storage == "mxfp4":
            packed.append((blocks, scales))
        else:
            weight, scale, _ = fp8_block.from_mxfp4(blocks, scales)
            packed.append((weight, scale))
        wide.append(mxfp4.decode(blocks, scales, torch.float64))
    x = random(tokens, _H)
    if tokens > 2:
        x[0] = 0
        x[1, 3] = 500.0
    codes, x_scale = act_quant(x)
    assert x_scale is not None
    ids = torch.tensor([[0, 1, 3, 0]] * tokens, dtype=_I32).view(tokens, 4)  # expert 2 has none, 0 has two slots
    weights = torch.softmax(random(tokens, 4, dtype=_F32), dim=1).to(_BF16).float()
    return Layer(*packed, *wide, random(_E, 2 * _I) * 2, random(_E, _H), (codes, x_scale), ids, weights)


def _first_product(layer: Layer, wide: torch.Tensor, bias: torch.Tensor, token: int, expert: int) -> torch.Tensor:
    """y of one token and expert, fp64, by the definition."""
    x = act_dequant(*layer.x)[token].double()
    return wide[expert] @ x + bias[expert].double()


def _activated(y: torch.Tensor) -> torch.Tensor:
    gate, up = y[0::2].clamp(max=7.0), y[1::2].clamp(-7.0, 7.0)
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


def _run_gate_up(layer: Layer, group: int, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = sort_rows(layer.ids, 0, _E)
    total = layer.ids.numel()
    h = outputs(total, _I, dtype=_FP8)
    scale = outputs(-(-_I // group), total, dtype=_F32) if group else None
    ops.moe_gate_up(
        *layer.x, *layer.gate_up, layer.gate_up_bias, rows.offsets, rows.active, rows.slots, 4, 7.0, 1.702, "plain",
        group, h, scale,
    )  # fmt: skip
    return h, scale


@pytest.mark.parametrize("storage", ["mxfp4", "fp8_block128"])
@pytest.mark.parametrize("group", [128, 64, 0])
def test_gate_up(storage: str, group: int, random: Random, outputs: Outputs) -> None:
    layer = _layer(storage, random)
    h, scale = _run_gate_up(layer, group, outputs)
    expected = torch.stack(
        [
            _activated(
                _first_product(layer, layer.gate_up_wide, layer.gate_up_bias, row // 4, int(layer.ids.view(-1)[row]))
            )
            for row in sort_rows(layer.ids, 0, _E).slots.tolist()
        ]
    ).float()
    codes, scales = act_quant(expected, group)
    # A sum that lands on the other side of a rounding boundary moves a code by one step.
    assert int(ulp_distance(h, codes).max()) <= 1
    assert float((h.view(torch.uint8) == codes.view(torch.uint8)).float().mean()) > 0.995
    if scale is not None:
        assert scales is not None
        assert torch.allclose(scale, scales, rtol=2**-12)


@pytest.mark.parametrize("storage", ["mxfp4", "fp8_block128"])
def test_down(storage: str, random: Random, outputs: Outputs) -> None:
    layer = _layer(storage, random)
    rows = sort_rows(layer.ids, 0, _E)
    h, h_scale = act_quant(random(layer.ids.numel(), _I), 128)
    out = outputs(len(layer.ids), 4, _H, dtype=_BF16)
    ops.moe_down(
        h,
        h_scale,
        *layer.down,
        layer.down_bias,
        layer.weights,
        rows.offsets,
        rows.active,
        rows.slots,
        "plain",
        128,
        out,
    )
    wide = act_dequant(h, h_scale).double()
    for row, slot in enumerate(rows.slots.tolist()):
        expert, weight = int(layer.ids.view(-1)[slot]), layer.weights.view(-1)[slot].double()
        exact = weight * (layer.down_wide[expert] @ wide[row] + layer.down_bias[expert].double())
        bound = weight * (layer.down_wide[expert].abs() @ wide[row].abs() + layer.down_bias[expert].abs())
        assert_close("moe_down", out.view(-1, _H)[slot].unsqueeze(0), exact.to(_BF16).unsqueeze(0), bound.unsqueeze(0))


@pytest.mark.parametrize("storage", ["mxfp4", "fp8_block128"])
def test_packed_layout_gives_the_same_bits(storage: str, random: Random, outputs: Outputs) -> None:
    layer = _layer(storage, random, tokens=5)
    plain, plain_scale = _run_gate_up(layer, 128, outputs)
    pack = weight_layout.pack_mxfp4 if storage == "mxfp4" else weight_layout.pack_fp8
    packed = pack(*layer.gate_up)
    empty = layer.gate_up[1].new_empty(0)
    rows = sort_rows(layer.ids, 0, _E)
    h, scale = outputs(20, _I, dtype=_FP8), outputs(2, 20, dtype=_F32)
    tail = (layer.gate_up_bias, rows.offsets, rows.active, rows.slots, 4, 7.0, 1.702, "sm90_v1", 128, h, scale)
    ops.moe_gate_up(*layer.x, packed, empty, *tail)
    assert torch.equal(h.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(scale, plain_scale)
    with pytest.raises(ValueError, match="weight_scale of a packed layout is an empty"):
        ops.moe_gate_up(*layer.x, packed, layer.gate_up[1], *tail)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.moe_gate_up(*layer.x, packed[:, :-128].contiguous(), empty, *tail)


def test_down_leaves_other_ranks_rows_alone(random: Random, outputs: Outputs) -> None:
    layer = _layer("fp8_block128", random, tokens=3)
    rows = sort_rows(layer.ids, 1, 2)  # this rank holds experts 1 and 2
    h, h_scale = act_quant(random(12, _I), 128)
    down = (layer.down[0][1:3].clone(), layer.down[1][1:3].clone())
    out = torch.full((3, 4, _H), 77.0)
    args = (layer.weights, rows.offsets, rows.active, rows.slots, "plain", 128, out)
    ops.moe_down(h, h_scale, *down, None, *args)
    assert bool((out[:, [0, 2, 3]] == 77.0).all())
    assert not bool((out[:, 1] == 77.0).any())


def test_a_large_bias_survives_a_small_activation_scale(outputs: Outputs) -> None:
    """Bias 1e3 under activation scale 1e-3: a bias that an FP8 block's scale touched would be lost."""
    x = torch.full((1, _H), 1e-3 * 448, dtype=_BF16)
    codes, x_scale = act_quant(x)
    assert float(x_scale[0, 0]) == pytest.approx(1e-3, rel=0.01)
    weight = torch.zeros(1, 2 * _I, _H).to(_FP8)
    bias = torch.full((1, 2 * _I), -1.0, dtype=_BF16)
    bias[0, 0::2] = 1e3  # gate clamps to 7
    bias[0, 1::2] = 1e3
    rows = sort_rows(torch.zeros(1, 1, dtype=_I32), 0, 1)
    h = outputs(1, _I, dtype=_FP8)
    scale = torch.ones(1, -(-2 * _I // 128), -(-_H // 128))
    ops.moe_gate_up(
        codes, x_scale, weight, scale, bias, rows.offsets, rows.active, rows.slots, 1, 7.0, 1.702, "plain", 0, h, None
    )
    assert bool((h.float() == 448.0).all())  # 7 * sigmoid(11.9) * 8 = 56 = 448 / 8


def test_mutations_fall_outside_the_tolerance(random: Random) -> None:
    """KERNELS' list: each mistake in the exact sum is seen by ROW(2^-12) of the product, and not by luck."""
    layer = _layer("fp8_block128", random, tokens=3)
    right = layer.gate_up_wide[0]
    bias = layer.gate_up_bias[0].double()
    x = act_dequant(*layer.x)[1:].double()  # token 0 is all zeros
    exact = x @ right.T + bias
    bound = absolute_bound(x, right) + bias.abs()
    scale = layer.gate_up[1][0].double()
    unscaled = layer.gate_up[0][0].double()

    def with_scale(changed: torch.Tensor) -> torch.Tensor:
        return x @ (unscaled * fp8_block.expand_blocks(changed, 2 * _I, _H)).T + bias

    no_tail = x.clone()
    no_tail[:, 256:] = 0
    mutations = {
        "bias dropped": exact - bias,
        "K tail dropped": no_tail @ right.T + bias,
        "neighbour's scale along K": with_scale(scale.roll(1, dims=1)),
        "first M-block's scales": with_scale(scale[:1].expand_as(scale)),
        "gate and up swapped": exact.view(2, -1, 2).flip(2).reshape(2, -1),
    }
    tolerance = TOLERANCES["moe_gate_up"]
    assert worst(tolerance, with_scale(scale).float(), exact.float(), bound) <= 1
    for name, wrong in mutations.items():
        assert worst(tolerance, wrong.float(), exact.float(), bound) > 10, name


def test_layouts_and_storages_that_are_not_known(random: Random, outputs: Outputs) -> None:
    layer = _layer("fp8_block128", random, tokens=1)
    rows = sort_rows(layer.ids, 0, _E)
    h = outputs(4, _I, dtype=_FP8)
    tail = (rows.offsets, rows.active, rows.slots, 4, 7.0, 1.702)
    with pytest.raises(ValueError, match="layout is 'plan'; allowed: plain, sm90_v1"):
        ops.moe_gate_up(*layer.x, *layer.gate_up, layer.gate_up_bias, *tail, "plan", 0, h, None)
    with pytest.raises(ValueError, match=r"weight is torch\.int8"):
        ops.moe_gate_up(
            *layer.x,
            layer.gate_up[0].view(torch.int8),
            layer.gate_up[1],
            layer.gate_up_bias,
            *tail,
            "plain",
            0,
            h,
            None,
        )


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "fp32"])
def test_a_row_does_not_depend_on_the_batch(kind: str, random: Random) -> None:
    weight = random(320, 192)
    if kind == "e4m3":
        weight = weight.to(_FP8).float() * 2.0**-9
    if kind == "fp32":
        weight = weight.float() * 1.001
    product = make_product(weight)
    assert isinstance(product, Fp32Product if kind == "fp32" else Fp16Product)
    x = random(200, 192, dtype=_F32)
    together = product.multiply(x)
    exact = (x.double() @ weight.double().T).float()
    assert (together - exact).abs().max() < 1e-4 * exact.abs().max()
    for rows in (1, 2, 3, 7, 16, 33, 100):
        assert torch.equal(product.multiply(x[:rows]), together[:rows]), rows
        assert torch.equal(product.multiply(x[-rows:]), together[-rows:]), rows


def test_tiny_weights_keep_their_values() -> None:
    weight = torch.tensor([[2.0**-30, 1.0, -(2.0**-20)], [0.0, 0.0, 3.0]])
    product = make_product(weight)
    assert isinstance(product, Fp16Product)
    assert product.multiply(torch.eye(3)).tolist() == weight.T.tolist()


def test_cache_notices_changes_limits_and_death() -> None:
    cache = ProductCache(limit_bytes=1000)
    weights = [torch.ones(10, 10) for _ in range(6)]
    made = [cache.get(w, 0, lambda w=w: w) for w in weights]
    assert cache.held_bytes == 4 * 200
    assert cache.get(weights[0], 0, lambda: weights[0]) is made[0]
    assert cache.get(weights[5], 0, lambda: weights[5]) is not made[5]  # over the limit: made again each time
    weights[0].mul_(2)
    changed = cache.get(weights[0], 0, lambda: weights[0])
    assert changed.multiply(torch.ones(1, 10)).tolist() == [[20.0] * 10]
    del weights[1]
    assert cache.held_bytes == 3 * 200
