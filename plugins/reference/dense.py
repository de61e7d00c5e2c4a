"""A dense product with a bias, on bf16 or dequantised FP8 numbers."""

from __future__ import annotations

import torch

from gptoss_trt.reference.product import Product


def dense(x: torch.Tensor, product: Product, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias: x [T, K] (read as fp32), bias [N] or None; returns fp32 [T, N], not rounded.

    For an FP8 engine x is act_dequant of the quantised activation and the product holds the dequantised weight.
    """
    y = product.multiply(x.to(torch.float32))
    return y if bias is None else y + bias.to(torch.float32)
