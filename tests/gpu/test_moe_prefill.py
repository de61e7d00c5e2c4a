"""The prefill plan of moe_gemm_fp8 on the card: blocks of tokens of every size, row by row against the format
reference, and equal bit for bit between storages, runs, neighbours and graphs."""

from __future__ import annotations

import pytest
import torch
from moe_case import ALPHA, LADDER, LIMIT, Case, assert_same, excess, run

from gptoss_trt.ops import library
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import DEFAULT, Options, moe_down, moe_gate_up

PREFILL = Options(Plan.PREFILL)
LADDER_CASE = {"tokens": sum(LADDER), "top_k": 1, "routing": "ladder", "experts": len(LADDER)}


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("group", [128, 64, 0])
def test_every_block_size_at_full_width(product: str, group: int) -> None:
    case = Case(hidden=2880, inter=2880, product=product, group=group, **LADDER_CASE)
    result = run(case, PREFILL)
    ratio = excess(case, result)
    print(f"{product} group {group}: worst error {ratio:.3f} of the tolerance")
    assert ratio <= 1.0
    if group:  # with static scales MXFP4 becomes FP8 tiles, whose columns are added in another order (test_moe_tiles)
        assert_same(case, result, run(case, PREFILL, Storage.FP8))


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("rows", [16, 17, 64, 65, 96, 97, 128, 300])
def test_one_expert_with_all_rows(product: str, rows: int) -> None:
    case = Case(hidden=1344, inter=1088, tokens=rows, top_k=1, routing="one", product=product, seed=rows)
    result = run(case, PREFILL)
    assert excess(case, result) <= 1.0
    assert_same(case, result, run(case, PREFILL, Storage.FP8))


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 256, 288, 384])
def test_tails_of_k(product: str, columns: int) -> None:
    sizes = {"hidden": columns, "inter": 96} if product == "gate_up" else {"hidden": 96, "inter": columns}
    case = Case(tokens=200, experts=4, product=product, **sizes)
    assert excess(case, run(case, PREFILL)) <= 1.0


def test_fp32_output() -> None:
    case = Case(hidden=2880, inter=1344, tokens=300)
    assert excess(case, run(case, PREFILL, dtype=torch.float32)) <= 1.0


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_a_row_does_not_depend_on_the_size_of_its_block(product: str) -> None:
    """The first rows of an expert are the same whether it has 5, 40, 90 or 200 rows."""
    kept = 5
    whole = Case(hidden=2880, inter=960, tokens=200, top_k=1, routing="one", product=product)
    base = run(whole, PREFILL)
    for rows in (5, 20, 40, 90):
        case = Case(hidden=2880, inter=960, tokens=rows, top_k=1, routing="one", product=product)
        case.mxfp4, case.bias = whole.mxfp4, whole.bias
        case.weights = whole.weights[:rows].contiguous()
        case.x, case.x_scale = whole.x[:rows].contiguous(), whole.x_scale[:, :rows].contiguous()
        result = run(case, PREFILL)
        assert torch.equal(result.values[:kept].view(torch.uint8), base.values[:kept].view(torch.uint8)), rows


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_100_runs_beside_other_work_are_equal_bit_for_bit(product: str) -> None:
    case = Case(hidden=2880, inter=2880, product=product, **LADDER_CASE)
    first = run(case, PREFILL)
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    packed = case.packed(Storage.MXFP4)
    case.packed = lambda _storage: packed  # type: ignore[method-assign]
    for _ in range(100):
        with torch.cuda.stream(side):
            a @ a
        assert_same(case, first, run(case, PREFILL))


def test_graph_and_dependent_launch_equal_eager() -> None:
    """Both products in a chain, three layers of them, captured with dependent launches; more rows than the decode plan
    is chosen for."""
    tokens = 300
    first = Case(hidden=2880, inter=2880, tokens=tokens, product="gate_up")
    second = Case(hidden=2880, inter=2880, tokens=tokens, product="down", seed=1)
    none = torch.empty(0)
    weights = [case.packed(Storage.MXFP4) for case in (first, second)]
    rows = tokens * first.top_k
    h = torch.zeros(rows, 2880, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    h_scale = torch.zeros(-(-2880 // 128), rows, device="cuda")
    out = torch.zeros(tokens, first.top_k, 2880, dtype=torch.bfloat16, device="cuda")

    def layer(options: Options) -> None:
        moe_gate_up(
            first.x, first.x_scale, weights[0], none, first.bias, first.offsets, none, first.slots, first.top_k, LIMIT,
            ALPHA, "sm90_v1", 128, h, h_scale, options,
        )  # fmt: skip
        moe_down(
            h, h_scale, weights[1], none, second.bias, second.weights, first.offsets, none, first.slots, "sm90_v1", 128,
            out, options,
        )  # fmt: skip

    layer(PREFILL)
    torch.cuda.synchronize()
    eager = out.clone()
    for options in (PREFILL, Options(Plan.PREFILL, flags=library.DEPENDENT_LAUNCH), DEFAULT):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # as layers follow each other
                layer(options)
        for _ in range(20):
            out.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, eager), options
