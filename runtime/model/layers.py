"""The layers of gpt-oss as compositions of ops: dense, attention, experts, and the norm between them.

Invariant: all arithmetic happens in `torch.ops.gptoss_trt.*`; a layer chooses the op for its engine's formats when it
is made and allocates the op's outputs. Must not know files, requests or steps' origin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gptoss_trt.build_engine.spec import H_GROUPS, qkv_segments
from gptoss_trt.ops import ops, plan
from gptoss_trt.ops.prepare import PREFILL_ROWS, prefill_bytes, prefill_experts, prepare_dense, prepare_experts
from gptoss_trt.runtime.model.collectives import Group
from gptoss_trt.runtime.model.loader import RankWeights
from gptoss_trt.runtime.model.step import Ends, Pool, Step

E4M3 = torch.float8_e4m3fn
ADDING_TOKENS = 512  # from which on an FP8 `out` ends with the residual's addition; few are added by the norm
ENDS_APART_TOKENS = 1024  # from which on queries of last tokens alone save more than kernels of their own cost


@dataclass(frozen=True)
class Normed:
    """What the product that follows a norm or attention reads: bf16 [T, H], or quantised e4m3 [T, H] with scales fp32
    [ceil(H / 128), T]."""

    values: torch.Tensor | None
    quantised: torch.Tensor | None
    scales: torch.Tensor | None

    @classmethod
    def empty(cls, like: torch.Tensor, quantise: bool) -> Normed:
        tokens, hidden = like.shape
        if not quantise:
            return cls(torch.empty_like(like), None, None)
        return cls(
            None,
            torch.empty((tokens, hidden), dtype=E4M3, device=like.device),
            torch.empty((-(-hidden // 128), tokens), dtype=torch.float32, device=like.device),
        )

    def of_rows(self, rows: torch.Tensor) -> Normed:
        """Some tokens' alone; rows int64 [S]."""
        if self.quantised is None or self.scales is None:
            assert self.values is not None
            return Normed(self.values[rows], None, None)
        codes = self.quantised.view(torch.uint8)[rows].view(E4M3)
        return Normed(None, codes, self.scales.index_select(1, rows))


class Norm:
    """RMSNorm behind the residual addition, quantising for the product that follows when that one is FP8."""

    def __init__(self, weights: RankWeights, stem: str, quantise: bool) -> None:
        self.weight = weights[f"{stem}.weight"]
        self.eps = weights.manifest.model.rms_norm_eps
        self.quantise = quantise

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None = None) -> Normed:
        """residual += delta (in place), then the norm of it."""
        out = Normed.empty(residual, self.quantise)
        ops.rmsnorm_quant(residual, delta, self.weight, self.eps, out.values, out.quantised, out.scales)
        return out


class Dense:
    """A dense product in the engine's format; `adds_bias` is false on the ranks that leave the bias to another."""

    def __init__(
        self, weights: RankWeights, stem: str, *, segments: tuple[int, ...] = (), adds_bias: bool = True
    ) -> None:
        self.fp8 = weights.manifest.formats.dense == "fp8_block128"
        self.weight = weights[f"{stem}.weight"]
        self.scale = weights[f"{stem}.weight_scale"] if self.fp8 else None
        self.bias = weights.tensors.get(f"{stem}.bias") if adds_bias else None
        self._segments = list(segments)
        prepare_dense(self.weight, self.scale, self._segments)

    def __call__(self, x: Normed, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[T, K] -> [T, N] in dtype bf16 or fp32."""
        if x.quantised is None:
            assert x.values is not None
            out = self._empty(x.values, dtype)
            ops.dense(x.values, self.weight, self.bias, out)
            return out
        out = self._empty(x.quantised, dtype)
        ops.dense_fp8(x.quantised, x.scales, self.weight, self.scale, self._segments, self.bias, out)
        return out

    def add_to(self, residual: torch.Tensor, x: Normed) -> None:
        """residual += the product of a quantised activation, rounded to bf16 on the way."""
        ops.dense_fp8_add(x.quantised, x.scales, self.weight, self.scale, self._segments, self.bias, residual)

    def rope_kv_append(self, x: Normed, rotation: tuple[Any, ...]) -> None:
        """The product of a quantised activation, and the op of that name with it; `rotation` is what that op takes
        behind qkv."""
        ops.dense_fp8_rope_kv_append(
            x.quantised, x.scales, self.weight, self.scale, self._segments, self.bias, *rotation
        )

    def behind_first(self) -> Dense:
        """The product with the rows behind the first segment, which it has with no rows; of the same memory."""
        rows, *others = self._segments
        rest = copy.copy(self)
        rest._segments = [0, *others]
        rest.weight = self.weight[rows:]
        rest.scale = None if self.scale is None else self.scale[-(-rows // 128) :]
        rest.bias = None if self.bias is None else self.bias[rows:]
        return rest

    def _empty(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((len(x), self.weight.shape[0]), dtype=dtype, device=x.device)


class Attention:
    """qkv, rotation and append, attention, output projection; the ranks of `group` hold a part of the heads each."""

    def __init__(self, weights: RankWeights, layer: int, group: Group) -> None:
        config, share, stem = weights.manifest.model, weights.share, f"layers.{layer}.attention"
        self.norm = Norm(weights, f"{stem}.norm", weights.manifest.formats.dense == "fp8_block128")
        self.qkv = Dense(weights, f"{stem}.qkv", segments=qkv_segments(config, weights.manifest.mapping))
        self._keys_values = self.qkv.behind_first()
        self.out = Dense(weights, f"{stem}.out", adds_bias=share.adds_attention_bias)
        self.sinks = weights[f"{stem}.sinks"]
        self._heads = share.q_heads[1] - share.q_heads[0]
        self._head_dim = config.head_dim
        self._window = config.window(layer)
        fp8_kv = weights.manifest.formats.kv == "fp8"
        self._kv_scales = tuple(float(weights[f"{stem}.{name}_scale"]) if fp8_kv else 1.0 for name in "kv")
        self._group = group

    def __call__(
        self,
        x: Normed,
        step: Step,
        kv: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        residual: torch.Tensor,
        ends: Ends | None = None,
    ) -> torch.Tensor | None:
        """What this layer adds to the residual, bf16 [T, H], or [S, H] of the rows of `ends`; None where it has added
        it, in place. Appends to kv."""
        pool = step.window if self._window else step.full
        if ends is not None:
            q = self._end_queries(x, step, pool, ends, (cos_sin, *kv))
        else:
            q = self._rotated(self.qkv, x, self._heads, (step.positions, pool.slots), (cos_sin, *kv))
        out = Normed.empty(q.flatten(1), self.out.fp8)
        where = (pool.block_table, pool.first_block)
        how = (self.sinks, self._window, self._head_dim**-0.5, *self._kv_scales)
        outputs = (out.quantised, out.scales) if out.values is None else (out.values.view(q.shape),)
        if step.single or ends is not None:
            decode = ops.attention_decode_quant if self.out.fp8 else ops.attention_decode
            decode(q, *kv, *where, step.context_lens, *how, *outputs)
        else:
            prefill = ops.attention_prefill_quant if self.out.fp8 else ops.attention_prefill
            prefill(q, *kv, *where, step.query_start, step.context_lens, *how, *outputs)
        if self.out.fp8 and ends is None and self._group.size == 1 and len(residual) >= ADDING_TOKENS:
            self.out.add_to(residual, out)
            return None
        return reduce_partial(lambda dtype: self.out(out, dtype), self._group)

    def _end_queries(
        self, x: Normed, step: Step, pool: Pool, ends: Ends, shared: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """The rotated queries of the rows of `ends`, bf16 [S, heads, head_dim]; all tokens' keys and values go to kv.

        Between the keys' writer and who reads them is a kernel of torch's (ops/attention.py)."""
        where = step.positions, pool.slots
        if step.tokens < ENDS_APART_TOKENS:
            return self._rotated(self.qkv, x, self._heads, where, shared)[ends.rows]
        # Rotation reads positions and slots ahead of its wait: they are written before the kernel ahead of it begins.
        positions = step.positions[ends.rows]
        unkept = torch.full_like(positions, -1)
        self._rotated(self._keys_values, x, 0, where, shared)
        return self._rotated(self.qkv, x.of_rows(ends.rows), self._heads, (positions, unkept), shared)

    def _rotated(
        self,
        product: Dense,
        x: Normed,
        heads: int,
        where: tuple[torch.Tensor, torch.Tensor],
        shared: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """The rotated queries, bf16 [T, heads, head_dim], of a product with q, k and v, of which keys and values go to
        kv. `where`: positions and slots; `shared`: cos_sin and kv."""
        (positions, slots), (cos_sin, *kv) = where, shared
        q = torch.empty((len(positions), heads, self._head_dim), dtype=torch.bfloat16, device=cos_sin.device)
        rotation = (positions, cos_sin, slots, *self._kv_scales, q, *kv)
        if x.quantised is None:
            ops.rope_kv_append(product(x), *rotation)
        else:
            product.rope_kv_append(x, rotation)
        return q


Prepared = tuple[torch.Tensor, torch.Tensor, str]  # weight, scale, layout
GATE_UP, DOWN = 0, 1  # products of Experts


class Experts:
    """Router and experts; the ranks of `group` hold some experts, or a part of each expert's intermediates."""

    def __init__(self, weights: RankWeights, layer: int, group: Group) -> None:
        config, formats, share = weights.manifest.model, weights.manifest.formats, weights.share
        stem = f"layers.{layer}.moe"
        names = ("blocks", "scales") if formats.experts == "mxfp4" else ("weight", "weight_scale")
        self.norm = Norm(weights, f"{stem}.norm", True)
        self.router = (weights[f"{stem}.router.weight"], weights[f"{stem}.router.bias"])
        prepare_dense(self.router[0])
        width = share.intermediates[1] - share.intermediates[0]
        shapes = {"gate_up": (2 * width, config.hidden_size), "down": (config.hidden_size, width)}
        self._shapes = tuple(shapes.values())
        self._gate_up, self._down = (
            prepare_experts(
                f"moe_{part}",
                weights[f"{stem}.{part}.{names[0]}"],
                weights[f"{stem}.{part}.{names[1]}"],
                formats.weight_layout,
                shape,
            )
            for part, shape in shapes.items()
        )
        self.gate_up_bias = weights[f"{stem}.gate_up.bias"]
        self.down_bias = weights[f"{stem}.down.bias"] if share.adds_expert_bias else None
        self._top_k = config.experts_per_token
        self._local = (share.experts[0], share.experts[1] - share.experts[0])
        self._activation = (config.swiglu_limit, config.swiglu_alpha)
        self._h_group = H_GROUPS[formats.h_scale]
        self._group = group
        self._prefill: list[Prepared | None] = [None, None]  # of GATE_UP, of DOWN
        storage = "mxfp4" if formats.experts == "mxfp4" else "fp8"
        choices = plan.choices("experts", (storage, self._local[1], config.hidden_size, width))
        self._prefill_from: int | None = -(-PREFILL_ROWS * self._local[1] // self._top_k)  # tokens
        if choices is not None:
            self._prefill_from = choices.least("tiles")

    def prefill_bytes(self, most_tokens: int) -> tuple[int, int]:
        """Bytes of an FP8 copy of gate_up's weights and of down's; 0 where no step of up to `most_tokens` would read
        it."""
        if self._h_group or not self._is_prefill(most_tokens):
            return 0, 0
        (gate_up, _, gate_up_layout), (down, _, down_layout) = self._gate_up, self._down
        return (
            prefill_bytes("moe_gate_up", gate_up, gate_up_layout, self._shapes[0]),
            prefill_bytes("moe_down", down, down_layout, self._shapes[1]),
        )

    def copy_for_prefill(self, part: int) -> None:
        """Makes the copy of GATE_UP or DOWN."""
        weight, scale, _ = (self._gate_up, self._down)[part]
        self._prefill[part] = prefill_experts(weight, scale, self._shapes[part])

    @property
    def layout(self) -> str:
        """In which both products' weights lie."""
        return self._gate_up[2] if self._gate_up[2] == self._down[2] else "mixed"

    @property
    def gate_up_weight(self) -> torch.Tensor:
        return self._gate_up[0]

    @property
    def down_weight(self) -> torch.Tensor:
        return self._down[0]

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step, following: Norm | None
    ) -> tuple[torch.Tensor, Normed | None]:
        """(residual + delta + experts of its norm, `following`'s norm of that; None without one). Without delta the
        residual is updated in place."""
        updated = residual if delta is None else torch.empty_like(residual)
        ids, rows = self._slots(residual, delta, updated, step)
        if self._group.size > 1:
            more = reduce_partial(lambda dtype: self._combine(rows, ids, dtype), self._group)
            if following is not None:
                return updated, following(updated, more)
            return updated.add_(more), None
        if following is None:
            ops.moe_combine(rows, ids, *self._local, True, updated)
            return updated, None
        out = Normed.empty(updated, following.quantise)
        norm = (following.weight, following.eps, out.values, out.quantised, out.scales)
        ops.moe_combine_norm(rows, ids, *self._local, updated, *norm)
        return updated, out

    def _is_prefill(self, tokens: int) -> bool:
        return self._prefill_from is not None and tokens >= self._prefill_from

    def _weights(self, tokens: int) -> tuple[Prepared, Prepared]:
        """gate_up's and down's for a step of so many tokens."""
        gate_up, down = self._prefill if self._is_prefill(tokens) else (None, None)
        return gate_up or self._gate_up, down or self._down

    def _slots(
        self, residual: torch.Tensor, delta: torch.Tensor | None, updated: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids int32 [T, k] and weighted expert rows by (token, slot), bf16 [T, k, H] (fp32 among ranks), of the
        norm of residual + delta, which goes into `updated`."""
        tokens, hidden = residual.shape
        device, local = residual.device, self._local[1]
        ids = torch.empty((tokens, self._top_k), dtype=torch.int32, device=device)
        weights = torch.empty((tokens, self._top_k), dtype=torch.float32, device=device)
        offsets = torch.empty(local + 1, dtype=torch.int32, device=device)
        active = torch.empty_like(offsets)
        slots = torch.empty(tokens * self._top_k, dtype=torch.int32, device=device)
        x = torch.empty((tokens, hidden), dtype=E4M3, device=device)
        x_scale = torch.empty((-(-hidden // 128), tokens), dtype=torch.float32, device=device)
        router = (self.norm.weight, self.norm.eps, *self.router, step.token_count, *self._local)
        ops.rmsnorm_route(residual, delta, *router, updated, x, x_scale, ids, weights, offsets, active, slots)
        where = (offsets, active, slots)
        intermediate = self.gate_up_bias.shape[1] // 2
        h = torch.empty((len(slots), intermediate), dtype=E4M3, device=device)
        h_scale = None
        if self._h_group:
            h_scale = torch.empty((-(-intermediate // self._h_group), len(slots)), dtype=torch.float32, device=device)
        gate_up, down = self._weights(tokens)
        weight, scale, layout = gate_up
        how = (self._top_k, *self._activation, layout, self._h_group)
        ops.moe_gate_up(x, x_scale, weight, scale, self.gate_up_bias, *where, *how, h, h_scale)
        rows = torch.empty((tokens, self._top_k, hidden), dtype=partial_dtype(self._group), device=device)
        weight, scale, layout = down
        ops.moe_down(h, h_scale, weight, scale, self.down_bias, weights, *where, layout, self._h_group, rows)
        return ids, rows

    def _combine(self, rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty((rows.shape[0], rows.shape[2]), dtype=dtype, device=rows.device)
        ops.moe_combine(rows, ids, *self._local, False, out)
        return out


def partial_dtype(group: Group) -> torch.dtype:
    """A value that is whole on this rank is bf16; one that others add to is fp32 until the sum."""
    return torch.bfloat16 if group.size == 1 else torch.float32


def reduce_partial(compute: Callable[[torch.dtype], torch.Tensor], group: Group) -> torch.Tensor:
    """compute(dtype) summed over the group, in bf16: rounded once, as on one rank."""
    return group.all_reduce(compute(partial_dtype(group))).to(torch.bfloat16)
