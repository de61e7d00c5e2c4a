"""A weight matrix as something that multiplies: what the product operators of the reference take.

Invariant: `multiply(x)` is x @ weight^T for fp32 x [M, K] with sums in fp32 or wider, and a row's result does not
depend on the other rows beyond rounding. Must not know formats: whoever makes a product has expanded the weight.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Product(Protocol):
    """x fp32 [M, K] -> fp32 [M, N]."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor: ...


class ExactProduct:
    """Sums in fp64, rounded once to fp32: the oracle. weight is any float dtype, [N, K]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.to(torch.float64)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float64) @ self._weight.T).to(torch.float32)


def absolute_bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum of absolute products, |x| @ |weight|^T in fp64: the measure of a product's rounding error, [M, N]."""
    return x.abs().to(torch.float64) @ weight.abs().to(torch.float64).T
