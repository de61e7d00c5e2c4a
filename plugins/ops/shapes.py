"""The shapes and dtypes of every op's tensors: one table, read by checks.py.

Invariant: an op's tensors stand in the order in which their shape words are bound. Must not know rules between
arguments.

A shape is words: a name binds on first sight and must match after that; `H/128` rounds up, `T*k`, `2*I` and `S+1` are
computed from bound names; `_` is anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_I32 = (torch.int32,)
_BF16 = (torch.bfloat16,)
F32 = (torch.float32,)
FP8 = (torch.float8_e4m3fn,)
_WIDE = (torch.bfloat16, torch.float32)
_CACHE = (torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class TensorShape:
    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...]

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.shape.split())


_NORM_OUT = (
    TensorShape("normed", "T H", _BF16),
    TensorShape("quantised", "T H", FP8),
    TensorShape("scales", "H/128 T", F32),
)
_PAGED = (
    TensorShape("q", "T heads D", _BF16),
    TensorShape("k_cache", "blocks kv_heads block_tokens D", _CACHE),
    TensorShape("v_cache", "blocks kv_heads block_tokens D", _CACHE),
    TensorShape("block_table", "S _", _I32),
    TensorShape("first_block", "S", _I32),
    TensorShape("context_lens", "S", _I32),
    TensorShape("sinks", "heads", _BF16),
)
_ATTENDED = (*_PAGED, TensorShape("out", "T heads D", _BF16))
_ATTENDED_QUANT = (*_PAGED, TensorShape("quantised", "T K", FP8), TensorShape("scales", "K/128 T", F32))
_ROWS = (
    TensorShape("expert_offsets", "E+1", _I32),
    TensorShape("active_experts", "E+1", _I32),
)

_ROTATED = (
    TensorShape("cos_sin", "_ D", F32),
    TensorShape("q", "T heads D", _BF16),
    TensorShape("k_cache", "blocks kv_heads block_tokens D", _CACHE),
    TensorShape("v_cache", "blocks kv_heads block_tokens D", _CACHE),
    TensorShape("positions", "T", _I32),
    TensorShape("slots", "T", _I32),
)

_ROUTED = (
    TensorShape("token_count", "1", _I32),
    TensorShape("expert_ids", "T k", _I32),
    TensorShape("expert_weights", "T k", F32),
    TensorShape("expert_offsets", "num_local_experts+1", _I32),
    TensorShape("active_experts", "num_local_experts+1", _I32),
    TensorShape("row_slots", "T*k", _I32),
)

TENSORS: dict[str, tuple[TensorShape, ...]] = {
    "embedding": (
        TensorShape("token_ids", "T", _I32),
        TensorShape("weight", "V H", _BF16),
        TensorShape("out", "T H", _BF16),
    ),
    "rmsnorm_quant": (
        TensorShape("residual", "T H", _BF16),
        TensorShape("delta", "T H", _BF16),
        TensorShape("weight", "H", _BF16),
        *_NORM_OUT,
    ),
    "act_quant": (TensorShape("x", "T K", _WIDE), TensorShape("quantised", "T K", FP8)),
    "dense": (
        TensorShape("x", "T K", _BF16),
        TensorShape("weight", "N K", _BF16),
        TensorShape("bias", "N", _BF16),
        TensorShape("out", "T N", _WIDE),
    ),
    "dense_fp8": (
        TensorShape("x", "T K", FP8),
        TensorShape("x_scale", "K/128 T", F32),
        TensorShape("weight", "N K", FP8),
        TensorShape("weight_scale", "_ K/128", F32),
        TensorShape("bias", "N", _BF16),
        TensorShape("out", "T N", _WIDE),
    ),
    "dense_fp8_add": (
        TensorShape("x", "T K", FP8),
        TensorShape("x_scale", "K/128 T", F32),
        TensorShape("weight", "N K", FP8),
        TensorShape("weight_scale", "_ K/128", F32),
        TensorShape("bias", "N", _BF16),
        TensorShape("residual", "T N", _BF16),
    ),
    "kv_slots": (
        TensorShape("positions", "T", _I32),
        TensorShape("block_table", "S _", _I32),
        TensorShape("query_start", "S+1", _I32),
        TensorShape("first_block", "S", _I32),
        TensorShape("slots", "T", _I32),
    ),
    "rope_kv_append": (*_ROTATED, TensorShape("qkv", "T _", _BF16)),
    "dense_fp8_rope_kv_append": (
        TensorShape("x", "T K", FP8),
        TensorShape("x_scale", "K/128 T", F32),
        TensorShape("weight", "N K", FP8),
        TensorShape("weight_scale", "_ K/128", F32),
        TensorShape("bias", "N", _BF16),
        *_ROTATED,
    ),
    "attention_prefill": (*_ATTENDED, TensorShape("query_start", "S+1", _I32)),
    "attention_decode": _ATTENDED,
    "attention_prefill_quant": (*_ATTENDED_QUANT, TensorShape("query_start", "S+1", _I32)),
    "attention_decode_quant": _ATTENDED_QUANT,
    "moe_route": (
        TensorShape("x", "T H", _BF16),
        TensorShape("weight", "experts H", _BF16),
        TensorShape("bias", "experts", _BF16),
        *_ROUTED,
    ),
    "rmsnorm_route": (
        TensorShape("residual", "T H", _BF16),
        TensorShape("delta", "T H", _BF16),
        TensorShape("weight", "H", _BF16),
        TensorShape("router", "experts H", _BF16),
        TensorShape("router_bias", "experts", _BF16),
        TensorShape("updated", "T H", _BF16),
        TensorShape("quantised", "T H", FP8),
        TensorShape("scales", "H/128 T", F32),
        *_ROUTED,
    ),
    "moe_gate_up": (
        TensorShape("x", "T H", FP8),
        TensorShape("x_scale", "H/128 T", F32),
        TensorShape("h", "rows I", FP8),
        TensorShape("bias", "E 2*I", _BF16),
        *_ROWS,
        TensorShape("row_slots", "T*top_k", _I32),
        TensorShape("h", "T*top_k I", FP8),
    ),
    "moe_down": (
        TensorShape("expert_weights", "T k", F32),
        TensorShape("h", "T*k I", FP8),
        TensorShape("out", "T k H", _WIDE),
        TensorShape("bias", "E H", _BF16),
        *_ROWS,
        TensorShape("row_slots", "T*k", _I32),
    ),
    "moe_combine": (
        TensorShape("rows", "T k H", _WIDE),
        TensorShape("expert_ids", "T k", _I32),
        TensorShape("out", "T H", _WIDE),
    ),
    "sample": (
        TensorShape("logits", "R V", F32),
        TensorShape("temperature", "R", F32),
        TensorShape("share", "R", F32),
        TensorShape("turn", "1", _I32),
        TensorShape("tokens", "turns C", _I32),
        TensorShape("fed", "R", _I32),
    ),
    "feed": (
        TensorShape("host", "N", _I32),
        TensorShape("drawn", "C", _I32),
        TensorShape("memory", "N", _I32),
        TensorShape("token_ids", "R", _I32),
    ),
    "moe_combine_norm": (
        TensorShape("rows", "T k H", _WIDE),
        TensorShape("expert_ids", "T k", _I32),
        TensorShape("residual", "T H", _BF16),
        TensorShape("weight", "H", _BF16),
        *_NORM_OUT,
    ),
}
