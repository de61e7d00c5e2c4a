"""What the reference rounds, and where: the one switch between engine numbers, plain fp32, and OpenAI's own roundings.

Invariant: every rounding of the reference outside a number format's codec goes through a `Numerics`. Must not know
operators or weights.

OpenAI's torch code computes in bf16 throughout, so it also rounds *inside* operators. With `inner` set to `bf16` the
reference rounds at the same places: cos and sin and each step of the rotation; attention scores before and after the
scale, and the softmax's probabilities; the expert's first product before SwiGLU, each step of SwiGLU, and the second
product before its routing weight. The routing weights and the router's logits are bf16 in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Round = Callable[[torch.Tensor], torch.Tensor]


def keep(x: torch.Tensor) -> torch.Tensor:
    """No rounding: x itself."""
    return x


def bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to the nearest bf16, ties to even, in x's dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


@dataclass(frozen=True)
class Numerics:
    """`between` rounds an operator's result; `inner` rounds inside (OpenAI's places); `quantise` turns activations into
    FP8 before expert products (and before dense ones of an FP8 engine)."""

    between: Round = bf16
    inner: Round = keep
    quantise: bool = True


ENGINE = Numerics()  # bf16 between operators, FP8 activations: what the engine's CPU and GPU implementations compute
UNQUANTISED = Numerics(between=keep, inner=keep, quantise=False)  # plain fp32, for comparison with transformers
OPENAI = Numerics(between=bf16, inner=bf16, quantise=False)  # OpenAI's torch code: bf16 everywhere, no FP8
