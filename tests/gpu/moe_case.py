"""Cases of the expert product for GPU tests: weights, routing, poisoned outputs, and the format reference.

The reference takes the same FP8 values, multiplies exactly and adds in fp64. Every element of a result must lie within
max(1 ulp of the output, 2^-12 x sum of absolute scaled products), twice that below 2,048 columns: an instruction keeps
some 13 bits from its largest product down, and in a short sum one product can outweigh all others (measured, outliers
of 20 sigma: 1.05 x 2^-12 at 192 columns, 1.22 at 1,088; sums cut to 13 bits on paper: 1.30 there, 0.49 at 2,880).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gptoss_trt.ops import weight_layout
from gptoss_trt.ops.library import Storage
from gptoss_trt.ops.moe_gemm_fp8 import LAYOUT, TILES, Options, moe_down, moe_gate_up
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.act_quant import act_quant

LIMIT, ALPHA = 7.0, 1.702
SUM_TOLERANCE = 2.0**-12
SHORT_SUM_TOLERANCE = 2.0**-11
SHORT_SUM = 2048
GUARD_BYTES = 4096
POISON = 0xA5
# Rows of each of eight experts where every token has one: none, one block's edges, several blocks.
LADDER = (0, 1, 31, 33, 127, 129, 1000, 0)


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
    elif kind == "ladder":
        ids[:, 0] = torch.repeat_interleave(torch.arange(len(LADDER)), torch.tensor(LADDER))
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
        if storage is Storage.FP8_TILES:
            return weight_layout.pack_tiles(*fp8_block.from_mxfp4(*self.mxfp4)[:2])
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
    layout = TILES if storage is Storage.FP8_TILES else LAYOUT
    none = torch.empty(0)
    rows = case.tokens * case.top_k
    if case.product == "gate_up":
        h = Guarded((rows, case.inter), torch.float8_e4m3fn)
        groups = -(-case.inter // case.group) if case.group else 0
        scale = Guarded((groups, rows), torch.float32)
        moe_gate_up(
            case.x, case.x_scale, packed, none, case.bias, case.offsets, none, case.slots, case.top_k, LIMIT, ALPHA,
            layout, case.group, h.tensor, scale.tensor if case.group else None, options,
        )  # fmt: skip
        torch.cuda.synchronize()
        h.check(torch.arange(rows, device="cuda") < case.total)
        scale.check()
        return Result(h.tensor, scale.tensor if case.group else None)
    out = Guarded((case.tokens, case.top_k, case.hidden), dtype)
    moe_down(
        case.x, case.x_scale, packed, none, case.bias, case.weights, case.offsets, none, case.slots, layout,
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


def assert_same(case: Case, first: Result, second: Result) -> None:
    """The rows that are routed somewhere have the same bits."""
    if case.product == "down":
        slots = case.slots[: case.total].long()
        a, b = (r.values.reshape(-1, case.hidden)[slots].view(torch.uint8) for r in (first, second))
    else:
        a, b = (r.values[: case.total].view(torch.uint8) for r in (first, second))
        if first.scale is not None and second.scale is not None:
            assert torch.equal(first.scale[:, : case.total], second.scale[:, : case.total])
    assert torch.equal(a, b)
