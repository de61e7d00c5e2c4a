"""The two expert products: bias and SwiGLU behind the first, bias and routing weight behind the second.

Invariant: both work on sorted rows (moe_route.Rows) and read one expert's weight once. The caller quantises and
dequantises activations (act_quant), so the same functions serve FP8 engines and the unquantised mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gptoss_trt.reference.moe_route import Rows
from gptoss_trt.reference.product import Product
from gptoss_trt.reference.rounding import Round, keep

Experts = Callable[[int], Product]  # the weight of a local expert


def swiglu(y: torch.Tensor, limit: float, alpha: float, inner: Round = keep) -> torch.Tensor:
    """g * sigmoid(alpha * g) * (u + 1) with g = min(y[even], limit), u = clamp(y[odd], -limit, limit).

    y fp32 [rows, 2I], columns interleaved gate, up; returns fp32 [rows, I], at most limit * (limit + 1) in magnitude.
    The sigmoid is 1 / (1 + exp(-x)) in fp64: torch's fp32 one may differ in the last bit between the body and the tail
    of a vector, and so between batch sizes.
    """
    gate = y[:, 0::2].clamp(max=limit)
    up = y[:, 1::2].clamp(min=-limit, max=limit)
    sigmoid = (1 / (1 + (-inner(alpha * gate)).to(torch.float64).exp())).to(torch.float32)
    return inner(inner(gate * inner(sigmoid)) * inner(up + 1))


def moe_gate_up(
    x: torch.Tensor,
    experts: Experts,
    bias: torch.Tensor,
    rows: Rows,
    top_k: int,
    *,
    limit: float,
    alpha: float,
    inner: Round = keep,
) -> torch.Tensor:
    """a[r] = swiglu(x[token of r] @ weight[e]^T + bias[e]) for each sorted row r of expert e.

    x fp32 [T, H] (dequantised); bias [E, 2I]. Returns fp32 [offsets[E], I], before the next quantisation.
    """
    tokens = rows.slots[: int(rows.offsets[-1])].long() // top_k
    y = _grouped(x[tokens], experts, bias, rows)
    return swiglu(inner(y), limit, alpha, inner)


def moe_down(
    h: torch.Tensor,
    experts: Experts,
    bias: torch.Tensor | None,
    expert_weights: torch.Tensor,
    rows: Rows,
    *,
    inner: Round = keep,
) -> torch.Tensor:
    """weight of (token, slot) * (h[r] @ weight[e]^T + bias[e]) for each sorted row r of expert e.

    h fp32 [>= offsets[E], I] (dequantised); bias [E, H], None on ranks that do not add it; expert_weights fp32 [T, k].
    Returns fp32 [offsets[E], H]: row r belongs at (token, slot) = divmod(slots[r], k).
    """
    y = inner(_grouped(h, experts, bias, rows))
    return y * expert_weights.reshape(-1)[rows.slots[: len(y)].long()].unsqueeze(-1)


def _grouped(x: torch.Tensor, experts: Experts, bias: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """weight[e] @ x[r] + bias[e] for each sorted row r of expert e; fp32 [offsets[E], N]."""
    offsets = rows.offsets.tolist()
    active = rows.active[1 : 1 + int(rows.active[0])].long()
    if not len(active):
        return x.new_zeros((0, experts(0).multiply(x[:0]).shape[1]))
    parts = [experts(e).multiply(x[offsets[e] : offsets[e + 1]]) for e in active.tolist()]
    y = torch.cat(parts)
    if bias is None:
        return y
    return y + bias[active].to(torch.float32).repeat_interleave(rows.offsets.diff()[active], dim=0)
