"""moe_gemm_fp8 on the card against its format reference: the same FP8 values, exact products, fp64 sums.

Every element must lie within max(1 ulp of the output, 2^-12 x sum of absolute scaled products), twice that below 1,024
columns: an instruction keeps some 14 bits under its largest product, and in a short sum one product can outweigh all
others (measured: 1.05 x 2^-12 at 192 columns, outliers of 20 sigma). Outputs are poisoned and lie between guard bands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from gptoss_trt.ops import library, weight_layout
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import DEFAULT, Options, moe_down, moe_gate_up
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.act_quant import act_quant

LIMIT, ALPHA = 7.0, 1.702
SUM_TOLERANCE = 2.0**-12
SHORT_SUM_TOLERANCE = 2.0**-11
SHORT_SUM = 1024
GUARD_BYTES = 4096
POISON = 0xA5
PLANS = (Plan.SIMT, Plan.WGMMA)


def route(kind: str, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Expert ids [tokens, top_k]; -1 is routed nowhere."""
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(max(tokens, 1))])[:tokens]
    if kind == "one":
        ids[:] = experts // 2
    elif kind == "skewed":
        ids[:, 0] = 3
    elif kind == "padded":
        ids[tokens // 2 :] = -1
    elif kind == "none":
        ids[:] = -1
    elif kind != "uniform":
        raise ValueError(kind)
    return ids


@dataclass
class Case:
    """One layer's experts and a batch, on the GPU."""

    hidden: int = 320
    inter: int = 192
    experts: int = 8
    tokens: int = 12
    top_k: int = 4
    routing: str = "uniform"
    seed: int = 0
    spread: int = 2
    bias_scale: float = 1.0
    activation_scale: float = 1.0
    product: str = "down"
    group: int = 128
    mxfp4: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    bias: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(self.seed)
        n, k = self.shape
        blocks = torch.randint(
            0, 256, (self.experts, n, k // 32, 16), generator=generator, dtype=torch.uint8, device="cuda"
        )
        scales = torch.randint(
            120 - self.spread, 121, (self.experts, n, k // 32), generator=generator, dtype=torch.uint8, device="cuda"
        )
        self.mxfp4 = (blocks, scales)
        noise = torch.randn(self.experts, n, generator=generator, device="cuda")
        self.bias = (noise * self.bias_scale).to(torch.bfloat16)
        self.ids = route(self.routing, self.tokens, self.top_k, self.experts)
        flat = self.ids.reshape(-1)
        order = torch.argsort(torch.where(flat < 0, self.experts, flat), stable=True)
        counts = torch.bincount(flat[flat >= 0], minlength=self.experts)
        self.counts = counts.tolist()
        offsets = torch.zeros(self.experts + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        slots = order.to(torch.int32)
        slots[int(offsets[-1]) :] = -1
        self.offsets, self.slots = offsets.cuda(), slots.cuda()
        self.total = int(offsets[-1])
        self.weights = torch.rand(self.tokens, self.top_k, generator=generator, device="cuda")
        rows = self.tokens if self.product == "gate_up" else self.tokens * self.top_k
        wide = torch.randn(rows, k, generator=generator, device="cuda") * self.activation_scale
        heavy = torch.rand(rows, k, generator=generator, device="cuda") < 0.01
        wide = torch.where(heavy, wide * 20, wide)
        if self.product == "down" and self.group == 0:
            wide = wide.clamp(-56, 56)
        self.x, self.x_scale = act_quant(wide, 128 if self.product == "gate_up" else self.group)

    @property
    def shape(self) -> tuple[int, int]:
        return (2 * self.inter, self.hidden) if self.product == "gate_up" else (self.hidden, self.inter)

    @property
    def sum_tolerance(self) -> float:
        return SHORT_SUM_TOLERANCE if self.shape[1] < SHORT_SUM else SUM_TOLERANCE

    def packed(self, storage: Storage) -> torch.Tensor:
        if storage is Storage.MXFP4:
            return weight_layout.pack_mxfp4(*self.mxfp4)
        return weight_layout.pack_fp8(*fp8_block.from_mxfp4(*self.mxfp4)[:2])


class Guarded:
    """A poisoned tensor between guard bands."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self.buffer = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device="cuda")
        self.bytes = self.buffer[GUARD_BYTES : GUARD_BYTES + size]
        self.tensor = self.bytes.view(dtype).view(shape)

    def check(self, written: torch.Tensor | None = None) -> None:
        """Guard bands are whole; rows not `written` (bool, first dimensions) are still poison."""
        assert bool((self.buffer[:GUARD_BYTES] == POISON).all()) and bool((self.buffer[-GUARD_BYTES:] == POISON).all())
        if written is not None and not bool(written.all()):
            raw = self.bytes.view(*written.shape, -1)
            assert bool((raw[~written] == POISON).all()), "a row of nobody was written"


@dataclass
class Result:
    values: torch.Tensor
    scale: torch.Tensor | None = None


def run(case: Case, options: Options, storage: Storage = Storage.MXFP4, dtype: torch.dtype = torch.bfloat16) -> Result:
    packed = case.packed(storage)
    none = torch.empty(0)
    rows = case.tokens * case.top_k
    if case.product == "gate_up":
        h = Guarded((rows, case.inter), torch.float8_e4m3fn)
        groups = -(-case.inter // case.group) if case.group else 0
        scale = Guarded((groups, rows), torch.float32)
        moe_gate_up(
            case.x, case.x_scale, packed, none, case.bias, case.offsets, none, case.slots, case.top_k, LIMIT, ALPHA,
            "sm90_v1", case.group, h.tensor, scale.tensor if case.group else None, options,
        )  # fmt: skip
        torch.cuda.synchronize()
        h.check(torch.arange(rows, device="cuda") < case.total)
        scale.check()
        return Result(h.tensor, scale.tensor if case.group else None)
    out = Guarded((case.tokens, case.top_k, case.hidden), dtype)
    moe_down(
        case.x, case.x_scale, packed, none, case.bias, case.weights, case.offsets, none, case.slots, "sm90_v1",
        case.group, out.tensor, options,
    )  # fmt: skip
    torch.cuda.synchronize()
    out.check((case.ids >= 0).cuda())
    return Result(out.tensor)


# ---- the reference ---------------------------------------------------------------------------------------------------


def dequantised(case: Case) -> torch.Tensor:
    """Activations fp64 [rows, K]."""
    wide = case.x.to(torch.float64)
    if case.x_scale is None:
        return wide / 8
    group = 128 if case.product == "gate_up" else case.group
    return wide * case.x_scale.T.to(torch.float64).repeat_interleave(group, dim=1)[:, : wide.shape[1]]


def sums(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 sums with bias, and sums of absolute terms, both [total, N] by sorted row."""
    x = dequantised(case)
    slots = case.slots[: case.total].long()
    rows = x[slots // case.top_k] if case.product == "gate_up" else x[: case.total]
    values, magnitudes = [], []
    begin = 0
    for expert, count in enumerate(case.counts):
        if count == 0:
            continue
        blocks, scales = (tensor[expert : expert + 1] for tensor in case.mxfp4)
        weight, scale, _ = fp8_block.from_mxfp4(blocks, scales)
        wide = weight[0].to(torch.float64) * fp8_block.expand_blocks(scale[0], *weight.shape[-2:]).to(torch.float64)
        part = rows[begin : begin + count]
        bias = case.bias[expert].to(torch.float64)
        values.append(part @ wide.T + bias)
        magnitudes.append(part.abs() @ wide.abs().T + bias.abs())
        begin += count
    empty = x.new_zeros((0, case.shape[0]))
    return torch.cat(values or [empty]), torch.cat(magnitudes or [empty])


def swiglu64(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def down_excess(case: Case, result: Result) -> float:
    """Largest error over its tolerance."""
    values, magnitudes = sums(case)
    slots = case.slots[: case.total].long()
    weight = case.weights.reshape(-1)[slots].to(torch.float64).unsqueeze(1)
    expected = values * weight
    got = result.values.reshape(-1, case.hidden)[slots]
    mantissa = 7 if got.dtype == torch.bfloat16 else 23
    ulp = torch.exp2(torch.floor(torch.log2(expected.abs().clamp_min(2.0**-120))) - mantissa)
    tolerance = torch.maximum(ulp, case.sum_tolerance * magnitudes * weight.abs())
    return worst((got.to(torch.float64) - expected).abs(), tolerance)


def gate_up_excess(case: Case, result: Result) -> float:
    """Largest error over its tolerance: one ulp of e4m3 under the row's own scale, and what the tolerance of the two
    sums makes of SwiGLU."""
    values, magnitudes = sums(case)
    gate, up = values[:, 0::2], values[:, 1::2]
    slack_gate, slack_up = (case.sum_tolerance * magnitudes[:, row::2] for row in (0, 1))
    expected = swiglu64(gate, up)
    moved = torch.zeros_like(expected)
    for a in (-1, 1):
        for b in (-1, 1):
            moved = torch.maximum(moved, (swiglu64(gate + a * slack_gate, up + b * slack_up) - expected).abs())
    if result.scale is None:
        scale = torch.full_like(expected, 0.125)
        scale_excess = 0.0
    else:
        scale = result.scale[:, : case.total].T.to(torch.float64).repeat_interleave(case.group, dim=1)[:, : case.inter]
        padded = torch.nn.functional.pad(expected.abs(), (0, -case.inter % case.group)).unflatten(1, (-1, case.group))
        room = torch.nn.functional.pad(moved, (0, -case.inter % case.group)).unflatten(1, (-1, case.group))
        wanted = padded.amax(-1) / 448
        error = (result.scale[:, : case.total].T.to(torch.float64) - wanted).abs()
        scale_excess = worst(error, room.amax(-1) / 448 + wanted * 2e-6)
    got = result.values[: case.total].to(torch.float64) * scale
    exponent = torch.floor(torch.log2((expected.abs() / scale).clamp_min(2.0**-6)))
    tolerance = torch.exp2(exponent - 3) * scale * 1.01 + moved
    return max(scale_excess, worst((got - expected).abs(), tolerance))


def worst(error: torch.Tensor, tolerance: torch.Tensor) -> float:
    ratio = torch.where(error == 0, torch.zeros_like(error), error / tolerance)
    return float(torch.nan_to_num(ratio, nan=float("inf")).max()) if ratio.numel() else 0.0


def excess(case: Case, result: Result) -> float:
    return gate_up_excess(case, result) if case.product == "gate_up" else down_excess(case, result)


# ---- tests -----------------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("storage", list(Storage))
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
        results = [run(case, options, storage) for storage in Storage]
        assert_same(case, *results)


def assert_same(case: Case, first: Result, second: Result) -> None:
    if case.product == "down":
        slots = case.slots[: case.total].long()
        a, b = (r.values.reshape(-1, case.hidden)[slots].view(torch.uint8) for r in (first, second))
    else:
        a, b = (r.values[: case.total].view(torch.uint8) for r in (first, second))
        if first.scale is not None and second.scale is not None:
            assert torch.equal(first.scale[:, : case.total], second.scale[:, : case.total])
    assert torch.equal(a, b)


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


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_mutations_fail(product: str, mutate: Callable[[Case], None]) -> None:
    """A kernel that did what the mutation does would be seen: its result fails what the right one passes."""
    sizes = {"hidden": 320, "inter": 320, "tokens": 64, "top_k": 1, "routing": "one", "product": product}
    case, mutated = Case(**sizes), Case(**sizes)
    mutate(mutated)
    assert excess(case, run(case, Options(Plan.WGMMA))) <= 1.0
    assert excess(case, run(mutated, Options(Plan.WGMMA))) > 1.0


def test_an_expert_without_rows_reads_nothing() -> None:
    """Weights of experts in no use may be garbage: NaN scales there change nothing."""
    case = Case(hidden=320, inter=192, tokens=2, top_k=1, experts=8, product="down")
    clean = run(case, Options(Plan.WGMMA))
    packed = case.packed(Storage.MXFP4)
    unused = torch.tensor([count == 0 for count in case.counts], device="cuda")
    packed[unused] = 0xFF
    spoiled = replace(case)
    spoiled.packed = lambda _storage: packed  # type: ignore[method-assign]
    assert_same(case, clean, run(spoiled, Options(Plan.WGMMA)))
