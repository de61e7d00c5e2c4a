"""Slots, rotation, attention and expert products on the GPU against the CPU, at the real models' widths.

EXACT where the format says so (indices, tables); worst row elsewhere. Outputs are poisoned first.
"""

from __future__ import annotations

import pytest
import torch
from op_case import BLOCK_TOKENS, E4M3, HEADS, INTER, KV_HEADS, OPS, D, H, assert_rows, bf16, both, exact, poisoned


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
