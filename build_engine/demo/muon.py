"""Muon for stacks of matrices: momentum whose update is brought near an orthogonal matrix by a Newton-Schulz
iteration.

Invariant: a parameter is [..., rows, cols] and every matrix of the stack is treated alone. Source of the method:
K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic whose fixed band is reached in five steps (same source)
STEPS = 5
MOMENTUM = 0.95


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz in bf16 over the last two dimensions; singular values end near 1."""
    a, b, c = COEFFICIENTS
    x: Tensor = update.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(torch.bfloat16)
    for _ in range(STEPS):
        gram: Tensor = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """lr is per step in spectral norm, scaled by sqrt(rows / cols) for tall matrices; `weight_decay` is decoupled."""

    def __init__(self, params: list[Tensor], lr: float = 0.02, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum: Tensor = state["momentum"]
                momentum.lerp_(param.grad, 1 - MOMENTUM)
                update = orthogonalise(param.grad.lerp(momentum, MOMENTUM))
                rows, cols = param.shape[-2:]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update.to(param.dtype), alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)
