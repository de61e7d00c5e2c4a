"""Ops whose results do not depend on the batch: a token's bits follow from its own numbers, its position and its keys,
alone or among others, in a prompt that is read whole, in chunks or token by token (the engine option `deterministic`).

Invariant: every choice that the other implementations make by the number of tokens or the width of a table is fixed
here; an op that is not listed here has no such choice. Must not know layers or engines.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gptoss_trt.ops import attention as library_attention
from gptoss_trt.ops import library, moe_gemm_fp8
from gptoss_trt.ops.library import Plan
from gptoss_trt.triton_kernels import dense_invariant
from gptoss_trt.triton_kernels import moe_route as triton_route
from gptoss_trt.triton_kernels import rmsnorm_quant as triton_norm
from gptoss_trt.triton_kernels.rope_kv_append import rope_kv_append

Tensor = torch.Tensor

ATTENTION = library_attention.Options(plan=library_attention.FIXED_PLAN, flags=library.DEPENDENT_LAUNCH)
EXPERTS = moe_gemm_fp8.Options(Plan.WGMMA, k_split=1, flags=library.DEPENDENT_LAUNCH)

dense = dense_invariant.dense
dense_fp8 = dense_invariant.dense_fp8
dense_fp8_add = dense_invariant.dense_fp8_add


def dense_fp8_rope_kv_append(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    segments: list[int],
    bias: Tensor | None,
    *rotation: Any,
) -> None:
    """The op of that name; see ops/schemas.py. Allocates q, k and v between its two kernels."""
    qkv = torch.empty((len(x), len(weight)), dtype=torch.bfloat16, device=x.device)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, qkv)
    rope_kv_append(qkv, *rotation)


def _warps(residual: Tensor) -> int:
    """That add up a row: as many as for one token."""
    return triton_norm.row_warps(residual.shape[-1], 1)


def rmsnorm_quant(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor | None,
    quantised: Tensor | None,
    scales: Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py."""
    triton_norm.add_and_norm(
        residual, delta, residual, weight, eps, (normed, quantised, scales), warps=_warps(residual)
    )


def moe_combine(
    rows: Tensor, expert_ids: Tensor, first_expert: int, num_local_experts: int, accumulate: bool, out: Tensor
) -> None:
    """The op of that name; see ops/schemas.py."""
    triton_norm.moe_combine(rows, expert_ids, first_expert, num_local_experts, accumulate, out, warps=_warps(out))


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
    """The op of that name; see ops/schemas.py."""
    triton_norm.moe_combine_norm(
        rows, expert_ids, first_expert, num_local_experts, residual, weight, eps, normed, quantised, scales,
        warps=_warps(residual),
    )  # fmt: skip


def moe_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_count: Tensor | None,
    first_expert: int,
    num_local_experts: int,
    *outputs: Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Each token's choice is a program of its own."""
    parts = triton_route.product(x, weight)
    local = (first_expert, num_local_experts)
    triton_route.choose_and_sort(parts, bias, token_count, local, outputs, at_once=False)


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
    *outputs: Tensor,
) -> None:
    """The op of that name; see ops/schemas.py."""
    normed = torch.empty_like(residual)
    triton_norm.add_and_norm(residual, delta, updated, weight, eps, (normed, quantised, scales), warps=_warps(residual))
    moe_route(normed, router, router_bias, token_count, first_expert, num_local_experts, *outputs)


# Each token as in decode: prompts read their keys once a token. Raise ValueError for what the library does not take.
attention_decode = functools.partial(library_attention.attention_decode, options=ATTENTION)
attention_prefill = functools.partial(library_attention.attention_prefill, options=ATTENTION)
attention_decode_quant = attention_decode
attention_prefill_quant = attention_prefill
moe_gate_up = functools.partial(moe_gemm_fp8.moe_gate_up, options=EXPERTS)
moe_down = functools.partial(moe_gemm_fp8.moe_down, options=EXPERTS)
