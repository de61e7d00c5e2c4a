"""The sum of a token's expert rows, in slot order."""

from __future__ import annotations

import torch


def moe_combine(
    rows: torch.Tensor,
    expert_ids: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual[t] + (((r0 + r1) + r2) + r3), fp32; slots of other ranks' experts and of padding count as zero whatever
    `rows` holds there.

    rows [T, k, H]; expert_ids int32 [T, k]; residual [T, H] or None. Returns fp32 [T, H], not rounded.
    """
    here = (expert_ids >= first_expert) & (expert_ids < first_expert + num_local_experts)
    wide = torch.where(here.unsqueeze(-1), rows.to(torch.float32), 0.0)
    total = wide[:, 0]
    for slot in range(1, wide.shape[1]):
        total = total + wide[:, slot]
    return total if residual is None else residual.to(torch.float32) + total
