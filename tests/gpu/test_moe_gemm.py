"""moe_gemm_fp8 on the card: within tolerance of its format reference, equal bit for bit where it must be, and seen to
fail under every mutation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from moe_case import ALPHA, LIMIT, Case, assert_same, excess, run

from gptoss_trt.ops import library
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import DEFAULT, PACKED, Options, moe_down, moe_gate_up

PLANS = (Plan.SIMT, Plan.WGMMA, Plan.PREFILL)

SMALL = {
    "tails": {"hidden": 320, "inter": 192},
    "narrow": {"hidden": 96, "inter": 96},
    "one record": {"hidden": 128, "inter": 128, "tokens": 3},
    "no rows": {"routing": "none"},
    "padding tokens": {"routing": "padded", "tokens": 10},
    "one token": {"tokens": 1},
    "16 columns": {"tokens": 16, "routing": "one", "top_k": 1},
    "32 columns": {"tokens": 29, "routing": "one", "top_k": 1},
    "blocks of rows": {"tokens": 150, "routing": "skewed", "experts": 16},
    "all to one": {"tokens": 40, "routing": "one", "top_k": 4},
    "14 octaves": {"spread": 14},
    "17 octaves": {"spread": 17},
    "large bias, small activations": {"bias_scale": 1e3, "activation_scale": 1e-3},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("storage", PACKED)
@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("name", SMALL)
def test_within_tolerance_of_the_format_reference(name: str, product: str, storage: Storage, plan: Plan) -> None:
    for group in (128, 64, 0):
        case = Case(**{"product": product, "group": group} | SMALL[name])
        assert excess(case, run(case, Options(plan), storage)) <= 1.0, (name, group)


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 32, 33, 128])
def test_full_width(product: str, tokens: int) -> None:
    case = Case(hidden=2880, inter=2880, experts=8, tokens=tokens, product=product, group=0 if tokens % 2 else 128)
    result = run(case, Options(Plan.WGMMA))
    ratio = excess(case, result)
    print(f"{product} {tokens} tokens: worst error {ratio:.3f} of the tolerance")
    assert ratio <= 1.0


def test_full_width_skewed_300_rows() -> None:
    case = Case(hidden=2880, inter=2880, experts=16, tokens=300, top_k=2, routing="skewed", product="down", group=64)
    assert excess(case, run(case, Options(Plan.WGMMA))) <= 1.0


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("split", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_k_split(product: str, split: int, tokens: int) -> None:
    for _ in range(2):  # the second call finds the counters that the first left
        case = Case(hidden=1344, inter=1088, tokens=tokens, product=product, seed=split)
        assert excess(case, run(case, Options(Plan.WGMMA, k_split=split))) <= 1.0


def test_fp32_output() -> None:
    case = Case(hidden=2880, inter=1344, tokens=5)
    assert excess(case, run(case, Options(Plan.WGMMA), dtype=torch.float32)) <= 1.0


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("group", [128, 64, 0])
@pytest.mark.parametrize("tokens", [1, 8, 24, 70])
def test_both_storages_are_equal_bit_for_bit(product: str, group: int, tokens: int) -> None:
    case = Case(hidden=2880, inter=1344, tokens=tokens, product=product, group=group)
    for options in (Options(Plan.WGMMA), Options(Plan.WGMMA, k_split=3)):
        results = [run(case, options, storage) for storage in PACKED]
        assert_same(case, *results)


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_a_row_does_not_depend_on_its_neighbours(product: str) -> None:
    """Token 0 and its experts stay, the other tokens and their experts change: token 0's bits stay."""
    one = Case(hidden=2880, inter=960, tokens=40, product=product, routing="uniform")
    other = Case(hidden=2880, inter=960, tokens=40, product=product, routing="padded", seed=0)
    lone = Case(hidden=2880, inter=960, tokens=40, product=product, routing="uniform")
    order: dict[str, dict[int, int]] = {}
    results = {}
    base = one.x[: one.top_k].clone()
    for name, case in (("one", one), ("other", other), ("lone", lone)):
        if name == "lone":
            keep = case.ids[:1].clone()
            case.ids[:] = -1
            case.ids[:1] = keep
            flat = case.ids.reshape(-1)
            case.slots = torch.argsort(torch.where(flat < 0, case.experts, flat), stable=True).to(torch.int32).cuda()
            counts = torch.bincount(flat[flat >= 0], minlength=case.experts)
            case.offsets[1:] = counts.cumsum(0).to(torch.int32).cuda()
            case.total, case.counts = int(case.offsets[-1]), counts.tolist()
        order[name] = {int(slot): row for row, slot in enumerate(case.slots[: case.total].tolist())}
        if product == "down":  # the same h for token 0's slots, wherever they are sorted to
            for slot in range(case.top_k):
                row = order[name][slot]
                case.x.view(torch.uint8)[row] = base.view(torch.uint8)[slot]
                case.x_scale[:, row] = 0.5
        results[name] = run(case, Options(Plan.WGMMA))
    for slot in range(one.top_k):
        rows = []
        for name, result in results.items():
            values = result.values.reshape(-1, one.hidden) if product == "down" else result.values
            rows.append(values[slot if product == "down" else order[name][slot]].view(torch.uint8))
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2]), slot


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_200_runs_beside_other_work_are_equal_bit_for_bit(product: str, tokens: int) -> None:
    case = Case(hidden=2880, inter=2880, tokens=tokens, product=product)
    first = run(case, Options(Plan.WGMMA))
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    packed = case.packed(Storage.MXFP4)
    case.packed = lambda _storage: packed  # type: ignore[method-assign]
    for _ in range(200):
        with torch.cuda.stream(side):
            a @ a
        assert_same(case, first, run(case, Options(Plan.WGMMA)))


@pytest.mark.parametrize("tokens", [1, 8, 48])
def test_graph_and_dependent_launch_equal_eager(tokens: int) -> None:
    """Both products in a chain, as a layer has them, captured with dependent launches."""
    first = Case(hidden=2880, inter=2880, tokens=tokens, product="gate_up", group=0)
    second = Case(hidden=2880, inter=2880, tokens=tokens, product="down", group=0, seed=1)
    none = torch.empty(0)
    weights = [case.packed(Storage.MXFP4) for case in (first, second)]
    rows = tokens * first.top_k

    def layer(h: torch.Tensor, out: torch.Tensor, up: Options, down: Options) -> None:
        moe_gate_up(
            first.x, first.x_scale, weights[0], none, first.bias, first.offsets, none, first.slots, first.top_k, LIMIT,
            ALPHA, "sm90_v1", 0, h, None, up,
        )  # fmt: skip
        moe_down(
            h, None, weights[1], none, second.bias, second.weights, first.offsets, none, first.slots, "sm90_v1", 0, out,
            down,
        )  # fmt: skip

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.zeros(rows, 2880, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        return h, torch.zeros(tokens, first.top_k, 2880, dtype=torch.bfloat16, device="cuda")

    plain = Options(Plan.WGMMA)
    dependent = Options(Plan.WGMMA, flags=library.DEPENDENT_LAUNCH)
    ahead = Options(Plan.WGMMA, flags=library.DEPENDENT_LAUNCH | library.ROUTING_READY)
    eager = buffers()
    layer(*eager, plain, plain)
    for pair in ((plain, plain), (dependent, dependent), (dependent, ahead), (DEFAULT, DEFAULT)):
        captured = buffers()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(*captured, *pair)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # as layers follow each other
                layer(*captured, *pair)
        for _ in range(20):
            captured[1].fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured[1], eager[1]), pair


def drop_bias(case: Case) -> None:
    case.bias = torch.zeros_like(case.bias)


def drop_tail(case: Case) -> None:
    case.x.view(torch.uint8)[:, case.shape[1] // 128 * 128 :] = 0


def neighbours_activation_scale(case: Case) -> None:
    case.x_scale = case.x_scale.roll(1, dims=0).contiguous()


def neighbours_weight_scale(case: Case) -> None:
    blocks, scales = case.mxfp4
    case.mxfp4 = (blocks, scales.roll(1, dims=2))


def swap_gate_and_up(case: Case) -> None:
    blocks, scales = case.mxfp4
    order = torch.arange(case.shape[0], device="cuda").view(-1, 2).flip(1).reshape(-1)
    case.mxfp4 = (blocks[:, order].contiguous(), scales[:, order].contiguous())
    case.bias = case.bias[:, order].contiguous()


def first_blocks_scales_for_the_second(case: Case) -> None:
    case.x_scale[:, 32:64] = case.x_scale[:, :32]


MUTATIONS: list[Callable[[Case], None]] = [
    drop_bias,
    drop_tail,
    neighbours_activation_scale,
    neighbours_weight_scale,
    swap_gate_and_up,
    first_blocks_scales_for_the_second,
]


@pytest.mark.parametrize("plan", [Plan.WGMMA, Plan.PREFILL])
@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_mutations_fail(product: str, mutate: Callable[[Case], None], plan: Plan) -> None:
    """A kernel that did what the mutation does would be seen: its result fails what the right one passes."""
    sizes = {"hidden": 320, "inter": 320, "tokens": 64, "top_k": 1, "routing": "one", "product": product}
    case, mutated = Case(**sizes), Case(**sizes)
    mutate(mutated)
    assert excess(case, run(case, Options(plan))) <= 1.0
    assert excess(case, run(mutated, Options(plan))) > 1.0


@pytest.mark.parametrize("plan", [Plan.WGMMA, Plan.PREFILL])
def test_an_expert_without_rows_reads_nothing(plan: Plan) -> None:
    """Weights of experts in no use may be garbage: NaN scales there change nothing."""
    case = Case(hidden=320, inter=192, tokens=2, top_k=1, experts=8, product="down")
    clean = run(case, Options(plan))
    packed = case.packed(Storage.MXFP4)
    unused = torch.tensor([count == 0 for count in case.counts], device="cuda")
    packed[unused] = 0xFF
    spoiled = replace(case)
    spoiled.packed = lambda _storage: packed  # type: ignore[method-assign]
    assert_same(case, clean, run(spoiled, Options(plan)))
