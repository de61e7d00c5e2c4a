"""The Triton expert products against the CPU ops: both storages, tails of K and N, ragged experts, every h scale."""

from __future__ import annotations

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.triton_kernels import moe_gemm_fp8

pytestmark = pytest.mark.interpret
OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
EXPERTS, TOP_K, H, INTER = 4, 2, 320, 192  # both have a tail of 64


def experts_of(rows: int, columns: int, mxfp4: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if mxfp4:
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        blocks[0, 3, 1], scales[0, 3, 1] = 0, 250  # a group of zeros says nothing by its scale
        return blocks, scales
    weight = torch.randn(EXPERTS, rows, columns).to(E4M3)
    return weight, torch.rand(EXPERTS, -(-rows // 128), -(-columns // 128)) * 2.0**-4


def routing(tokens: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
    if kind == "one":
        ids[:] = torch.tensor([2, 1], dtype=torch.int32)  # experts 0 and 3 have no row
    flat = ids.reshape(-1)
    order = torch.sort(flat.long(), stable=True).indices.to(torch.int32)
    counts = torch.bincount(flat.long(), minlength=EXPERTS)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    used = counts.nonzero().reshape(-1)
    active = torch.full((EXPERTS + 1,), -1, dtype=torch.int32)
    active[0], active[1 : 1 + len(used)] = len(used), used.to(torch.int32)
    return offsets, active, order, torch.rand(tokens, TOP_K)


@pytest.mark.parametrize("mxfp4", [True, False])
@pytest.mark.parametrize("h_group", [128, 64, 0])
@pytest.mark.parametrize(("tokens", "kind"), [(1, "spread"), (40, "one"), (9, "spread")])
def test_both_products(mxfp4: bool, h_group: int, tokens: int, kind: str) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, H).to(torch.bfloat16)
    q, scales = torch.empty(tokens, H, dtype=E4M3), torch.empty(-(-H // 128), tokens)
    OPS.act_quant(x, 128, q, scales)
    up, up_scale = experts_of(2 * INTER, H, mxfp4)
    down, down_scale = experts_of(H, INTER, mxfp4)
    up_bias = (torch.randn(EXPERTS, 2 * INTER) * 2).to(torch.bfloat16)
    down_bias = (torch.randn(EXPERTS, H) * 2).to(torch.bfloat16)
    offsets, active, slots, weights = routing(tokens, kind)
    rows = tokens * TOP_K
    outputs = []
    for gate_up, second in ((moe_gemm_fp8.moe_gate_up, moe_gemm_fp8.moe_down), (OPS.moe_gate_up, OPS.moe_down)):
        h = torch.zeros(rows, INTER, dtype=E4M3)
        h_scale = torch.full((-(-INTER // h_group), rows), 77.0) if h_group else None
        gate_up(
            q, scales, up, up_scale, up_bias, offsets, active, slots, TOP_K, 7.0, 1.702, "plain", h_group, h, h_scale
        )
        out = torch.full((tokens, TOP_K, H), 77.0)
        second(h, h_scale, down, down_scale, down_bias, weights, offsets, active, slots, "plain", h_group, out)
        outputs.append((h, h_scale, out))
    (h, h_scale, out), (want_h, want_scale, want) = outputs
    if h_group:
        torch.testing.assert_close(h_scale, want_scale, rtol=1e-4, atol=0)
    difference = (h.float() - want_h.float()).abs()
    assert bool((difference <= want_h.float().abs() / 8 + 2.0**-9).all())  # one step of e4m3
    assert float((difference > 0).float().mean()) < 0.02
    worst = ((out - want).abs().amax(-1) / want.abs().amax(-1).clamp(min=1e-2)).max()
    assert float(worst) < 0.02


def test_a_layout_that_it_cannot_read_is_refused() -> None:
    empty = torch.empty(0)
    with pytest.raises(ValueError, match="sm90_v1"):
        moe_gemm_fp8.moe_gate_up(*[empty] * 8, 2, 7.0, 1.702, "sm90_v1", 128, empty, None)  # type: ignore[arg-type]
