"""What is done to a weight once, when a model is loaded, so that no step has to.

Invariant: optional and idempotent: an op gives the same result for a weight that was not prepared, later. Must not know
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_trt.ops.cpu_weights import dense_fp8_product, dense_product, expert_products, may_hold


def prepare_dense(weight: torch.Tensor, scale: torch.Tensor | None = None, segments: Sequence[int] = ()) -> None:
    """On a CPU expands a weight of `dense` (bf16) or `dense_fp8` (e4m3 with its scales); elsewhere nothing."""
    if weight.device.type != "cpu" or not may_hold(weight.numel()):
        return
    if scale is None:
        dense_product(weight)
    else:
        dense_fp8_product(weight, scale, segments)


def prepare_experts(weight: torch.Tensor, scale: torch.Tensor, layout: str) -> None:
    """On a CPU expands all experts of a weight of `moe_gate_up` or `moe_down`; elsewhere nothing."""
    values = weight.numel() * (2 if weight.dtype == torch.uint8 else 1)
    if weight.device.type != "cpu" or layout != "plain" or not may_hold(values):
        return
    product = expert_products(weight, scale)
    for expert in range(weight.shape[0]):
        product(expert)
