"""The operators as a step calls them: arguments at a model's sizes, and what each call must read, write and multiply.

Invariant: inputs are random and weights have several copies, so that a caller can keep them out of the cache. A case's
bytes and operations are those that no implementation avoids. Must not know how calls are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from gptoss_trt.build_engine.spec import H_GROUPS, Formats, ModelConfig, qkv_segments
from gptoss_trt.build_engine.spec import ParallelMapping as Mapping
from gptoss_trt.ops import attention_flashinfer, ops, weight_layout
from gptoss_trt.ops.prepare import PREFILL_ROWS, RopeConfig, prefill_experts, prepare_experts, rope_table
from gptoss_trt.runtime.bench.bound import KV_BYTES, WEIGHT_BYTES
from gptoss_trt.runtime.model.graph_shapes import padded_width
from gptoss_trt.runtime.model.layers import ADDING_TOKENS
from gptoss_trt.runtime.model.random_tensors import RandomTensors

E4M3 = torch.float8_e4m3fn
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """`call(i)` runs the op with its i-th copy of weights, of `copies`; bytes and operations of one call. `others` are
    implementations to be measured beside the default: None, or why one has no kernel for the case."""

    op: str
    what: str
    call: Callable[[int], object]
    copies: int
    bytes_moved: float
    fp8_flop: float = 0.0
    bf16_flop: float = 0.0
    others: dict[str, str | None] = field(default_factory=dict)


class Cases:
    """Cases of one model at `tokens` tokens: `sequences` sequences of one token each, or one prompt."""

    def __init__(self, config: ModelConfig, formats: Formats, device: torch.device, copy_bytes: int) -> None:
        self._config, self._formats, self._device = config, formats, device
        self._copy_bytes = copy_bytes  # of weights, over all copies of a case
        self._tensors = RandomTensors(config, formats, 0, device)
        self._dense_forms = (False, True) if formats.dense == "fp8_block128" else (False,)
        windows = (0, config.sliding_window)
        self._attention_forms = [(window, fp8) for fp8 in self._dense_forms for window in windows]

    def make(self, op: str, tokens: int, context: int, decode: bool) -> list[Case]:
        """The cases of an op, and with dense FP8 of the op that a step calls in its place: the product of q, k and v
        with the rotation, attention that quantises; expert products of many tokens from FP8 copies too. KeyError for an
        op that has none."""
        makers: dict[str, Callable[[], list[Case]]] = {
            "embedding": lambda: [self._embedding(tokens)],
            "rmsnorm_quant": lambda: [self._rmsnorm(tokens)],
            "dense": lambda: self._dense(tokens, 1 if not decode else tokens),
            "kv_slots": lambda: [self._slots(tokens, context, decode)],
            "rope_kv_append": lambda: [self._rope(tokens, fp8) for fp8 in self._dense_forms],
            "attention_decode": lambda: [self._attention(tokens, context, *form) for form in self._attention_forms],
            "attention_prefill": lambda: [self._prefill(tokens, *form) for form in self._attention_forms],
            "moe_route": lambda: [self._route(tokens)],
            "rmsnorm_route": lambda: [self._rmsnorm_route(tokens)],
            "moe_gate_up": lambda: [self._experts(tokens, True, form) for form in self._expert_forms(tokens)],
            "moe_down": lambda: [self._experts(tokens, False, form) for form in self._expert_forms(tokens)],
            "moe_combine_norm": lambda: [self._combine(tokens)],
            "feed": lambda: [self._feed(tokens, context)],
            "sample": lambda: [self._sample(tokens if decode else 1)],
        }
        return makers[op]()

    def _bf16(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self._device) * scale).to(torch.bfloat16)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _ints(self, *shape: int) -> torch.Tensor:
        return self._empty(*shape, dtype=torch.int32)

    def _copies(self, weight_bytes: float) -> int:
        return max(1, min(16, int(self._copy_bytes // max(1, weight_bytes))))

    @staticmethod
    def _cloned(weight: torch.Tensor, copies: int) -> list[torch.Tensor]:
        return [weight] + [weight.clone() for _ in range(copies - 1)]

    def _embedding(self, tokens: int) -> Case:
        vocab, hidden = self._config.vocab_size, self._config.hidden_size
        ids = torch.randint(0, vocab, (tokens,), dtype=torch.int32, device=self._device)
        weight, out = self._bf16(vocab, hidden), self._empty(tokens, hidden)
        return Case("embedding", "", lambda _: ops.embedding(ids, weight, 0, out), 1, 4 * tokens * hidden)

    def _sample(self, rows: int) -> Case:
        logits = torch.randn((rows, self._config.vocab_size), device=self._device)
        temperature, share = torch.ones(rows, device=self._device), torch.rand(rows, device=self._device)
        out = (self._ints(1, rows), self._ints(rows))
        return Case("sample", "", lambda _: ops.sample(logits, temperature, share, None, *out), 1, 4 * logits.numel())

    def _feed(self, rows: int, context: int) -> Case:
        """The words of a step's shape: eight vectors and two tables."""
        words = rows * (8 + 3 + -(-context // BLOCK_TOKENS)) + 256
        host = torch.zeros(words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        memory, drawn, ids = self._ints(words), self._ints(rows), self._ints(rows)
        return Case("feed", "", lambda _: ops.feed(host, drawn, rows, memory, ids), 1, 8 * words)

    def _rmsnorm(self, tokens: int) -> Case:
        hidden = self._config.hidden_size
        x, delta, weight = self._bf16(tokens, hidden), self._bf16(tokens, hidden, scale=0.01), self._bf16(hidden)
        out = (self._empty(tokens, hidden), *self._quantised(tokens, hidden))
        moved = tokens * hidden * (2 + 2 + 2 + 2 + 1)  # residual read and written, delta, normed, quantised
        return Case("rmsnorm_quant", "", lambda _: ops.rmsnorm_quant(x, delta, weight, 1e-5, *out), 1, moved)

    def _quantised(self, rows: int, width: int, group: int = 128) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = self._empty(-(-width // group), rows, dtype=torch.float32) if group else None
        return self._empty(rows, width, dtype=E4M3), scales

    def _codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x bf16, quantised by groups of 128."""
        values, scales = self._quantised(*x.shape)
        ops.act_quant(x, 128, values, scales)
        return values, scales

    def _dense(self, tokens: int, head_rows: int) -> list[Case]:
        config = self._config
        qkv, out = "layers.0.attention.qkv", "layers.0.attention.out"
        products = [
            self._product("qkv", qkv, tokens, config.hidden_size, qkv_segments(config, Mapping())),
            self._product("out", out, tokens, config.q_size, ()),
            self._product("lm_head", "lm_head", head_rows, config.hidden_size, ()),
        ]
        if self._formats.dense == "fp8_block128" and tokens >= ADDING_TOKENS:
            products.append(self._product("out", out, tokens, config.q_size, (), adds=True))
        return products

    def _product(
        self, what: str, stem: str, tokens: int, columns: int, segments: tuple[int, ...], *, adds: bool = False
    ) -> Case:
        fp8 = self._formats.dense == "fp8_block128"
        first = self._tensors[f"{stem}.weight"]
        rows = first.shape[0]
        weight_bytes = rows * columns * WEIGHT_BYTES[self._formats.dense]
        copies = self._copies(weight_bytes)
        weights = self._cloned(first, copies)
        x = self._bf16(tokens, columns)
        out = self._empty(tokens, rows, dtype=torch.float32 if stem == "lm_head" else torch.bfloat16)
        moved = weight_bytes + tokens * columns * (1 if fp8 else 2) + out.numel() * out.element_size()
        flop = 2.0 * tokens * rows * columns
        if not fp8:
            return Case("dense", what, lambda i: ops.dense(x, weights[i], None, out), copies, moved, bf16_flop=flop)
        scale = self._tensors[f"{stem}.weight_scale"]
        values, scales = self._codes(x)
        op = ops.dense_fp8_add if adds else ops.dense_fp8

        def call(i: int) -> None:
            op(values, scales, weights[i], scale, list(segments), None, out)

        moved += 2.0 * out.numel() if adds else 0.0
        return Case("dense_fp8_add" if adds else "dense_fp8", what, call, copies, moved, fp8_flop=flop)

    def _tables(self, sequences: int, context: int, window: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Block table, first block and number of blocks of sequences of `context` tokens each."""
        first = max(0, context - window) // BLOCK_TOKENS if window else 0
        each = -(-context // BLOCK_TOKENS) - first
        order = torch.randperm(sequences * each).to(torch.int32)
        starts = torch.full((sequences,), first, dtype=torch.int32, device=self._device) if window else None
        return order.reshape(sequences, each).to(self._device), starts, sequences * each

    def _slots(self, tokens: int, context: int, decode: bool) -> Case:
        sequences = tokens if decode else 1
        table, _, _ = self._tables(sequences, max(context, tokens if not decode else 1), 0)
        each = tokens // sequences
        start = torch.arange(sequences + 1, dtype=torch.int32, device=self._device) * each
        positions = torch.arange(each, dtype=torch.int32, device=self._device).repeat(sequences)
        slots = self._ints(tokens)
        return Case(
            "kv_slots", "", lambda _: ops.kv_slots(positions, start, table, None, BLOCK_TOKENS, slots), 1, 12.0 * tokens
        )

    def _rope(self, tokens: int, fp8: bool) -> Case:
        config = self._config
        cache = [self._cache(-(-tokens // BLOCK_TOKENS)) for _ in range(2)]
        slots = torch.arange(tokens, dtype=torch.int32, device=self._device)
        q = self._empty(tokens, config.num_heads, config.head_dim)
        table = rope_table(RopeConfig(head_dim=config.head_dim), tokens, self._device)
        rotation = (slots, table, slots, 1.0, 1.0, q, *cache)
        if not fp8:
            qkv = self._bf16(tokens, config.qkv_size)
            return Case(
                "rope_kv_append", "", lambda _: ops.rope_kv_append(qkv, *rotation), 1, 4.0 * tokens * config.qkv_size
            )
        first, scale = (self._tensors[f"layers.0.attention.qkv.{part}"] for part in ("weight", "weight_scale"))
        rows, columns = first.shape
        copies = self._copies(rows * columns)
        weights = self._cloned(first, copies)
        values, scales = self._codes(self._bf16(tokens, columns))
        segments = list(qkv_segments(config, Mapping()))

        def call(i: int) -> None:
            ops.dense_fp8_rope_kv_append(values, scales, weights[i], scale, segments, None, *rotation)

        moved = rows * columns + tokens * (columns + 2.0 * rows)
        return Case("dense_fp8_rope_kv_append", "", call, copies, moved, fp8_flop=2.0 * tokens * rows * columns)

    def _attended(self, q: torch.Tensor, fp8: bool) -> list[torch.Tensor]:
        """What attention writes: values, or codes and scales for an FP8 product."""
        return (
            [part for part in self._quantised(len(q), q[0].numel()) if part is not None]
            if fp8
            else [torch.empty_like(q)]
        )

    def _cache(self, blocks: int) -> torch.Tensor:
        return self._bf16(blocks, self._config.num_kv_heads, BLOCK_TOKENS, self._config.head_dim)

    def _attention(self, sequences: int, context: int, window: int, fp8: bool) -> Case:
        config = self._config
        table, first, blocks = self._tables(sequences, context, window)
        if not window:  # the width that a captured step has for this context, which decides how keys are cut
            table = pad(table, (0, padded_width(table.shape[1]) - table.shape[1]), value=-1)
        keys = min(context, window) if window else context
        kv_bytes = sequences * keys * 2 * config.kv_size * KV_BYTES["bf16"]
        copies = self._copies(kv_bytes)
        caches = [(self._cache(blocks), self._cache(blocks)) for _ in range(copies)]
        contexts = torch.full((sequences,), context, dtype=torch.int32, device=self._device)
        q, sinks = self._bf16(sequences, config.num_heads, config.head_dim), self._bf16(config.num_heads)
        out, op = self._attended(q, fp8), "attention_decode_quant" if fp8 else "attention_decode"
        run = getattr(ops, op)

        def call(i: int) -> None:
            run(q, *caches[i], table, first, contexts, sinks, window, 0.125, 1.0, 1.0, *out)

        flop = 4.0 * sequences * config.q_size * keys
        what = f"window {window}" if window else "full"
        others = {} if fp8 else self._others(op, q, caches[0][0], window)
        return Case(op, what, call, copies, kv_bytes + 4 * q.numel(), bf16_flop=flop, others=others)

    def _others(self, op: str, q: torch.Tensor, cache: torch.Tensor, window: int) -> dict[str, str | None]:
        if self._device.type != "cuda":
            return {}
        shape = attention_flashinfer.shape_of(q, cache, window)
        return {attention_flashinfer.PACKAGE: attention_flashinfer.missing(op, shape)}

    def _prefill(self, tokens: int, window: int, fp8: bool) -> Case:
        config = self._config
        table, _, blocks = self._tables(1, tokens, 0)
        k, v = self._cache(blocks), self._cache(blocks)
        start = torch.tensor([0, tokens], dtype=torch.int32, device=self._device)
        q, sinks = self._bf16(tokens, config.num_heads, config.head_dim), self._bf16(config.num_heads)
        out, op = self._attended(q, fp8), "attention_prefill_quant" if fp8 else "attention_prefill"
        run = getattr(ops, op)
        pairs = tokens * (tokens + 1) / 2
        seen = min(pairs, tokens * window) if window else pairs

        def call(_: int) -> None:
            run(q, k, v, table, None, start, start[1:], sinks, window, 0.125, 1.0, 1.0, *out)

        moved = 4.0 * q.numel() + tokens * 2 * config.kv_size * 2
        what = f"window {window}" if window else "full"
        others = {} if fp8 else self._others(op, q, k, window)
        return Case(op, what, call, 1, moved, bf16_flop=4.0 * config.q_size * seen, others=others)

    def _routing(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """expert_ids, expert_weights, expert_offsets, active_experts, row_slots."""
        experts, top_k = self._config.num_experts, self._config.experts_per_token
        return (
            self._ints(tokens, top_k), self._empty(tokens, top_k, dtype=torch.float32),
            self._ints(experts + 1), self._ints(experts + 1), self._ints(tokens * top_k),
        )  # fmt: skip

    def _route(self, tokens: int) -> Case:
        config = self._config
        x, routing = self._bf16(tokens, config.hidden_size), self._routing(tokens)
        weight, bias = self._tensors["layers.0.moe.router.weight"], self._tensors["layers.0.moe.router.bias"]
        moved = 2.0 * (x.numel() + weight.numel())

        def call(_: int) -> None:
            ops.moe_route(x, weight, bias, None, 0, config.num_experts, *routing)

        return Case("moe_route", "", call, 1, moved, bf16_flop=2.0 * tokens * weight.numel())

    def _rmsnorm_route(self, tokens: int) -> Case:
        """With what attention gave; of many tokens in dense FP8 the residual has it already (`add_to` of layers.py)."""
        config = self._config
        hidden, routing = config.hidden_size, self._routing(tokens)
        x, weight = self._bf16(tokens, hidden), self._bf16(hidden)
        router, bias = self._tensors["layers.0.moe.router.weight"], self._tensors["layers.0.moe.router.bias"]
        added = self._formats.dense == "fp8_block128" and tokens >= ADDING_TOKENS
        delta = None if added else self._bf16(tokens, hidden, scale=0.01)
        updated = x if added else self._empty(tokens, hidden)
        out = (updated, *self._quantised(tokens, hidden), *routing)
        moved = tokens * hidden * (2 + 1 if added else 2 + 2 + 2 + 1) + 2.0 * router.numel()

        def call(_: int) -> None:
            ops.rmsnorm_route(x, delta, weight, 1e-5, router, bias, None, 0, config.num_experts, *out)

        what = "without delta" if added else ""
        return Case("rmsnorm_route", what, call, 1, moved, bf16_flop=2.0 * tokens * router.numel())

    def _expert_forms(self, tokens: int) -> tuple[bool, ...]:
        """Whether weights are FP8 copies: both where a step of so many tokens would read them."""
        rows = tokens * self._config.experts_per_token / self._config.num_experts
        return (False, True) if rows >= PREFILL_ROWS and not H_GROUPS[self._formats.h_scale] else (False,)

    def _expert_weight(self, name: str, shape: tuple[int, int], copied: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Weight, scale and layout of the first layer's product, as loaded or its FP8 copy."""
        mxfp4 = self._formats.experts == "mxfp4"
        parts = ("blocks", "scales") if mxfp4 else ("weight", "weight_scale")
        plain, scale = (self._tensors[f"layers.0.moe.{name}.{part}"] for part in parts)
        if not copied:
            return prepare_experts(f"moe_{name}", plain, scale, self._formats.weight_layout, shape)
        pack = weight_layout.pack_mxfp4 if mxfp4 else weight_layout.pack_fp8
        return prefill_experts(pack(plain, scale), scale.new_empty(0), shape)

    def _experts(self, tokens: int, gate_up: bool, copied: bool) -> Case:
        config, formats = self._config, self._formats
        hidden, inter, top_k = config.hidden_size, config.intermediate_size, config.experts_per_token
        name, shape = ("gate_up", (2 * inter, hidden)) if gate_up else ("down", (hidden, inter))
        weight, scale, layout = self._expert_weight(name, shape, copied)
        bias = self._tensors[f"layers.0.moe.{name}.bias"]
        routing = self._routing(tokens)
        router, zeros = self._tensors["layers.0.moe.router.weight"], torch.zeros_like(bias[:, 0])
        x = self._bf16(tokens, hidden)
        ops.moe_route(x, router, zeros, None, 0, config.num_experts, *routing)
        _, weights, offsets, active, slots = routing
        used = int(active[0])
        weight_bytes = shape[0] * shape[1] * WEIGHT_BYTES["fp8_block128" if copied else formats.experts]
        copies = self._copies(config.num_experts * weight_bytes)
        stored = self._cloned(weight, copies)
        group = H_GROUPS[formats.h_scale]
        h = self._quantised(tokens * top_k, inter, group)
        flop = 2.0 * tokens * top_k * shape[0] * shape[1]
        what = f"{used} experts, FP8 copies" if copied else f"{used} experts"
        if gate_up:
            values, scales = self._codes(x)

            def call(i: int) -> None:
                where = (offsets, active, slots, top_k, config.swiglu_limit, config.swiglu_alpha, layout, group)
                ops.moe_gate_up(values, scales, stored[i], scale, bias, *where, *h)
        else:
            ops.act_quant(self._bf16(tokens * top_k, inter), group, *h)
            out = self._empty(tokens, top_k, hidden)

            def call(i: int) -> None:
                ops.moe_down(*h, stored[i], scale, bias, weights, offsets, active, slots, layout, group, out)

        moved = used * weight_bytes + tokens * top_k * (inter + hidden * (1 if gate_up else 2))
        return Case(f"moe_{name}", what, call, copies, moved, fp8_flop=flop)

    def _combine(self, tokens: int) -> Case:
        config = self._config
        hidden, top_k = config.hidden_size, config.experts_per_token
        rows, residual, weight = self._bf16(tokens, top_k, hidden), self._bf16(tokens, hidden), self._bf16(hidden)
        ids = torch.randint(0, config.num_experts, (tokens, top_k), dtype=torch.int32, device=self._device)
        out = (self._empty(tokens, hidden), *self._quantised(tokens, hidden))
        moved = tokens * hidden * (2 * top_k + 2 + 2 + 2 + 1)

        def call(_: int) -> None:
            ops.moe_combine_norm(rows, ids, 0, config.num_experts, residual, weight, 1e-5, *out)

        return Case("moe_combine_norm", "", call, 1, moved)
