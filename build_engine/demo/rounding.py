"""Rounding to the engine's number formats inside the training: MXFP4 weights and FP8 activations, with straight
gradients.

Invariant: `mxfp4_codes` followed by `mxfp4_values` is what `round_mxfp4` returns, so the packed weights equal the
ones that the last steps trained. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
FP8_MAX = 448.0
FP8_GROUP = 128
EXPONENT_SPREAD = 10  # octaves below a tensor's largest group scale: keeps the FP8 128x128 expansion exact and normal
_STEPS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _round_to_codes(scaled: Tensor) -> Tensor:
    """Codes 0..7 of the e2m1 magnitudes nearest to `scaled` >= 0."""
    return torch.bucketize(scaled, torch.tensor(_EDGES, device=scaled.device))


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale exponents of a weight [..., K], K a multiple of 32.

    Returns e2m1 codes uint8 [..., K] (bit 3 the sign) and unbiased exponents int32 [..., K / 32]. Of the two scales
    that bring a group's largest value near 6, the one with the smaller squared error is taken.
    """
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    base = torch.floor(torch.log2(largest.clamp_min(1e-30))) - 2
    base = torch.maximum(base, base.max() - EXPONENT_SPREAD)
    steps = torch.tensor(_STEPS, device=weight.device)
    codes, errors, exponents = [], [], []
    for exponent in (base, base + 1):
        scale = torch.exp2(exponent)
        code = _round_to_codes(groups.abs() / scale)
        codes.append(code)
        errors.append(((steps[code] * scale - groups.abs()) ** 2).sum(-1, keepdim=True))
        exponents.append(exponent)
    second = errors[1] < errors[0]
    code = torch.where(second, codes[1], codes[0])
    exponent = torch.where(second, exponents[1], exponents[0]).squeeze(-1).int()
    signed = code + 8 * ((groups < 0) & (code > 0))
    return signed.flatten(-2).to(torch.uint8), exponent


def mxfp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """The fp32 values of codes [..., K] with exponents [..., K / 32]."""
    table = torch.tensor([*_STEPS, *(-step for step in _STEPS)], device=codes.device)
    values = table[codes.long()].reshape(*exponents.shape, GROUP) * torch.exp2(exponents.float()).unsqueeze(-1)
    return values.flatten(-2)


def round_mxfp4(weight: Tensor) -> Tensor:
    """The weight rounded to MXFP4; its gradient is that of the weight itself."""
    with torch.no_grad():
        change = mxfp4_values(*mxfp4_codes(weight)) - weight
    return weight + change


def _round_group(part: Tensor) -> Tensor:
    largest = part.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (part / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def round_fp8(values: Tensor, active: Tensor) -> Tensor:
    """Activations [..., K] rounded to e4m3 by token and 128 channels where `active` (a bool scalar)."""
    detached = values.detach().float()
    parts = [_round_group(part) for part in torch.split(detached, FP8_GROUP, -1)]
    change = torch.where(active, torch.cat(parts, -1) - detached, 0.0)
    return (values.float() + change).to(values.dtype)
