"""The end of the model: the wanted rows, the last norm, and the logits of the whole vocabulary."""

from __future__ import annotations

import torch

from gptoss_trt.reference.act_quant import fake_quant
from gptoss_trt.reference.product import Product
from gptoss_trt.reference.rmsnorm_quant import rmsnorm
from gptoss_trt.reference.rounding import Round, bf16


def lm_head(
    residual: torch.Tensor,
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    product: Product,
    *,
    quantise: bool = False,
    between: Round = bf16,
) -> torch.Tensor:
    """logits = between(rmsnorm(residual[rows])) @ weight^T, fp32 and never rounded; no soft-cap.

    residual [T, H]; rows int [R]; norm_weight [H]; quantise when the engine's dense format is fp8_block128.
    Returns fp32 [R, V].
    """
    normed = between(rmsnorm(residual[rows.long()], norm_weight, eps))
    return product.multiply(fake_quant(normed) if quantise else normed)
