"""The demo's training forward: gpt-oss with all layers' weights stacked, over the used rows of the vocabulary.

Invariant: with `exact` weights it computes what MODEL says (RMSNorm, YaRN, sinks, windows on even layers, top 4 of
the router, clamped SwiGLU), in bf16 between operators. Ids are rows of the used vocabulary, followed by a bank of
random rows that are drawn anew each step. Knows no optimiser and no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gptoss_trt.build_engine.demo.rounding import round_fp8, round_mxfp4

EXPERT_MATRICES = ("gate", "up", "down")
MATRICES = ("q", "k", "v", "out", *EXPERT_MATRICES)
BALANCE_WEIGHT = 0.01
HEAD_INIT = 0.02
HEAD_ROLL = 128  # channels that a random row is rolled by between the embedding and the head


@dataclass(frozen=True)
class Shape:
    """Sizes of the demo model."""

    layers: int = 4
    hidden: int = 256
    intermediate: int = 192
    experts: int = 8
    active: int = 4
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 128


@dataclass
class Batch:
    """Packed documents and the positions to learn. Row numbers count through the flattened batch."""

    ids: Tensor  # [rows, tokens] used-vocabulary or bank rows
    docs: Tensor  # [rows, tokens] the document that a token belongs to
    positions: Tensor  # [rows, tokens] place in the document
    where: Tensor  # [learnt] flat positions whose next token is learnt
    labels: Tensor  # [learnt]
    weights: Tensor  # [learnt] fp32


def create_weights(shape: Shape, used: int, seed: int) -> dict[str, Tensor]:
    """fp32 master weights. Embedding and head start from the same random rows (see `bank_rows`)."""
    g = torch.Generator().manual_seed(seed)
    n, h, i, e = shape.layers, shape.hidden, shape.intermediate, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = random_rows(torch.randint(0, 256, (used, h), generator=g, dtype=torch.uint8))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g) / math.sqrt(size[-1])

    return {
        "embedding": rows,
        "head": HEAD_INIT * rows.roll(HEAD_ROLL, -1),
        "norm": torch.ones(h),
        "attention_norm": torch.ones(n, h),
        "moe_norm": torch.ones(n, h),
        "q": normal(n, q, h),
        "k": normal(n, kv, h),
        "v": normal(n, kv, h),
        "q_bias": torch.zeros(n, q),
        "k_bias": torch.zeros(n, kv),
        "v_bias": torch.zeros(n, kv),
        "sinks": torch.zeros(n, shape.heads),
        "out": torch.zeros(n, h, q),
        "out_bias": torch.zeros(n, h),
        "router": normal(n, e, h),
        "router_bias": torch.zeros(n, e),
        "gate": normal(n, e, i, h),
        "up": normal(n, e, i, h),
        "gate_bias": torch.zeros(n, e, i),
        "up_bias": torch.zeros(n, e, i),
        "down": torch.zeros(n, e, h, i),
        "down_bias": torch.zeros(n, e, h),
    }


def random_rows(raw: Tensor) -> Tensor:
    """Bytes to rows of zero mean and unit variance: (b - 127.5) / 73.9."""
    return (raw.float() - 127.5) / 73.9


def yarn_tables(tokens: int, head_dim: int = 64, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin fp32 [tokens, head_dim / 2] with gpt-oss's YaRN: range not rounded, concentration 0.1 ln 32 + 1."""
    theta, factor, initial = 150000.0, 32.0, 4096
    half = head_dim // 2
    power = theta ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    low, high = (half * math.log(initial / (beta * 2 * math.pi)) / math.log(theta) for beta in (32.0, 1.0))
    ramp = ((torch.arange(half, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    frequency = (1 - ramp) / power + ramp / (factor * power)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequency
    concentration = 0.1 * math.log(factor) + 1
    return angles.cos() * concentration, angles.sin() * concentration


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x / rms(x) * scale in fp32, rounded to x's type."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * scale.float()).to(x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves; x [B, S, heads, 64], cos and sin [B, S, 1, 32]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _attention(x: Tensor, w: dict[str, Tensor], shape: Shape, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    batch, tokens, _ = x.shape
    groups = shape.heads // shape.kv_heads
    q = functional.linear(x, w["q"], w["q_bias"]).view(batch, tokens, shape.heads, shape.head_dim)
    k = functional.linear(x, w["k"], w["k_bias"]).view(batch, tokens, shape.kv_heads, shape.head_dim)
    v = functional.linear(x, w["v"], w["v_bias"]).view(batch, tokens, shape.kv_heads, shape.head_dim)
    q, k = _rope(q, cos, sin), _rope(k, cos, sin)
    q = q.view(batch, tokens, shape.kv_heads, groups, shape.head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, shape.kv_heads, groups * tokens, shape.head_dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, kv heads, S, 64]
    scores = torch.matmul(q, k.transpose(-1, -2)).view(batch, shape.kv_heads, groups, tokens, tokens).float()
    scores = torch.where(mask[:, None, None], scores * 0.125, -1e30)
    sinks = w["sinks"].float().view(1, shape.kv_heads, groups, 1)
    total = torch.logaddexp(torch.logsumexp(scores, -1), sinks)
    weights = torch.exp(scores - total.unsqueeze(-1)).to(x.dtype)
    mixed = torch.matmul(weights.view(batch, shape.kv_heads, groups * tokens, tokens), v)
    mixed = mixed.view(batch, shape.heads, tokens, shape.head_dim).transpose(1, 2).reshape(batch, tokens, -1)
    return functional.linear(mixed, w["out"], w["out_bias"])


def _experts(x: Tensor, w: dict[str, Tensor], shape: Shape, quantised: Tensor) -> tuple[Tensor, Tensor]:
    """All experts on all tokens, weighted by the routing (0 for experts not taken). Returns output and balance loss."""
    flat = x.reshape(-1, shape.hidden)
    logits = functional.linear(flat, w["router"], w["router_bias"]).float()
    values, chosen = logits.topk(shape.active, -1)
    routing = torch.softmax(values, -1).to(x.dtype).float()
    routing = torch.zeros_like(logits).scatter(1, chosen, routing)
    share = (routing > 0).float().mean(0) / shape.active
    balance = shape.experts * (share.detach() * torch.softmax(logits, -1).mean(0)).sum()
    wide = shape.experts * shape.intermediate
    inputs = round_fp8(flat, quantised)
    gate = functional.linear(inputs, w["gate"].reshape(wide, shape.hidden)).float() + w["gate_bias"].float().reshape(
        wide
    )
    up = functional.linear(inputs, w["up"].reshape(wide, shape.hidden)).float() + w["up_bias"].float().reshape(wide)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    h = (gate * torch.sigmoid(1.702 * gate) * (up + 1)).view(-1, shape.experts, shape.intermediate).to(x.dtype)
    h = (round_fp8(h, quantised).float() * routing.unsqueeze(-1)).to(x.dtype).view(-1, wide)
    down = w["down"].permute(0, 2, 1).reshape(wide, shape.hidden)
    out = torch.matmul(h, down) + torch.matmul(routing.to(x.dtype), w["down_bias"])
    return out.view_as(x), balance


def hidden_states(
    w: dict[str, Tensor],
    shape: Shape,
    x: Tensor,
    docs: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    quantised: Tensor,
) -> tuple[Tensor, Tensor]:
    """The normalised output of the last layer, [B, S, H], and the mean balance loss. `w` is stacked, in x's type."""
    cos, sin = (table[positions].unsqueeze(2) for table in tables)
    place = torch.arange(x.shape[1], device=x.device)
    behind = place[:, None] - place[None, :]
    same = docs[:, :, None] == docs[:, None, :]
    full = same & (behind >= 0)
    near = full & (behind < shape.window)
    stacked = {name: value.unbind(0) for name, value in w.items() if name not in ("embedding", "head", "norm")}
    balances = []
    for layer in range(shape.layers):
        own = {name: values[layer] for name, values in stacked.items()}
        mask = full if layer % 2 else near
        x = x + _attention(rms_norm(x, own["attention_norm"]), own, shape, cos, sin, mask)
        out, balance = _experts(rms_norm(x, own["moe_norm"]), own, shape, quantised)
        x = x + out
        balances.append(balance)
    return rms_norm(x, w["norm"]), torch.stack(balances).mean()


def bank_rows(w: dict[str, Tensor], raw: Tensor) -> tuple[Tensor, Tensor]:
    """Random embedding and head rows with the trained rows' size, from bytes [bank, H]. No gradient."""
    rows = random_rows(raw)
    with torch.no_grad():
        scales = [w[name].float().square().mean().sqrt() for name in ("embedding", "head")]
    return rows * scales[0], rows.roll(HEAD_ROLL, -1) * scales[1]


def loss_and_hits(
    w: dict[str, Tensor], shape: Shape, batch: Batch, bank: Tensor, tables: tuple[Tensor, Tensor], quantised: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Training loss, mean cross-entropy and, for each learnt position, whether the greedy token is the label.

    `w` holds master weights after MXFP4 rounding; they are cast to bf16 here. `bank` is uint8 [bank, H].
    """
    low = {name: value.to(torch.bfloat16) for name, value in w.items()}
    bank_in, bank_out = (rows.to(torch.bfloat16) for rows in bank_rows(w, bank))
    x = functional.embedding(batch.ids, torch.cat((low["embedding"], bank_in)))
    x, balance = hidden_states(low, shape, x, batch.docs, batch.positions, tables, quantised)
    picked = x.reshape(-1, shape.hidden)[batch.where]
    logits = functional.linear(picked, torch.cat((low["head"], bank_out))).float()
    label_logit = logits.gather(1, batch.labels.unsqueeze(1)).squeeze(1)
    loss = torch.logsumexp(logits, -1) - label_logit
    mean = (loss * batch.weights).sum() / batch.weights.sum().clamp_min(1.0)
    hits = logits.amax(-1) <= label_logit
    return mean + BALANCE_WEIGHT * balance, mean.detach(), hits.detach()


def rounded(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masters with the expert matrices rounded to MXFP4 (straight gradients)."""
    return {name: round_mxfp4(value) if name in EXPERT_MATRICES else value for name, value in masters.items()}


def cloned(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masters with copies of the expert matrices."""
    return {name: value.clone() if name in EXPERT_MATRICES else value for name, value in masters.items()}
