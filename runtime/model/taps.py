"""Hidden states of some layers, kept from each step for whoever predicts from them.

Invariant: the buffer never moves, so a captured graph may write it; rows are those of the last step's tokens, in the
batch's order. Must not know what they are for.
"""

from __future__ import annotations

import torch


class FeatureTap:
    """Copies the residual stream that enters each of `layers` (numbers of layers) in every step of at most `tokens`
    tokens. `features` [tokens, layers * hidden], bf16: one layer's behind the other's."""

    def __init__(self, layers: tuple[int, ...], tokens: int, hidden: int, device: torch.device) -> None:
        self.tokens = tokens
        self._columns = [(layer, slice(place * hidden, (place + 1) * hidden)) for place, layer in enumerate(layers)]
        self.features = torch.zeros((tokens, len(layers) * hidden), dtype=torch.bfloat16, device=device)

    def take(self, layer: int, residual: torch.Tensor) -> None:
        """`residual` bf16 [T, hidden] enters `layer`. Raises ValueError when T is more than the buffer holds."""
        if len(residual) > len(self.features):
            raise ValueError(f"a step of {len(residual)} tokens; the tap holds {len(self.features)}")
        for wanted, columns in self._columns:
            if layer == wanted:
                self.features[: len(residual), columns].copy_(residual)
