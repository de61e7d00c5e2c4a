"""Embedding, norms, rotation, slots, routing and combination against formulas written anew, on adversarial inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gptoss_trt.ops import ops
from gptoss_trt.reference.act_quant import act_quant
from gptoss_trt.reference.rope import RopeConfig, rope_table
from gptoss_trt.reference.tolerance import assert_close

_BF16, _F32, _I32, _FP8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn

Random = Callable[..., torch.Tensor]
Outputs = Callable[..., torch.Tensor]


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=_I32)


def test_embedding_over_ranks(random: Random, outputs: Outputs) -> None:
    table = random(10, 6)
    ids = _ints(0, 9, 4, 5, 4)
    parts = []
    for first, last in ((0, 5), (5, 10)):
        out = outputs(5, 6, dtype=_BF16)
        ops.embedding(ids, table[first:last], first, out)
        parts.append(out)
    assert_close("embedding", parts[0] + parts[1], table[ids.long()])
    assert not bool(parts[1][0].any())


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("hidden", [40, 160, 2880])
def test_rmsnorm_quant(tokens: int, hidden: int, random: Random, outputs: Outputs) -> None:
    residual, delta, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    if tokens > 3:
        residual[1], delta[1] = 0, 0
        residual[2, 3] = 30000.0
    before = residual.clone()
    normed = outputs(tokens, hidden, dtype=_BF16)
    codes, scales = outputs(tokens, hidden, dtype=_FP8), outputs(-(-hidden // 128), tokens, dtype=_F32)
    ops.rmsnorm_quant(residual, delta, weight, 1e-5, normed, codes, scales)
    assert torch.equal(residual, (before.float() + delta.float()).to(_BF16))
    x = residual.double()
    expected = (x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()).to(_BF16)
    assert_close("rmsnorm_quant", normed, expected)
    expected_codes, expected_scales = act_quant(normed)
    assert expected_scales is not None
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    alone = outputs(tokens, hidden, dtype=_BF16)
    ops.rmsnorm_quant(residual, None, weight, 1e-5, alone, None, None)
    assert torch.equal(alone, normed)


def test_rotation_matches_complex_numbers(random: Random, outputs: Outputs) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 64, 5
    qkv = random(tokens, (heads + 2 * kv_heads) * dim)
    positions = _ints(0, 1, 130, 4097, 19000)
    table = rope_table(RopeConfig(), 20000)
    slots = _ints(7, 8, -1, 23, 0)
    q = outputs(tokens, heads, dim, dtype=_BF16)
    cache = [torch.full((3, kv_heads, 8, dim), 9.0, dtype=_BF16) for _ in range(2)]
    ops.rope_kv_append(qkv, positions, table, slots, 1.0, 1.0, q, *cache)
    parts = qkv.double().view(tokens, -1, dim)
    turn = torch.complex(*table[positions.long()].double().chunk(2, dim=1)).unsqueeze(1)
    turned = torch.complex(*parts.chunk(2, dim=2)) * turn
    expected = torch.cat((turned.real, turned.imag), dim=2).to(_BF16)
    # The op's fp32 may round a bf16 differently, and cancels to small numbers: one bf16 step of the operands.
    assert ((q.double() - expected[:, :heads].double()).abs() <= 2**-8 * parts.abs().amax() * 2).all()
    assert (q == expected[:, :heads]).float().mean() > 0.99
    written = [(token, slot) for token, slot in enumerate(slots.tolist()) if slot >= 0]
    for token, slot in written:
        key = cache[0][slot // 8, :, slot % 8]
        assert torch.equal(cache[1][slot // 8, :, slot % 8], qkv.view(tokens, -1, dim)[token, heads + kv_heads :])
        assert (key == expected[token, heads : heads + kv_heads]).float().mean() > 0.99
    untouched = torch.ones(3 * 8, dtype=torch.bool)
    untouched[[slot for _, slot in written]] = False
    for one in cache:
        assert bool((one.transpose(1, 2).reshape(24, -1)[untouched] == 9.0).all())


def test_rope_refuses_positions_outside_the_table(random: Random, outputs: Outputs) -> None:
    cache = [torch.zeros(1, 1, 4, 64, dtype=_BF16) for _ in range(2)]
    with pytest.raises(ValueError, match="positions 7 to 8 are outside the rope table of 8"):
        q = outputs(2, 1, 64, dtype=_BF16)
        ops.rope_kv_append(random(2, 192), _ints(7, 8), rope_table(RopeConfig(), 8), _ints(0, 1), 1.0, 1.0, q, *cache)


def test_kv_slots_of_both_pools(outputs: Outputs) -> None:
    positions, starts = _ints(0, 1, 2, 9, 4, -1), _ints(0, 3, 4, 5)
    full = torch.tensor([[5, -1, -1], [1, 2, 3], [7, 0, -1]], dtype=_I32)
    slots = outputs(6, dtype=_I32)
    ops.kv_slots(positions, starts, full, None, 4, slots)
    assert slots.tolist() == [20, 21, 22, 13, 0, -1]
    window = torch.tensor([[5], [8], [6]], dtype=_I32)
    ops.kv_slots(positions, starts, window, _ints(0, 2, 1), 4, slots)
    assert slots.tolist() == [20, 21, 22, 33, 24, -1]
    with pytest.raises(ValueError, match="token 3 of sequence 1 at position 9 has no KV block: entry 2 of 1"):
        ops.kv_slots(positions, starts, window, None, 4, slots)
    ops.kv_slots(positions[:0], _ints(0), full[:0], None, 4, outputs(0, dtype=_I32))


def _route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, outputs: Outputs, **options: int
) -> list[torch.Tensor]:
    tokens, local = len(x), options.get("local", len(weight))
    out = [
        outputs(tokens, 4, dtype=_I32),
        outputs(tokens, 4, dtype=_F32),
        outputs(local + 1, dtype=_I32),
        outputs(local + 1, dtype=_I32),
        outputs(tokens * 4, dtype=_I32),
    ]
    count = _ints(options["count"]) if "count" in options else None
    ops.moe_route(x, weight, bias, count, options.get("first", 0), local, *out)
    return out


def test_route_orders_ties_by_index(outputs: Outputs) -> None:
    x = torch.ones(2, 8, dtype=_BF16)
    bias = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0], dtype=_BF16)
    ids, weights, offsets, active, slots = _route(x, torch.zeros(8, 8, dtype=_BF16), bias, outputs)
    assert ids.tolist() == [[1, 2, 4, 3]] * 2
    soft = torch.softmax(torch.tensor([3.0, 3.0, 3.0, 2.0]), 0).to(_BF16).float()
    assert weights.tolist() == [soft.tolist()] * 2
    assert offsets.tolist() == [0, 0, 2, 4, 6, 8, 8, 8, 8]
    assert active.tolist() == [4, 1, 2, 3, 4, -1, -1, -1, -1]
    assert slots.tolist() == [0, 4, 1, 5, 3, 7, 2, 6]


def test_route_rounds_logits_to_bf16_before_the_choice(outputs: Outputs) -> None:
    """In fp32 expert 7 would win by 2^-12; as bf16 it ties with experts 0 to 3 and loses to their index."""
    x = torch.tensor([[1.0, 2**-12]], dtype=_BF16)
    weight = torch.ones(8, 2, dtype=_BF16)
    weight[:, 1] = torch.tensor([0, 0, 0, 0, -9000, -9000, -9000, 1.0])
    ids = _route(x, weight, torch.zeros(8, dtype=_BF16), outputs)[0]
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_route_all_to_one_expert_padding_and_ranks(random: Random, outputs: Outputs) -> None:
    x = random(9, 16)
    bias = torch.zeros(8, dtype=_BF16)
    bias[5] = 100.0
    weight = random(8, 16)
    ids, weights, offsets, active, slots = _route(x, weight, bias, outputs, count=7, first=4, local=4)
    assert bool((ids[:7, 0] == 5).all())
    assert bool((ids[7:] == -1).all())
    assert not bool(weights[7:].any())
    expected = [
        [token * 4 + slot for token in range(7) for slot in range(4) if ids[token, slot] == 4 + e] for e in range(4)
    ]
    assert offsets.tolist() == [0, *torch.tensor([len(rows) for rows in expected]).cumsum(0).tolist()]
    used = [e for e in range(4) if expected[e]]
    assert active.tolist() == [len(used), *used, *[-1] * (4 - len(used))]
    flat = [row for rows in expected for row in rows]
    assert slots.tolist() == flat + [-1] * (36 - len(flat))


def test_route_of_nothing(outputs: Outputs) -> None:
    out = _route(torch.zeros(0, 16, dtype=_BF16), torch.zeros(8, 16, dtype=_BF16), torch.zeros(8, dtype=_BF16), outputs)
    assert out[2].tolist() == [0] * 9
    assert out[3].tolist() == [0] + [-1] * 8


def test_combine_skips_what_is_not_here(random: Random, outputs: Outputs) -> None:
    rows = random(5, 4, 24)
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [3, 4, 0, 7], [-1] * 4, [2, 6, 3, 5]], dtype=_I32)
    here = (ids >= 3) & (ids < 6)
    poisoned = rows.masked_fill(~here.unsqueeze(2), float("nan"))
    partial = outputs(5, 24, dtype=_F32)
    ops.moe_combine(poisoned, ids, 3, 3, False, partial)
    expected = torch.where(here.unsqueeze(2), rows.float(), 0).double().sum(dim=1)
    assert torch.allclose(partial.double(), expected, atol=1e-6)
    residual = random(5, 24)
    after = residual.clone()
    ops.moe_combine(poisoned, ids, 3, 3, True, after)
    assert_close("moe_combine", after, (residual.double() + expected).to(_BF16))
    assert torch.equal(after[3], residual[3])


def test_combine_adds_in_slot_order(outputs: Outputs) -> None:
    rows = torch.tensor([[1e8, 1.0, -1e8, 1.0]], dtype=_F32).view(1, 4, 1)
    out = outputs(1, 1, dtype=_F32)
    ops.moe_combine(rows, torch.zeros(1, 4, dtype=_I32), 0, 8, False, out)
    assert out.item() == 1.0


def test_combine_norm_is_combine_then_norm(random: Random, outputs: Outputs) -> None:
    rows, residual, weight = random(6, 4, 160), random(6, 160), random(160)
    ids = torch.arange(24, dtype=_I32).view(6, 4) % 8
    apart, together = residual.clone(), residual.clone()
    ops.moe_combine(rows, ids, 0, 8, True, apart)
    results = []
    for _ in range(2):
        results.append((outputs(6, 160, dtype=_BF16), outputs(6, 160, dtype=_FP8), outputs(2, 6, dtype=_F32)))
    ops.rmsnorm_quant(apart, None, weight, 1e-5, *results[0])
    ops.moe_combine_norm(rows, ids, 0, 8, together, weight, 1e-5, *results[1])
    assert torch.equal(apart, together)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
