"""The same numbers in another storage: MXFP4 as FP8 128x128, and FP8 128x128 of a dense matrix, on any device.

Invariant: one rule (reference/fp8_block.py) for the builder, the kernels and whoever makes weights at run time. Must
not know names of tensors or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_trt.reference import fp8_block


def mxfp4_to_fp8(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 [E, N, K/32, 16] and u8 [E, N, K/32] -> e4m3 [E, N, K] and fp32 [E, ceil(N/128), ceil(K/128)], expert by
    expert. Raises FormatError for bytes that are no MXFP4."""
    parts = [fp8_block.from_mxfp4(*expert)[:2] for expert in zip(blocks, scales, strict=True)]
    weights, block_scales = zip(*parts, strict=True)
    return torch.stack(weights), torch.stack(block_scales)


def dense_to_fp8(values: torch.Tensor, segments: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A finite matrix [N, K] as e4m3 [N, K] and fp32 [sum of ceil(rows/128), ceil(K/128)]; each of `segments`, which
    add up to N rows, begins a new row of scales. Raises FormatError for values that are not finite."""
    parts = [fp8_block.quantise(part) for part in torch.split(values, list(segments))]
    return torch.cat([part.weight for part in parts]), torch.cat([part.scale for part in parts])
