"""Residual addition and RMSNorm; the quantisation that a fused kernel adds is act_quant's.

Invariant: the norm is of the rounded residual (what the next layer reads), and x and weight multiply in fp32.
"""

from __future__ import annotations

import torch

from gptoss_trt.reference.act_quant import act_quant
from gptoss_trt.reference.rounding import Round, bf16


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32. OpenAI's order: one rounding, after the weight (Llama's is before).

    x [T, H], weight [H]; returns fp32 [T, H], not rounded. The mean is an fp64 sum, so a row never depends on how
    many rows there are.
    """
    wide = x.to(torch.float32)
    mean = wide.to(torch.float64).square().mean(dim=-1, keepdim=True)
    inverse = (mean + eps).rsqrt().to(torch.float32)
    return wide * inverse * weight.to(torch.float32)


def rmsnorm_quant(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, between: Round = bf16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual' = between(residual + delta); normed = between(rmsnorm(residual')); (q, scales) = act_quant(normed).

    residual, delta [T, H]; weight [H]. Returns residual' and normed fp32 [T, H], q e4m3 [T, H] and scales fp32
    [ceil(H / 128), T].
    """
    updated = residual.to(torch.float32)
    if delta is not None:
        updated = between(updated + delta.to(torch.float32))
    normed = between(rmsnorm(updated, weight, eps))
    quantised, scales = act_quant(normed)
    assert scales is not None
    return updated, normed, quantised, scales
