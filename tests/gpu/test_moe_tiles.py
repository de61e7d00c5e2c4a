"""moe_gemm_fp8 on FP8 tiles: chunks and blocks of rows of every size, row by row against the format reference, and
equal bit for bit between runs, neighbours and graphs, and between a copy of tiles and MXFP4 expanded into them."""

from __future__ import annotations

import pytest
import torch
from moe_case import ALPHA, LADDER, LIMIT, Case, assert_same, excess, run

from gptoss_trt.ops import library
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import DEFAULT, LAYOUT, TILES, Options, moe_down, moe_gate_up
from gptoss_trt.ops.prepare import prefill_experts

PRODUCTS = pytest.mark.parametrize("product", ["gate_up", "down"])
# MXFP4 becomes tiles in the prefill plan from this many rows an expert on average on.
EXPANDED_ROWS = {"gate_up": 256, "down": 128}
EXPANDED = Options(Plan.PREFILL)
STORAGES = pytest.mark.parametrize(
    ("storage", "layout", "options"),
    [(Storage.FP8_TILES, TILES, Options()), (Storage.MXFP4, LAYOUT, EXPANDED)],
    ids=["tiles", "mxfp4"],
)
LADDER_CASE = {"tokens": sum(LADDER), "top_k": 1, "routing": "ladder", "experts": len(LADDER)}


def tiles(case: Case, options: Options = DEFAULT, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compares the result with the reference, and with what MXFP4 gives where it is expanded into tiles."""
    result = run(case, options, Storage.FP8_TILES, dtype)
    ratio = excess(case, result)
    print(f"{case.product}: worst error {ratio:.3f} of the tolerance")
    assert ratio <= 1.0
    if case.tokens * case.top_k >= EXPANDED_ROWS[case.product] * case.experts:
        assert_same(case, result, run(case, EXPANDED, Storage.MXFP4, dtype))


@PRODUCTS
def test_every_block_size_at_full_width(product: str) -> None:
    tiles(Case(hidden=2880, inter=2880, product=product, group=0, **LADDER_CASE))


@PRODUCTS
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 129, 192, 193, 256, 257, 320, 600])
def test_one_expert_with_all_rows(product: str, rows: int) -> None:
    tiles(Case(hidden=1344, inter=1088, tokens=rows, top_k=1, routing="one", product=product, group=0, seed=rows))


@PRODUCTS
@pytest.mark.parametrize("rows", [128, 129, 193, 256, 257, 320, 449])
def test_the_only_expert(product: str, rows: int) -> None:
    sizes = {"hidden": 1344, "inter": 1088, "tokens": rows, "experts": 1}
    tiles(Case(top_k=1, routing="one", product=product, group=0, seed=rows, **sizes))


@PRODUCTS
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 256, 288, 384])
def test_tails_of_k(product: str, columns: int) -> None:
    sizes = {"hidden": columns, "inter": 96} if product == "gate_up" else {"hidden": 96, "inter": columns}
    tiles(Case(tokens=260, experts=4, product=product, group=0, **sizes))


@PRODUCTS
@pytest.mark.parametrize("rows", [16, 64, 128, 144, 192, 256])
def test_tails_of_n(product: str, rows: int) -> None:
    sizes = {"hidden": 320, "inter": rows} if product == "gate_up" else {"hidden": rows, "inter": 320}
    tiles(Case(tokens=100, experts=4, product=product, group=0, **sizes))
    tiles(Case(tokens=270, experts=4, product=product, group=0, **sizes))


@PRODUCTS
@pytest.mark.parametrize("spread", [7, 14, 17])
def test_groups_far_below_their_block(product: str, spread: int) -> None:
    """Codes that are subnormal or rounded, beside others that are not, expand to those of tiles."""
    case = Case(hidden=320, inter=192, tokens=270, experts=4, spread=spread, product=product, group=0)
    assert_same(case, run(case, DEFAULT, Storage.FP8_TILES), run(case, EXPANDED, Storage.MXFP4))


@PRODUCTS
@pytest.mark.parametrize("routing", ["uniform", "skewed", "padded", "none"])
def test_routings(product: str, routing: str) -> None:
    tiles(Case(hidden=320, inter=192, tokens=130, experts=40, routing=routing, product=product, group=0))


@PRODUCTS
@pytest.mark.parametrize("rows", [64, 128, 192, 256, 320])
@pytest.mark.parametrize("tokens", [1024, 1100, 1300])
def test_clusters_that_share_tokens(product: str, rows: int, tokens: int) -> None:
    """Even and odd numbers of tiles, experts of equal and of very different size."""
    sizes = {"hidden": 320, "inter": rows} if product == "gate_up" else {"hidden": rows, "inter": 320}
    for routing, top_k in (("one", 1), ("uniform", 1), ("uniform", 2)):
        tiles(Case(tokens=tokens, top_k=top_k, experts=2, routing=routing, product=product, group=0, **sizes))


def test_fp32_output() -> None:
    tiles(Case(hidden=2880, inter=1344, tokens=300, group=0), dtype=torch.float32)


@PRODUCTS
def test_a_row_does_not_depend_on_the_size_of_its_block(product: str) -> None:
    """Nor on whether its block shares tokens with another."""
    kept = 5
    sizes = {"hidden": 2880, "inter": 960, "experts": 2, "top_k": 1, "routing": "one", "product": product, "group": 0}
    whole = Case(tokens=1200, **sizes)
    base = run(whole, DEFAULT, Storage.FP8_TILES)
    for rows in (5, 70, 140, 260, 1100):
        case = Case(tokens=rows, **sizes)
        case.mxfp4, case.bias = whole.mxfp4, whole.bias
        case.weights = whole.weights[:rows].contiguous()
        case.x = whole.x[:rows].contiguous()
        case.x_scale = None if whole.x_scale is None else whole.x_scale[:, :rows].contiguous()
        result = run(case, DEFAULT, Storage.FP8_TILES)
        assert torch.equal(result.values[:kept].view(torch.uint8), base.values[:kept].view(torch.uint8)), rows


@PRODUCTS
@STORAGES
def test_100_runs_beside_other_work_are_equal_bit_for_bit(
    product: str, storage: Storage, layout: str, options: Options
) -> None:
    sizes = LADDER_CASE if storage is Storage.FP8_TILES else {"tokens": 560}
    case = Case(hidden=2880, inter=2880, product=product, group=0, **sizes)
    first = run(case, options, storage)
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    packed = case.packed(storage)
    case.packed = lambda _storage: packed  # type: ignore[method-assign]
    for _ in range(100):
        with torch.cuda.stream(side):
            a @ a
        assert_same(case, first, run(case, options, storage))


@pytest.mark.parametrize("storage", [Storage.MXFP4, Storage.FP8])
def test_copies_of_either_storage_are_the_same_tiles(storage: Storage) -> None:
    case = Case(hidden=320, inter=192, group=0)
    marker = torch.empty(0, dtype=torch.uint8 if storage is Storage.MXFP4 else torch.float32)
    copied = prefill_experts(case.packed(storage), marker, case.shape)[0]
    assert torch.equal(copied, case.packed(Storage.FP8_TILES))


@STORAGES
def test_graph_and_dependent_launch_equal_eager(storage: Storage, layout: str, options: Options) -> None:
    """Both products in a chain, three layers of them, captured with dependent launches."""
    tokens = 520
    first = Case(hidden=2880, inter=2880, tokens=tokens, product="gate_up", group=0)
    second = Case(hidden=2880, inter=2880, tokens=tokens, product="down", group=0, seed=1)
    none = torch.empty(0)
    weights = [case.packed(storage) for case in (first, second)]
    h = torch.zeros(tokens * first.top_k, 2880, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    out = torch.zeros(tokens, first.top_k, 2880, dtype=torch.bfloat16, device="cuda")

    def layer(options: Options) -> None:
        moe_gate_up(
            first.x, first.x_scale, weights[0], none, first.bias, first.offsets, none, first.slots, first.top_k, LIMIT,
            ALPHA, layout, 0, h, None, options,
        )  # fmt: skip
        moe_down(
            h, None, weights[1], none, second.bias, second.weights, first.offsets, none, first.slots, layout, 0, out,
            options,
        )  # fmt: skip

    layer(options)
    torch.cuda.synchronize()
    eager = out.clone()
    for chosen in (options, Options(Plan.PREFILL, flags=library.DEPENDENT_LAUNCH), DEFAULT):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(chosen)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # as layers follow each other
                layer(chosen)
        for _ in range(20):
            out.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, eager), chosen


@STORAGES
@pytest.mark.parametrize("experts", [16, 32])
def test_layers_that_hand_h_on_in_the_same_memory(
    experts: int, storage: Storage, layout: str, options: Options
) -> None:
    """Rows of the layer before, or not written yet, would show in `down`, which begins before gate_up has ended."""
    sizes = {"hidden": 2880, "inter": 960, "experts": experts, "tokens": 2048, "group": 0}
    ups = [Case(product="gate_up", seed=seed, **sizes) for seed in range(3)]
    down = Case(product="down", seed=3, **sizes)
    none = torch.empty(0)
    weights = [case.packed(storage) for case in (ups[0], down)]
    h = torch.zeros(len(down.x), 960, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    outs = torch.zeros(3, 2048, down.top_k, 2880, dtype=torch.bfloat16, device="cuda")

    def layers(options: Options) -> None:
        for up, out in zip(ups, outs, strict=True):
            moe_gate_up(
                up.x, up.x_scale, weights[0], none, ups[0].bias, up.offsets, none, up.slots, up.top_k, LIMIT, ALPHA,
                layout, 0, h, None, options,
            )  # fmt: skip
            moe_down(
                h, None, weights[1], none, down.bias, down.weights, up.offsets, none, up.slots, layout, 0, out,
                options,
            )  # fmt: skip

    layers(options)
    torch.cuda.synchronize()
    alone = outs.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers(DEFAULT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        layers(DEFAULT)
    for i in range(60):
        outs.fill_(7)
        h.view(torch.uint8).fill_(0x7B)
        torch.cuda.synchronize()
        for _ in range(1 + i % 2):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outs.view(torch.int16), alone.view(torch.int16)), i
