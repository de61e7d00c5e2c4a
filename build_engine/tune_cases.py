"""What `build --tune` measures: each op of a plan at an engine's shapes, with random weights in several copies.

Invariant: a case calls the op that serving calls; copies of large weights are together larger than any cache. Must not
know which choice is best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from gptoss_trt.build_engine.spec import H_GROUPS, Manifest, ModelConfig, qkv_segments
from gptoss_trt.ops import ops, plan
from gptoss_trt.ops.dense import MOST_ROWS, MOST_TOKENS
from gptoss_trt.ops.library import DenseFormat
from gptoss_trt.ops.plan import Choices, Shape
from gptoss_trt.ops.prepare import PREFILL_ROWS, prefill_bytes, prefill_experts, prepare_experts
from gptoss_trt.ops.rmsnorm_route import LEAST_TOKENS, MOST_FEW_TOKENS
from gptoss_trt.ops.storage import dense_to_fp8, mxfp4_to_fp8
from gptoss_trt.reference.tolerance import Exact, Row, Tolerance

E4M3 = torch.float8_e4m3fn
COPY_BYTES = 2 << 30  # of weights in all copies of a case
MOST_COPIES = 64
MOST_LOGITS = 1024  # the lm head multiplies last tokens alone
TILES_ROWS = 64  # an expert, from which on an engine without such a copy wants prefill too
SKEW = 0.5  # experts of read prompts are as uneven
# Of the largest of a row. Two orders of an fp32 sum differ by less than the first; another order moves some codes of h
# by one step, which the second leaves room for (a wrong tile is off by whole values).
SUMS, THROUGH_CODES = Row(2**-9), Row(2**-4)
NORM = Row(2**-3)  # codes a step apart
ROUTING = Row(2**-5)  # weights where nearly equal logits change places


Stored = tuple[list[torch.Tensor], torch.Tensor, str]  # copies of a weight, its scale, layout


@dataclass(frozen=True)
class Case:
    """`call(choice, i)` runs the op under a trial plan with its i-th copy of weights, of `copies`; what it writes, and
    how close two choices are."""

    call: Callable[[str, int], None]
    copies: int
    outputs: tuple[tuple[torch.Tensor, Tolerance], ...]


@dataclass(frozen=True)
class Subject:
    """An op at one shape."""

    op: str
    shape: Shape
    built_in: Choices
    most_tokens: int
    candidates: Callable[[int], list[str]]
    make: Callable[[int], Case]


def subjects(manifest: Manifest, device: torch.device, wanted: Sequence[str] = tuple(plan.OPS)) -> list[Subject]:
    """Of an engine of one rank, weights made as they are asked for. Ops that its formats do not use are left out."""
    maker = _Maker(manifest, device)
    found = maker.dense() + maker.experts() + maker.route()
    return [subject for subject in found if subject.op in wanted]


def tile_candidates(tokens: int) -> list[str]:
    """Of dense_fp8: tiles that are not mostly empty or too many, K in parts for few tokens only."""
    tiles = [tile for tile, least, most in ((64, 1, 512), (128, 33, 1 << 30), (256, 129, 1 << 30))
             if least <= tokens <= most]  # fmt: skip
    parts = range(1, 5) if tokens <= 256 else range(1, 2)
    few = ["few"] if tokens <= plan.OPS["dense_fp8"].most["few"] else []
    return few + [f"{tile}/{part}" for tile in tiles for part in parts if tile < 256 or part == 1]


class _Maker:
    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._config: ModelConfig = manifest.model
        self._manifest, self._formats, self._device = manifest, manifest.formats, device
        self._held: tuple[str, Any] = ("", None)  # one subject's weights

    def dense(self) -> list[Subject]:
        config = self._config
        segments = list(qkv_segments(config, self._manifest.mapping))
        return [
            self._product("qkv", segments, config.hidden_size, 1 << 20),
            self._product("out", [config.hidden_size], config.q_size, 1 << 20),
            self._product("lm_head", [config.vocab_size], config.hidden_size, MOST_LOGITS),
        ]

    def _product(self, what: str, segments: list[int], columns: int, most_tokens: int) -> Subject:
        fp8 = self._formats.dense == "fp8_block128"
        rows = sum(segments)
        few = rows <= MOST_ROWS
        if fp8:
            names = ("few", "auto") if few else ("auto",)
            built_in = Choices((MOST_TOKENS[DenseFormat.FP8],)[: len(names) - 1], names)
            candidates = tile_candidates
        else:
            names = ("few", "triton") if few else ("triton",)
            built_in = Choices((MOST_TOKENS[DenseFormat.BF16],)[: len(names) - 1], names)

            def candidates(tokens: int) -> list[str]:
                return ["few", "triton"] if tokens <= plan.OPS["dense"].most["few"] else ["triton"]

        op = "dense_fp8" if fp8 else "dense"
        make = self._fp8_case if fp8 else self._bf16_case
        return Subject(op, (rows, columns), built_in, most_tokens, candidates,
                       lambda tokens: make(what, segments, columns, tokens))  # fmt: skip

    def _bf16(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _weights(self, what: str, make: Callable[[], Any]) -> Any:
        """Made once for all numbers of tokens; those of the subject before are let go."""
        if self._held[0] != what:
            self._held = ("", None)
            self._held = (what, make())
        return self._held[1]

    def _copies(self, first: torch.Tensor) -> list[torch.Tensor]:
        most = COPY_BYTES if self._device.type == "cuda" else 0
        count = max(1, min(MOST_COPIES, most // (first.numel() * first.itemsize)))
        return [first] + [first.clone() for _ in range(count - 1)]

    def _logits(self, what: str) -> torch.dtype:
        return torch.float32 if what == "lm_head" else torch.bfloat16

    def _bf16_case(self, what: str, segments: list[int], columns: int, tokens: int) -> Case:
        rows = sum(segments)
        weights = self._weights(what, lambda: self._copies(self._bf16(rows, columns)))
        x, bias, out = self._bf16(tokens, columns), None, self._empty(tokens, rows, dtype=self._logits(what))
        if what != "lm_head":
            bias = self._bf16(rows)
        return Case(lambda _, i: ops.dense(x, weights[i], bias, out), len(weights), ((out, SUMS),))

    def _fp8_case(self, what: str, segments: list[int], columns: int, tokens: int) -> Case:
        rows = sum(segments)

        def make() -> tuple[list[torch.Tensor], torch.Tensor]:
            weight, scale = dense_to_fp8(self._bf16(rows, columns), segments)
            return self._copies(weight), scale

        weights, scale = self._weights(what, make)
        parts = segments if what == "qkv" else []
        x, out = self._bf16(tokens, columns), self._empty(tokens, rows, dtype=self._logits(what))
        bias = None if what == "lm_head" else self._bf16(rows)
        values, x_scale = self._quantised(x)
        return Case(lambda _, i: ops.dense_fp8(values, x_scale, weights[i], scale, parts, bias, out), len(weights),
                    ((out, SUMS),))  # fmt: skip

    def _quantised(self, x: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, columns = x.shape
        values = self._empty(rows, columns, dtype=E4M3)
        scales = self._empty(-(-columns // group), rows, dtype=torch.float32) if group else None
        ops.act_quant(x, group, values, scales)
        return values, scales

    def experts(self) -> list[Subject]:
        config = self._config
        experts, hidden, inter = config.num_experts, config.hidden_size, config.intermediate_size
        storage = "mxfp4" if self._formats.experts == "mxfp4" else "fp8"
        least = -(-PREFILL_ROWS * experts // config.experts_per_token)

        def candidates(tokens: int) -> list[str]:
            rows = tokens * config.experts_per_token / experts
            fits = {"decode": rows <= 128, "prefill": rows >= 8, "tiles": rows >= TILES_ROWS and self._has_tiles()}
            return [name for name, fit in fits.items() if fit]

        return [
            Subject("experts", (storage, experts, hidden, inter), Choices((least - 1,), ("auto", "tiles")), 1 << 20,
                    candidates, self._experts_case)
        ]  # fmt: skip

    def _has_tiles(self) -> bool:
        return "tiles" in self._stored()

    def _stored(self) -> dict[str, dict[str, Stored]]:
        """By storage (`packed`, and `tiles` where prompts may read them) and op."""
        return cast("dict[str, dict[str, Stored]]", self._weights("experts", self._make_experts))

    def _make_experts(self) -> dict[str, dict[str, Stored]]:
        config, packed, tiles = self._config, {}, {}
        hidden, inter = config.hidden_size, config.intermediate_size
        for op, shape in (("moe_gate_up", (2 * inter, hidden)), ("moe_down", (hidden, inter))):
            weight, scale, layout = prepare_experts(op, *self._plain(shape), self._formats.weight_layout, shape)
            packed[op] = (self._copies(weight), scale, layout)
            if not H_GROUPS[self._formats.h_scale] and prefill_bytes(op, weight, layout, shape):
                weight, scale, layout = prefill_experts(weight, scale, shape)
                tiles[op] = (self._copies(weight), scale, layout)
        return {"packed": packed} | ({"tiles": tiles} if len(tiles) == len(packed) else {})

    def _plain(self, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        experts, (rows, columns) = self._config.num_experts, shape
        size = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, device=self._device)
        scales = torch.randint(118, 121, size, dtype=torch.uint8, device=self._device)
        return (blocks, scales) if self._formats.experts == "mxfp4" else mxfp4_to_fp8(blocks, scales)

    def _experts_case(self, tokens: int) -> Case:
        config = self._config
        hidden, inter, top_k = config.hidden_size, config.intermediate_size, config.experts_per_token
        stored = self._stored()
        group = H_GROUPS[self._formats.h_scale]
        weights, *where = self._routing(tokens)
        x, x_scale = self._quantised(self._bf16(tokens, hidden))
        h = self._empty(tokens * top_k, inter, dtype=E4M3)
        h_scale = self._empty(-(-inter // group), len(h), dtype=torch.float32) if group else None
        bias = [self._bf16(config.num_experts, rows) for rows in (2 * inter, hidden)]
        out = self._empty(tokens, top_k, hidden)

        def call(choice: str, i: int) -> None:
            chosen = stored.get(choice, stored["packed"])
            (first, scale, layout), (second, second_scale, _) = chosen["moe_gate_up"], chosen["moe_down"]
            how = (top_k, config.swiglu_limit, config.swiglu_alpha, layout, group)
            ops.moe_gate_up(x, x_scale, first[i % len(first)], scale, bias[0], *where, *how, h, h_scale)
            weight = second[i % len(second)]
            ops.moe_down(h, h_scale, weight, second_scale, bias[1], weights, *where, layout, group, out)

        return Case(call, max(len(copies) for copies, _, _ in stored["packed"].values()), ((out, THROUGH_CODES),))

    def _routing(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Routing weights, offsets, active experts and slots of random experts, as uneven as SKEW says."""
        experts, top_k = self._config.num_experts, self._config.experts_per_token
        logits = torch.randn(tokens, experts) + SKEW * torch.randn(experts)
        ids = logits.topk(top_k).indices.reshape(-1)
        counts = torch.bincount(ids, minlength=experts)
        offsets = torch.zeros(experts + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        used = counts.nonzero()[:, 0]
        active = torch.full((experts + 1,), -1, dtype=torch.int32)
        active[0], active[1 : 1 + len(used)] = len(used), used.to(torch.int32)
        slots = torch.argsort(ids, stable=True).to(torch.int32)
        weights = torch.rand(tokens, top_k)
        return tuple(part.to(self._device) for part in (weights, offsets, active, slots))

    def route(self) -> list[Subject]:
        config = self._config
        most = next(few for up_to, few in MOST_FEW_TOKENS if config.num_experts <= up_to)
        built_in = Choices((LEAST_TOKENS - 1, most), ("triton", "cluster", "pieces"))

        def candidates(tokens: int) -> list[str]:
            fits = {"triton": tokens <= 64, "cluster": tokens <= plan.OPS["rmsnorm_route"].most["cluster"],
                    "pieces": tokens >= 16}  # fmt: skip
            return [name for name, fit in fits.items() if fit]

        shape = (config.num_experts, config.hidden_size)
        return [Subject("rmsnorm_route", shape, built_in, 1 << 15, candidates, self._route_case)]

    def _route_case(self, tokens: int) -> Case:
        config = self._config
        hidden, experts, top_k = config.hidden_size, config.num_experts, config.experts_per_token
        routers = self._weights("router", lambda: self._copies(self._bf16(experts, hidden) / hidden**0.5))
        x, delta, gain, bias = (
            self._bf16(*shape) for shape in ((tokens, hidden), (tokens, hidden), (hidden,), (experts,))
        )
        updated = self._empty(tokens, hidden)
        codes = self._empty(tokens, hidden, dtype=E4M3)
        scales = self._empty(-(-hidden // 128), tokens, dtype=torch.float32)
        weights = self._empty(tokens, top_k, dtype=torch.float32)
        ids, offsets, active, slots = (
            self._empty(*shape, dtype=torch.int32)
            for shape in ((tokens, top_k), (experts + 1,), (experts + 1,), (tokens * top_k,))
        )

        def call(_: str, i: int) -> None:
            ops.rmsnorm_route(
                x, delta, gain, config.rms_norm_eps, routers[i], bias, None, 0, experts, updated, codes, scales,
                ids, weights, offsets, active, slots,
            )  # fmt: skip

        return Case(call, len(routers), ((updated, Exact()), (codes, NORM), (weights, ROUTING)))
