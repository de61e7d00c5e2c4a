"""What is done once, when a model is loaded, so that no step has to: weights made ready, the table of rotations.

Invariant: idempotent; an op gives the same result for a weight that was not prepared, later. Must not know layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from gptoss_trt.ops import dispatch, weight_layout
from gptoss_trt.ops.cpu_weights import dense_fp8_product, dense_product, expert_products, may_hold
from gptoss_trt.reference import fp8_block, rope
from gptoss_trt.reference.rope import RopeConfig

TILES = "sm90_tiles_v1"
TILES_STEP = {"moe_gate_up": 32, "moe_down": 8}  # rows of a weight whose product the library stores
# Where no plan says otherwise, steps of this many rows an expert on average read the experts' FP8 copy, if there is one
# (measured: 1.2 to 1.3 times as fast from 128 rows on, 1.1 times at 64 uneven ones, level at 32).
PREFILL_ROWS = 64

__all__ = [
    "PREFILL_ROWS",
    "RopeConfig",
    "prefill_bytes",
    "prefill_experts",
    "prepare_dense",
    "prepare_experts",
    "rope_table",
]


@functools.lru_cache(maxsize=4)
def rope_table(config: RopeConfig, positions: int, device: torch.device) -> torch.Tensor:
    """cos_sin of `rope_kv_append` for positions 0 .. positions - 1, fp32 [positions, head_dim]; one for all callers."""
    return rope.rope_table(config, positions, device)


def prepare_dense(weight: torch.Tensor, scale: torch.Tensor | None = None, segments: Sequence[int] = ()) -> None:
    """On a CPU expands a weight of `dense` (bf16) or `dense_fp8` (e4m3 with its scales); elsewhere nothing."""
    if weight.device.type != "cpu" or not may_hold(weight.numel()):
        return
    if scale is None:
        dense_product(weight)
    else:
        dense_fp8_product(weight, scale, segments)


def prepare_experts(
    op: str, weight: torch.Tensor, scale: torch.Tensor, layout: str, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The weight, weight_scale and layout to call `op` (moe_gate_up or moe_down) with; `shape` is an expert's [N, K].

    On a CPU the same, with all experts expanded if there is room; on a GPU packed as sm90_v1 where the compiled library
    serves the op.
    """
    if weight.device.type == "cpu":
        if may_hold(weight.shape[0] * shape[0] * shape[1]):
            product = expert_products(weight, scale, layout, shape)
            for expert in range(weight.shape[0]):
                product(expert)
    elif layout == "plain" and dispatch.layout_of(op) == "sm90_v1":
        pack = weight_layout.pack_mxfp4 if weight.dtype == torch.uint8 else weight_layout.pack_fp8
        return pack(weight, scale), scale.new_empty(0), "sm90_v1"
    return weight, scale, layout


def prefill_bytes(op: str, weight: torch.Tensor, layout: str, shape: tuple[int, int]) -> int:
    """Bytes of what prefill_experts makes of a weight that prepare_experts returned; 0 where `op` reads no such."""
    if weight.device.type == "cpu" or layout != "sm90_v1" or TILES not in dispatch.layouts_of(op):
        return 0
    if shape[0] % TILES_STEP[op]:
        return 0
    return weight.shape[0] * weight_layout.tiles_bytes(*shape)


def prefill_experts(
    weight: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """A weight in layout sm90_v1, either storage, once more as FP8 tiles: the same values, for steps of many tokens.
    Several experts are expanded at once: an expert takes some 300 launches however many there are."""
    out = torch.empty(len(weight), weight_layout.tiles_bytes(*shape), dtype=torch.uint8, device=weight.device)
    for part in weight_layout.chunks(len(weight), shape[0] * shape[1]):
        if scale.dtype == torch.uint8:
            values = fp8_block.from_mxfp4(*weight_layout.unpack_mxfp4(weight[part], *shape))[:2]
        else:
            values = weight_layout.unpack_fp8(weight[part], *shape)
        weight_layout.pack_tiles(*values, out[part])
    return out, torch.empty(0, device=weight.device), TILES
