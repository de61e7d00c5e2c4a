"""YaRN's rotation angles for gpt-oss: a table of cos and sin for every position.

Invariant: the correction range is not rounded (`truncate: false`): low 8.0928 and high 17.3980 for gpt-oss's numbers.
TensorRT-LLM rounds them to 8 and 18, so its angles differ. Source: OpenAI's RotaryEmbedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeConfig:
    """theta is the base of the frequencies; positions up to `initial_context` were trained before the stretch."""

    head_dim: int = 64
    theta: float = 150000.0
    scaling_factor: float = 32.0
    initial_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def concentration(config: RopeConfig) -> float:
    """0.1 ln(factor) + 1, multiplying both cos and sin; 1 without a stretch."""
    return 0.1 * math.log(config.scaling_factor) + 1.0 if config.scaling_factor > 1 else 1.0


def correction_range(config: RopeConfig) -> tuple[float, float]:
    """(low, high): the dimensions whose angle turns beta_fast and beta_slow times over the initial context."""

    def dimension(turns: float) -> float:
        half = config.head_dim / 2
        return half * math.log(config.initial_context / (turns * 2 * math.pi)) / math.log(config.theta)

    return dimension(config.beta_fast), dimension(config.beta_slow)


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position, fp32 [head_dim / 2]: below `low` as trained, above `high` divided by the factor, a linear
    ramp between. Computed in fp32 in OpenAI's order, because late positions magnify the last bit."""
    half = config.head_dim // 2
    period = config.theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    trained = 1.0 / period
    if config.scaling_factor <= 1:
        return trained
    stretched = 1.0 / (config.scaling_factor * period)
    low, high = correction_range(config)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return stretched * (1 - keep) + trained * keep


def rope_table(config: RopeConfig, positions: int, device: torch.device | None = None) -> torch.Tensor:
    """cos then sin of position x frequency, both times the concentration: fp32 [positions, head_dim]."""
    steps = torch.arange(positions, dtype=torch.float32)
    angles = torch.outer(steps, inverse_frequencies(config))
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * concentration(config)
    return table.to(device)
