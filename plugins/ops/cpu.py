"""The CPU implementation of every op: the reference's function, in the engine's formats, written into `out`.

Invariant: bf16 (or the format's codec) exactly where the schema says a value leaves an op, fp32 or wider inside. Holds
no arithmetic of its own. Arguments come checked; their number is the schema's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gptoss_trt.ops.cpu_weights import dense_fp8_product, dense_product, expert_products
from gptoss_trt.reference import attention as attention_reference
from gptoss_trt.reference import dense as dense_reference
from gptoss_trt.reference import embedding as embedding_reference
from gptoss_trt.reference import moe_combine as combine_reference
from gptoss_trt.reference import moe_gemm_fp8
from gptoss_trt.reference import moe_route as route_reference
from gptoss_trt.reference import rope_kv_append as rope_reference
from gptoss_trt.reference import sample as sample_reference
from gptoss_trt.reference.act_quant import act_dequant
from gptoss_trt.reference.act_quant import act_quant as quantise
from gptoss_trt.reference.attention import PagedKv
from gptoss_trt.reference.rmsnorm_quant import rmsnorm

Tensor = torch.Tensor


def embedding(token_ids: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
    out.copy_(embedding_reference.embedding(token_ids, weight, first_row))


def rmsnorm_quant(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    quantised: Tensor | None,
    scales: Tensor | None,
) -> None:
    if delta is not None:
        residual.copy_(residual.float() + delta.float())
    n = rmsnorm(residual, weight, eps).to(torch.bfloat16)
    if normed is not None:
        normed.copy_(n)
    if quantised is not None:
        act_quant(n, 128, quantised, scales)


def act_quant(x: Tensor, group: int, quantised: Tensor, scales: Tensor | None) -> None:
    values, groups = quantise(x, group)
    quantised.copy_(values)
    if scales is not None and groups is not None:
        scales.copy_(groups)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(dense_reference.dense(x, dense_product(weight), bias))


def dense_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    segments: list[int],
    bias: Tensor | None,
    out: Tensor,
) -> None:
    product = dense_fp8_product(weight, weight_scale, segments)
    out.copy_(dense_reference.dense(act_dequant(x, x_scale), product, bias))


def dense_fp8_add(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    segments: list[int],
    bias: Tensor | None,
    residual: Tensor,
) -> None:
    delta = torch.empty_like(residual)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, delta)
    residual.copy_(residual.float() + delta.float())


def kv_slots(
    positions: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    first_block: Tensor | None,
    block_tokens: int,
    slots: Tensor,
) -> None:
    slots.copy_(rope_reference.kv_slots(positions, query_start, block_table, first_block, block_tokens))


def rope_kv_append(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    turned, k, v = rope_reference.split_rotate(qkv, positions, cos_sin, q.shape[1], k_cache.shape[1])
    q.copy_(turned)
    rope_reference.store_kv(k, slots, k_scale, k_cache)
    rope_reference.store_kv(v, slots, v_scale, v_cache)


def dense_fp8_rope_kv_append(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    segments: list[int],
    bias: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_scale: float,
    v_scale: float,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    qkv = torch.empty((len(x), len(weight)), dtype=torch.bfloat16)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, qkv)
    rope_kv_append(qkv, positions, cos_sin, slots, k_scale, v_scale, q, k_cache, v_cache)


def attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    first_block: Tensor | None,
    query_start: Tensor,
    context_lens: Tensor,
    sinks: Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: Tensor,
) -> None:
    kv = PagedKv(k_cache, v_cache, block_table, first_block, k_scale, v_scale)
    out.copy_(
        attention_reference.attention_prefill(q, kv, query_start, context_lens, sinks, window=window, scale=scale)
    )


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    first_block: Tensor | None,
    context_lens: Tensor,
    sinks: Tensor,
    window: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: Tensor,
) -> None:
    kv = PagedKv(k_cache, v_cache, block_table, first_block, k_scale, v_scale)
    out.copy_(attention_reference.attention_decode(q, kv, context_lens, sinks, window=window, scale=scale))


def attention_prefill_quant(q: Tensor, *arguments: Any) -> None:
    _quantise_output(attention_prefill, q, arguments)


def attention_decode_quant(q: Tensor, *arguments: Any) -> None:
    _quantise_output(attention_decode, q, arguments)


def _quantise_output(attend: Callable[..., None], q: Tensor, arguments: tuple[Any, ...]) -> None:
    *inputs, quantised, scales = arguments
    out = torch.empty_like(q)
    attend(q, *inputs, out)
    act_quant(out.flatten(1), 128, quantised, scales)


def sample(
    logits: Tensor, temperature: Tensor, share: Tensor, turn: Tensor | None, tokens: Tensor, fed: Tensor
) -> None:
    drawn = sample_reference.sample(logits, temperature, share)
    tokens[0 if turn is None else int(turn), : len(drawn)] = drawn
    torch.clamp(drawn, min=0, out=fed)


def feed(host: Tensor, drawn: Tensor, source_at: int, memory: Tensor, token_ids: Tensor) -> None:
    memory.copy_(host)
    token_ids.copy_(sample_reference.feed(host[: len(token_ids)], host[source_at:][: len(token_ids)], drawn))


def moe_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_count: Tensor | None,
    first_expert: int,
    num_local_experts: int,
    expert_ids: Tensor,
    expert_weights: Tensor,
    expert_offsets: Tensor,
    active_experts: Tensor,
    row_slots: Tensor,
) -> None:
    real = len(x) if token_count is None else int(token_count)
    ids, weights = route_reference.moe_route(x[:real], dense_product(weight), bias, expert_ids.shape[1])
    expert_ids.fill_(-1)[:real] = ids
    expert_weights.zero_()[:real] = weights
    rows = route_reference.sort_rows(expert_ids, first_expert, num_local_experts)
    expert_offsets.copy_(rows.offsets)
    active_experts.copy_(rows.active)
    row_slots.copy_(rows.slots)


def rmsnorm_route(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    router: Tensor,
    router_bias: Tensor,
    token_count: Tensor | None,
    first_expert: int,
    num_local_experts: int,
    updated: Tensor,
    quantised: Tensor,
    scales: Tensor,
    *routed: Tensor,
) -> None:
    normed = torch.empty_like(residual)
    updated.copy_(residual)
    rmsnorm_quant(updated, delta, weight, eps, normed, quantised, scales)
    moe_route(normed, router, router_bias, token_count, first_expert, num_local_experts, *routed)


def moe_gate_up(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    expert_offsets: Tensor,
    active_experts: Tensor,
    row_slots: Tensor,
    top_k: int,
    limit: float,
    alpha: float,
    layout: str,
    h_group: int,
    h: Tensor,
    h_scale: Tensor | None,
) -> None:
    experts = expert_products(weight, weight_scale, layout, (bias.shape[1], x.shape[1]))
    rows = route_reference.Rows(expert_offsets, active_experts, row_slots)
    activated = moe_gemm_fp8.moe_gate_up(act_dequant(x, x_scale), experts, bias, rows, top_k, limit=limit, alpha=alpha)
    values, scales = quantise(activated, h_group)
    h[: len(values)] = values
    if h_scale is not None and scales is not None:
        h_scale[:, : len(values)] = scales


def moe_down(
    h: Tensor,
    h_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    expert_weights: Tensor,
    expert_offsets: Tensor,
    active_experts: Tensor,
    row_slots: Tensor,
    layout: str,
    h_group: int,
    out: Tensor,
) -> None:
    used = int(expert_offsets[-1])
    rows = route_reference.Rows(expert_offsets, active_experts, row_slots)
    wide = act_dequant(h[:used], None if h_scale is None else h_scale[:, :used])
    experts = expert_products(weight, weight_scale, layout, (out.shape[2], h.shape[1]))
    weighted = moe_gemm_fp8.moe_down(wide, experts, bias, expert_weights, rows)
    out.view(-1, out.shape[2])[row_slots[:used].long()] = weighted.to(out.dtype)


def moe_combine(
    rows: Tensor, expert_ids: Tensor, first_expert: int, num_local_experts: int, accumulate: bool, out: Tensor
) -> None:
    residual = out if accumulate else None
    out.copy_(combine_reference.moe_combine(rows, expert_ids, first_expert, num_local_experts, residual))


def moe_combine_norm(
    rows: Tensor,
    expert_ids: Tensor,
    first_expert: int,
    num_local_experts: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    quantised: Tensor | None,
    scales: Tensor | None,
) -> None:
    moe_combine(rows, expert_ids, first_expert, num_local_experts, True, residual)
    rmsnorm_quant(residual, None, weight, eps, normed, quantised, scales)
