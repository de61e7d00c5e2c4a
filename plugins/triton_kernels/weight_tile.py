"""Tiles of FP8 128x128 weights, read from FP8 storage or expanded from MXFP4 on the way in.

Invariant: both readers give the same e4m3 codes and the same block scale for the same weight (reference/fp8_block.py
has the rule: k = s_max - 6 over the groups of a 128x128 block that hold a non-zero). Must not know experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import to_e4m3

BLOCK = tl.constexpr(128)
GROUP = tl.constexpr(32)
FP32_BIAS = tl.constexpr(127)


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2^exponent as fp32, exact, for -126 <= exponent <= 127."""
    return ((exponent + FP32_BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(code):  # type: ignore[no-untyped-def]
    """The e2m1 magnitude of a code's low three bits: 0, .5, 1, 1.5, 2, 3, 4, 6."""
    m = (code & 7).to(tl.float32)
    return tl.where(m < 4.0, 0.5 * m, tl.where(m < 6.0, m - 2.0, 2.0 * m - 8.0))


@triton.jit
def block_exponent(blocks, scales, row, rows, k_block, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """k of the 128x128 block of MXFP4 rows `row` [128] at K block k_block; 0 when all of it is zero."""
    group = k_block * 4 + tl.arange(0, 4)
    inside = (row < rows)[:, None] & (group < K // 32)[None, :]
    byte = tl.arange(0, 16)
    packed = tl.load(
        blocks + row.to(tl.int64)[:, None, None] * (K // 2) + group[None, :, None] * 16 + byte[None, None, :],
        mask=inside[:, :, None], other=0,
    )  # fmt: skip
    used = tl.max((packed & 0x77).to(tl.int32), axis=2) > 0  # [128, 4]
    exponent = tl.load(scales + row.to(tl.int64)[:, None] * (K // 32) + group[None, :], mask=inside, other=0)
    largest = tl.max(tl.max(tl.where(used, exponent.to(tl.int32) - FP32_BIAS, -1000), axis=1), axis=0)
    return tl.where(largest == -1000, 0, largest - 6)


@triton.jit
def mxfp4_tile(  # type: ignore[no-untyped-def]
    blocks, scales, row, rows, column_start, exponent, K: tl.constexpr, WIDTH: tl.constexpr
):
    """e4m3 codes [128, WIDTH] of columns from column_start: value x 2^(scale - exponent), zeros outside."""
    byte = column_start // 2 + tl.arange(0, WIDTH // 2)
    inside = (row < rows)[:, None] & (byte < K // 2)[None, :]
    packed = tl.load(blocks + row.to(tl.int64)[:, None] * (K // 2) + byte[None, :], mask=inside, other=0).to(tl.int32)
    group = column_start // 32 + tl.arange(0, WIDTH // 2) // 16
    shift = tl.load(
        scales + row.to(tl.int64)[:, None] * (K // 32) + group[None, :], mask=inside, other=0
    ).to(tl.int32) - FP32_BIAS - exponent  # fmt: skip
    # A group of zeros may have any scale byte: keep its power of two a number.
    unit = power_of_two(tl.minimum(tl.maximum(shift, -60), 60))
    low = _magnitude(packed) * tl.where((packed & 8) != 0, -unit, unit)
    high = _magnitude(packed >> 4) * tl.where((packed & 128) != 0, -unit, unit)
    return to_e4m3(tl.reshape(tl.join(low, high), (BLOCK, WIDTH)))


@triton.jit
def fp8_tile(weight, row, rows, column_start, K: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 codes [128, WIDTH], zeros outside."""
    column = column_start + tl.arange(0, WIDTH)
    return tl.load(
        weight + row.to(tl.int64)[:, None] * K + column[None, :],
        mask=(row < rows)[:, None] & (column < K)[None, :], other=0.0,
    )  # fmt: skip
