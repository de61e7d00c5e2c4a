"""A whole forward pass of one sequence, composed of the reference's operators: the model's definition in one page.

Invariant: with UNQUANTISED numerics nothing is rounded and the result is the architecture's in fp32; with ENGINE it is
what the CPU and GPU ops compute, rounding for rounding. Weights come expanded, under the engine's names. Must not know
engines, files or ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gptoss_trt.build_engine.spec import H_GROUPS
from gptoss_trt.reference.act_quant import fake_quant
from gptoss_trt.reference.attention import PagedKv, attention_prefill
from gptoss_trt.reference.dense import dense
from gptoss_trt.reference.embedding import embedding
from gptoss_trt.reference.lm_head import lm_head
from gptoss_trt.reference.moe_combine import moe_combine
from gptoss_trt.reference.moe_gemm_fp8 import moe_down, moe_gate_up
from gptoss_trt.reference.moe_route import moe_route, sort_rows
from gptoss_trt.reference.product import ExactProduct, Product
from gptoss_trt.reference.rmsnorm_quant import rmsnorm
from gptoss_trt.reference.rope import RopeConfig, rope_table
from gptoss_trt.reference.rope_kv_append import kv_slots, split_rotate, store_kv
from gptoss_trt.reference.rounding import UNQUANTISED, Numerics

_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Architecture:
    """The numbers that the forward pass needs. windows[n] is layer n's window, 0 for full attention."""

    num_heads: int
    num_kv_heads: int
    experts_per_token: int
    windows: Sequence[int]
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    rms_norm_eps: float = 1e-5
    h_scale: str = "static"
    quantise_dense: bool = False


class ReferenceModel:
    """The forward pass over expanded weights: `embedding.weight`, `layers.{n}.attention.qkv.weight`, ... in any float
    dtype, experts as `layers.{n}.moe.gate_up.weight` [E, 2I, H] and `.down.weight` [E, H, I]."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, torch.Tensor],
        numerics: Numerics = UNQUANTISED,
        product: Callable[[torch.Tensor], Product] = ExactProduct,
    ) -> None:
        """`product` makes what multiplies by an expanded weight [N, K]; another than the exact one lets a test compare
        everything but the order of sums."""
        self._arch = architecture
        self._weights = weights
        self._numerics = numerics
        self._make_product = product

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [T, V] of one sequence's token ids, int [T]. `positions` [T] rotate at other angles than 0..T-1
        (to reach late ones with a short prompt); the attention mask stays that of T consecutive tokens."""
        arch, numerics = self._arch, self._numerics
        tokens = len(token_ids)
        angles = torch.arange(tokens) if positions is None else positions
        table = rope_table(arch.rope, int(angles.max()) + 1 if tokens else 1)
        x = numerics.between(embedding(token_ids, self._weights["embedding.weight"]).to(torch.float32))
        for layer in range(len(arch.windows)):
            x = numerics.between(x + self._attention(layer, x, angles, table))
            x = numerics.between(x + self._moe(layer, x))
        return lm_head(
            x,
            torch.arange(tokens),
            self._weights["norm.weight"],
            arch.rms_norm_eps,
            self._product("lm_head"),
            quantise=numerics.quantise and arch.quantise_dense,
            between=numerics.between,
        )

    def _attention(self, layer: int, x: torch.Tensor, angles: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        arch, numerics, stem = self._arch, self._numerics, f"layers.{layer}.attention"
        tokens, head_dim = len(x), table.shape[1]
        normed = numerics.between(rmsnorm(x, self._weights[f"{stem}.norm.weight"], arch.rms_norm_eps))
        qkv = self._dense(f"{stem}.qkv", normed)
        q, k, v = split_rotate(qkv, angles, table, arch.num_heads, arch.num_kv_heads, numerics.inner)
        blocks = max(1, -(-tokens // _BLOCK_TOKENS))
        shape = (blocks, arch.num_kv_heads, _BLOCK_TOKENS, head_dim)
        kv = PagedKv(torch.zeros(shape), torch.zeros(shape), torch.arange(blocks).view(1, -1))
        lens = torch.tensor([tokens])
        starts = torch.tensor([0, tokens])
        slots = kv_slots(torch.arange(tokens), starts, kv.block_table, None, _BLOCK_TOKENS)
        store_kv(numerics.between(k), slots, 1.0, kv.k)
        store_kv(numerics.between(v), slots, 1.0, kv.v)
        attended = attention_prefill(
            numerics.between(q),
            kv,
            starts,
            lens,
            self._weights[f"{stem}.sinks"],
            window=arch.windows[layer],
            scale=head_dim**-0.5,
            inner=numerics.inner,
        )
        return self._dense(f"{stem}.out", numerics.between(attended).flatten(1))

    def _moe(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        arch, numerics, stem = self._arch, self._numerics, f"layers.{layer}.moe"
        normed = numerics.between(rmsnorm(x, self._weights[f"{stem}.norm.weight"], arch.rms_norm_eps))
        ids, weights = moe_route(
            normed,
            self._product(f"{stem}.router"),
            self._weights[f"{stem}.router.bias"],
            arch.experts_per_token,
            numerics.between,
        )
        gate_up, down = self._weights[f"{stem}.gate_up.weight"], self._weights[f"{stem}.down.weight"]
        rows = sort_rows(ids, 0, len(gate_up))
        h = moe_gate_up(
            fake_quant(normed) if numerics.quantise else normed,
            lambda expert: self._make_product(gate_up[expert]),
            self._weights[f"{stem}.gate_up.bias"],
            rows,
            arch.experts_per_token,
            limit=arch.swiglu_limit,
            alpha=arch.swiglu_alpha,
            inner=numerics.inner,
        )
        if numerics.quantise:
            h = fake_quant(h, H_GROUPS[arch.h_scale])
        weighted = moe_down(
            h,
            lambda expert: self._make_product(down[expert]),
            self._weights[f"{stem}.down.bias"],
            weights,
            rows,
            inner=numerics.inner,
        )
        by_slot = torch.zeros(len(x) * arch.experts_per_token, x.shape[1])
        by_slot[rows.slots.long()] = numerics.between(weighted)
        return moe_combine(by_slot.view(len(x), arch.experts_per_token, x.shape[1]), ids, 0, len(gate_up))

    def _dense(self, stem: str, x: torch.Tensor) -> torch.Tensor:
        numerics = self._numerics
        seen = fake_quant(x) if numerics.quantise and self._arch.quantise_dense else x
        return numerics.between(dense(seen, self._product(stem), self._weights.get(f"{stem}.bias")))

    def _product(self, stem: str) -> Product:
        return self._make_product(self._weights[f"{stem}.weight"])
