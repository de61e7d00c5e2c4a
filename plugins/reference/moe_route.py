"""The router: which experts a token takes, with what weight, and the order in which experts see their rows.

Invariant: experts are ordered by (logit, then lowest index); rows by (expert, token, slot). Both are total orders, so
every implementation gives the same indices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_trt.reference.product import Product
from gptoss_trt.reference.rounding import Round, bf16


@dataclass(frozen=True)
class Rows:
    """The rows of this rank's experts. offsets int32 [E + 1]: rows of local expert e are [offsets[e], offsets[e + 1]).
    active int32 [E + 1]: the number of experts with rows, their ids ascending, then -1. slots int32 [T * k]:
    token * k + slot of each row, -1 behind offsets[E]."""

    offsets: torch.Tensor
    active: torch.Tensor
    slots: torch.Tensor


def moe_route(
    x: torch.Tensor, product: Product, bias: torch.Tensor, top_k: int, between: Round = bf16
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits = between(x @ weight^T + bias); ids of the top_k by (value, lowest index), best first; weights =
    between(softmax over those top_k logits only).

    x [T, H]; bias [E]. Returns int32 [T, k] and fp32 [T, k].
    """
    logits = between(product.multiply(x.to(torch.float32)) + bias.to(torch.float32))
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    weights = between(torch.softmax(ordered[:, :top_k], dim=-1))
    return ids[:, :top_k].to(torch.int32), weights


def sort_rows(expert_ids: torch.Tensor, first_expert: int, num_local_experts: int) -> Rows:
    """Groups the (token, slot) pairs of experts [first_expert, first_expert + num_local_experts) by expert.

    expert_ids int32 [T, k], global, -1 for padding.
    """
    local = expert_ids.reshape(-1).long() - first_expert
    elsewhere = (local < 0) | (local >= num_local_experts)  # padding (-1) is below any first_expert
    local = local.masked_fill(elsewhere, num_local_experts)
    ordered, slots = torch.sort(local, stable=True)
    counts = torch.bincount(local, minlength=num_local_experts + 1)[:num_local_experts]
    offsets = torch.zeros(num_local_experts + 1, dtype=torch.int32, device=local.device)
    offsets[1:] = counts.cumsum(0)
    used = counts.nonzero().reshape(-1)
    active = torch.full_like(offsets, -1)
    active[0] = len(used)
    active[1 : 1 + len(used)] = used
    return Rows(offsets, active, slots.masked_fill(ordered == num_local_experts, -1).to(torch.int32))
