"""Dense products of few and of some tokens in both formats on the GPU against the CPU, and the one that ends with
rotation and append (test_dense_fp8.py has the tiles)."""

from __future__ import annotations

import pytest
import torch
from op_case import BLOCK_TOKENS, E4M3, HEADS, KV_HEADS, OPS, D, H, assert_rows, bf16, both, exact, poisoned

from gptoss_trt.ops import dispatch

FEW_OPS = ("dense", "dense_fp8")


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


@pytest.mark.parametrize(("tokens", "tiles"), [
    (1, "64/1"), (5, "64/2"), (65, "64/3"), (200, "128/1"), (200, "128/2"), (700, "256/1"), (3000, ""),
])  # fmt: skip
def test_keys_and_values_alone(tokens: int, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits that the product with the queries gives, by the rows and scales behind theirs; nothing else is kept."""
    from gptoss_trt.ops import dense

    if tiles:
        monkeypatch.setattr(dense, "takes", lambda *_: False)
        monkeypatch.setattr(dense, "tiles_for", lambda *_: dense._tiles_of(tiles))
    for heads, kv_heads in ((HEADS, KV_HEADS), (8, 1)):
        blocks, first, segments = tokens // BLOCK_TOKENS + 2, heads * D, [heads * D, kv_heads * D, kv_heads * D]
        x, x_scale = torch.randn(tokens, H).to(E4M3).cuda(), torch.rand(23, tokens).cuda()
        weight = torch.randn(sum(segments), H).to(E4M3).cuda()
        unit = torch.rand(sum(-(-segment // 128) for segment in segments), 23).cuda() / 50
        bias, cos_sin = bf16(sum(segments)).cuda(), torch.randn(4096, D).cuda()
        positions = torch.randint(4096, (tokens,)).to(torch.int32).cuda()
        slots = torch.randperm(blocks * BLOCK_TOKENS)[:tokens].to(torch.int32).cuda()
        slots[tokens // 3 :: 7] = -1
        rotation = (positions, cos_sin, slots, 1.0, 1.0)
        want, got = (
            [poisoned(blocks, kv_heads, BLOCK_TOKENS, D, dtype=torch.bfloat16).cuda() for _ in "kv"] for _ in range(2)
        )
        q = torch.empty(tokens, heads, D, dtype=torch.bfloat16, device="cuda")
        OPS.dense_fp8_rope_kv_append(x, x_scale, weight, unit, segments, bias, *rotation, q, *want)
        behind = (weight[first:], unit[first // 128 :], [0, *segments[1:]], bias[first:])
        OPS.dense_fp8_rope_kv_append(x, x_scale, *behind, *rotation, q[:, :0].contiguous(), *got)
        for a, b in zip(got, want, strict=True):
            exact(a.cpu(), b.cpu())
