"""Activations to FP8: one scale for each token and group of consecutive channels.

Invariant: this is the rule, bit for bit, for every implementation; a finite input never gives NaN. The last group may
be shorter (2880 = 22 x 128 + 64).
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
STATIC_SCALE = 2.0**-3  # |h| <= 7 x 8 = 56 = 448 / 8, so SwiGLU's output never needs a maximum
GROUPS = (128, 64, 0)  # 0: the static scale


def act_quant(x: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scale = amax / 448 (fp32 division; 1 where that is 0), value = x / scale (fp32 division) rounded to nearest even
    and saturated at 448.

    x [T, K] in any float dtype (read as fp32); group 128 or 64, or 0 for the static scale 2^-3. Returns e4m3 [T, K] and
    fp32 scales [ceil(K / group), T], None for the static scale. Raises ValueError for another group.
    """
    if group not in GROUPS:
        raise ValueError(f"activation group is {group}; allowed: {', '.join(map(str, GROUPS))}")
    wide = x.to(torch.float32)
    if group == 0:
        return _saturate(wide / STATIC_SCALE), None
    tokens, channels = wide.shape
    groups = -(-channels // group)
    padded = torch.nn.functional.pad(wide, (0, groups * group - channels)).view(tokens, groups, group)
    scale = padded.abs().amax(dim=-1) / E4M3_MAX  # [T, groups]
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    quotient = (padded / scale.unsqueeze(-1)).view(tokens, groups * group)[:, :channels]
    return _saturate(quotient), scale.T.contiguous()


def act_dequant(quantised: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """value x scale: e4m3 [T, K] and fp32 [groups, T] (None: static) -> fp32 [T, K].

    The group is 64 or 128, whichever gives that many groups for K; where both do (K <= 64) they mean the same.
    """
    wide = quantised.to(torch.float32)
    if scales is None:
        return wide * STATIC_SCALE
    channels = quantised.shape[1]
    group = 128 if -(-channels // 128) == scales.shape[0] else 64
    return wide * scales.T.repeat_interleave(group, dim=1)[:, :channels]


def fake_quant(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """act_dequant(act_quant(x)): what a product sees of x, fp32 [T, K]."""
    return act_dequant(*act_quant(x, group))


def _saturate(quotient: torch.Tensor) -> torch.Tensor:
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).contiguous().to(E4M3)
