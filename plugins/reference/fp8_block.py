"""FP8 weights with one fp32 scale per 128 x 128 block, and the one rule that turns MXFP4 into them.

Invariant: `block_exponents` alone decides the power of two of a block and whether the conversion is exact; builder,
verifier, CPU reference and kernels' packers all ask it. Pure torch on any device; two-dimensional tails (2880 = 22.5
blocks) are short blocks. Must not know checkpoints, files or layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptoss_trt.reference import mxfp4
from gptoss_trt.reference.mxfp4 import FormatError

BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TOP_SHIFT = 6  # 6 x 2^6 = 384 <= 448 < 6 x 2^7: the largest shift that cannot overflow
BOTTOM_SHIFT = -8  # 0.5 x 2^-8 = 2^-9, the smallest subnormal of e4m3
MAX_EXACT_SPREAD = TOP_SHIFT - BOTTOM_SHIFT  # 14 octaves
SCALE_EXPONENTS = (-126, 127)  # powers of two that are normal fp32 numbers
_ZERO_SHIFT = -14  # 6 x 2^-14 lies below half of the smallest subnormal: every code rounds to zero from here on
_GROUPS = BLOCK // mxfp4.GROUP
# Steps inside one octave that the search for a block's best scale tries: the mantissa grid moves against the values.
_SCALE_STEPS = 4
_STRIP_ROWS = 4 * BLOCK  # worked on at a time: temporaries stay in a core's cache
_DEVICE_STRIP_ROWS = 256 * BLOCK  # on a GPU, where a launch costs more than memory


@dataclass(frozen=True)
class BlockExponents:
    """Per 128 x 128 block, [..., ceil(N/128), ceil(K/128)]: the scale's exponent k (int32), the spread of the exponents
    of its groups that hold a non-zero (int32 octaves), whether 2^k makes the conversion exact (bool)."""

    k: torch.Tensor
    spread: torch.Tensor
    exact: torch.Tensor


@dataclass(frozen=True)
class BlockQuantised:
    """e4m3 weight [..., N, K], f32 scale [..., ceil(N/128), ceil(K/128)], fp64 sums of squared errors and of squared
    values per block (same shape as scale)."""

    weight: torch.Tensor
    scale: torch.Tensor
    squared_error: torch.Tensor
    squared_value: torch.Tensor

    @property
    def relative_error(self) -> float:
        """Root of (sum of squared errors / sum of squared values); 0 for an all-zero tensor."""
        total = float(self.squared_value.sum())
        return math.sqrt(float(self.squared_error.sum()) / total) if total else 0.0


def block_exponents(blocks: torch.Tensor, scales: torch.Tensor) -> BlockExponents:
    """k = s_max - 6; exact when s_max - s_min <= 14, over the groups of the block that hold a non-zero.

    An all-zero block has k = 0 and is exact.

    u8 blocks [..., N, K/32, 16], u8 scales [..., N, K/32]. Raises FormatError for a scale byte 255, shapes that do not
    belong together, and a k outside -126..127 (with its place).
    """
    mxfp4.check_packed(blocks, scales)
    holds = ((blocks & 0x77) != 0).any(dim=-1)  # [..., N, G]; a nibble 8 is minus zero
    exponents = scales.to(torch.int16) - mxfp4.EXPONENT_BIAS
    outside = 1000  # above and, negated, below every exponent
    s_max = _reduce_blocks(torch.where(holds, exponents, -outside), -outside, largest=True)
    s_min = _reduce_blocks(torch.where(holds, exponents, outside), outside, largest=False)
    empty = s_max == -outside
    k = torch.where(empty, 0, s_max - TOP_SHIFT)
    spread = torch.where(empty, 0, s_max - s_min)
    low, high = SCALE_EXPONENTS
    invalid = (k < low) | (k > high)
    if bool(invalid.any()):
        first = tuple(int(index) for index in invalid.nonzero()[0])
        raise FormatError(f"block scale 2^{int(k[first])} at block {first} lies outside 2^{low}..2^{high}")
    return BlockExponents(k, spread, spread <= MAX_EXACT_SPREAD)


def _reduce_blocks(values: torch.Tensor, fill: int, *, largest: bool) -> torch.Tensor:
    """Extremum over 128 rows x 4 groups: int16 [..., N, G] -> int32 [..., ceil(N/128), ceil(G/4)]."""
    rows, groups = values.shape[-2:]
    pad = (0, -groups % _GROUPS, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(values, pad, value=fill)
    tiles = _tile(padded, BLOCK, _GROUPS)  # [..., NB, 128, KB, 4]
    reduced: torch.Tensor = tiles.amax(dim=(-3, -1)) if largest else tiles.amin(dim=(-3, -1))
    return reduced.to(torch.int32)


def _tile(padded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., N, K] of whole tiles -> [..., N / rows, rows, K / columns, columns]."""
    *lead, height, width = padded.shape
    return padded.reshape(*lead, height // rows, rows, width // columns, columns)


def expand_blocks(per_block: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., ceil(rows/128), ceil(columns/128)] -> [..., rows, columns], each block's number at each of its elements."""
    expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(per_block.shape[-2:]) != expected:
        raise FormatError(
            f"block scales {tuple(per_block.shape)} do not cover [{rows}, {columns}]: expected {expected}"
        )
    wide = per_block.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return wide.repeat_interleave(BLOCK, dim=-1)[..., :columns]


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, BlockExponents]:
    """MXFP4 u8 [..., N, K/32, 16] and u8 [..., N, K/32] -> e4m3 weight [..., N, K], f32 scale 2^k per block, and the
    exponents with their exactness. Where a block is not exact its values are rounded to nearest even.

    Each group's codes are looked up under its shift d = s - k. Raises FormatError as `block_exponents` does.
    """
    plan = block_exponents(blocks, scales)
    height, groups = scales.shape[-2:]
    k = plan.k.repeat_interleave(BLOCK, dim=-2)[..., :height, :].repeat_interleave(_GROUPS, dim=-1)[..., :groups]
    shift = scales.to(torch.int32) - mxfp4.EXPONENT_BIAS - k
    # Only groups of zeros lie above the top shift, and zero is zero under any shift.
    table_row = (shift.clamp(_ZERO_SHIFT, TOP_SHIFT) - _ZERO_SHIFT).reshape(-1, groups)
    table = _pair_table(blocks.device)
    packed = blocks.reshape(-1, groups, mxfp4.GROUP_BYTES)
    pairs = torch.empty(packed.shape, dtype=torch.int16, device=blocks.device)  # two e4m3 codes each
    rows = _STRIP_ROWS if blocks.device.type == "cpu" else _DEVICE_STRIP_ROWS
    for start in range(0, len(packed), rows):
        strip = slice(start, start + rows)
        index = table_row[strip].unsqueeze(-1) * 256 + packed[strip].to(torch.int32)
        pairs[strip] = torch.index_select(table, 0, index.reshape(-1)).reshape(index.shape)
    weight = pairs.view(torch.uint8).view(E4M3).reshape(*scales.shape[:-1], groups * mxfp4.GROUP)
    return weight, mxfp4.power_of_two(plan.k), plan


def _pair_table(device: torch.device) -> torch.Tensor:
    """int16 [21 * 256]: for each shift from -14 to 6 and each byte of two codes, their e4m3 codes in memory order."""
    codes = torch.tensor(mxfp4.E2M1_VALUES, dtype=torch.float32)
    shifts = torch.arange(_ZERO_SHIFT, TOP_SHIFT + 1)
    rounded = (codes * mxfp4.power_of_two(shifts).unsqueeze(-1)).to(E4M3).view(torch.uint8)  # [21, 16]
    byte = torch.arange(256)
    pairs = torch.stack((rounded[:, byte & 15], rounded[:, byte >> 4]), dim=-1)  # [21, 256, 2]
    return pairs.contiguous().view(torch.int16).reshape(-1).to(device)


def decode_e4m3(weight: torch.Tensor) -> torch.Tensor:
    """weight.to(float32), exactly, but three times as fast on a CPU: the seven lower bits moved to fp32's place are the
    magnitude divided by 2^120 (subnormals included). A NaN code becomes 480; none is ever written here."""
    codes = weight.view(torch.uint8).to(torch.int32)
    bits = ((codes & 0x7F) << 20).bitwise_or_((codes & 0x80) << 24)
    return bits.view(torch.float32) * 2.0**120


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight x scale of its block: e4m3 [..., N, K] and f32 [..., ceil(N/128), ceil(K/128)] -> dtype [..., N, K]."""
    if weight.dtype != E4M3:
        raise FormatError(f"FP8 weight is {weight.dtype}, not {E4M3}")
    rows, columns = weight.shape[-2:]
    return (weight.to(torch.float32) * expand_blocks(scale, rows, columns)).to(dtype)


def dequantise_segments(weight: torch.Tensor, scale: torch.Tensor, segments: Sequence[int]) -> torch.Tensor:
    """`dequantise` for a weight [N, K] whose rows are segments that each begin a new block (q, k and v of a rank):
    f32 scale [sum of ceil(rows/128), ceil(K/128)] -> f32 [N, K]."""
    if sum(segments) != weight.shape[0]:
        raise FormatError(f"segments {tuple(segments)} do not add up to {weight.shape[0]} rows")
    counts = [-(-rows // BLOCK) for rows in segments]
    parts = zip(torch.split(weight, list(segments)), torch.split(scale, counts), strict=True)
    return torch.cat([dequantise(part, part_scale) for part, part_scale in parts])


def quantise(values: torch.Tensor) -> BlockQuantised:
    """e4m3 weights of finite values [..., N, K] under the scale per block that has the least squared error.

    Tried are the smallest power of two that does not overflow (exact for values that came from MXFP4, and preferred at
    a tie) and four steps of the octave above amax / 448; the rest of the octaves repeat the same mantissas. Rounds to
    nearest even; an all-zero block has scale 1. Raises FormatError for values that are not finite.
    """
    rows = values.shape[-2]
    strips = [_quantise_strip(values[..., at : at + _STRIP_ROWS, :]) for at in range(0, max(rows, 1), _STRIP_ROWS)]
    weight = torch.cat([strip.weight.view(torch.uint8) for strip in strips], dim=-2).view(E4M3)
    numbers = ("scale", "squared_error", "squared_value")
    return BlockQuantised(weight, *(torch.cat([getattr(strip, name) for strip in strips], dim=-2) for name in numbers))


def _quantise_strip(values: torch.Tensor) -> BlockQuantised:
    wide = values.to(torch.float32)
    rows, columns = wide.shape[-2:]
    amax = _block_sum_or_max(wide.abs(), largest=True)
    if not bool(torch.isfinite(amax).all()):
        raise FormatError("values to be stored as FP8 are not finite")
    smallest = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp_min(2.0 ** SCALE_EXPONENTS[0]))
    mantissa, exponent = torch.frexp(smallest)  # smallest = mantissa x 2^exponent, mantissa in [1/2, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    best_scale = mxfp4.power_of_two(exponent)
    best_scale = torch.where(best_scale * E4M3_MAX < amax, best_scale * 2, best_scale)
    best_weight, best_error = _quantise_with(wide, best_scale)
    if bool((best_error > 0).any()):
        for step in range(_SCALE_STEPS):
            scale = smallest * 2.0 ** (step / _SCALE_STEPS)
            weight, error = _quantise_with(wide, scale)
            better = error < best_error
            best_scale = torch.where(better, scale, best_scale)
            best_error = torch.where(better, error, best_error)
            chosen = expand_blocks(better, rows, columns)
            best_weight = torch.where(chosen, weight.view(torch.uint8), best_weight.view(torch.uint8)).view(E4M3)
    squares = _scaled_sum((wide / expand_blocks(smallest, rows, columns)).square_(), smallest)
    return BlockQuantised(best_weight, best_scale, best_error, squares)


def _quantise_with(wide: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weight under a scale per block that is at least amax / 448, and its fp64 squared error per block.

    Errors are summed in units of the scale: their squares would overflow or vanish in fp32 for extreme weights.
    """
    quotient = wide / expand_blocks(scale, *wide.shape[-2:])
    # No clamp: a quotient exceeds 448 by a rounding of the division at most, and that rounds back to 448.
    weight = quotient.to(E4M3)
    difference = decode_e4m3(weight).sub_(quotient)
    return weight, _scaled_sum(difference.square_(), scale)


def _scaled_sum(squares: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sum over each block x scale^2, fp64."""
    return _block_sum_or_max(squares, largest=False).double() * scale.double().square()


def _block_sum_or_max(values: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Non-negative [..., N, K] -> [..., ceil(N/128), ceil(K/128)]."""
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = _tile(padded, BLOCK, BLOCK)
    reduced: torch.Tensor = tiles.amax(dim=(-3, -1)) if largest else tiles.sum(dim=(-3, -1))
    return reduced
