"""Rounding that every kernel shares: bf16 between ops, and the activation quantisation rule.

Invariant: what these functions give equals reference/act_quant.py and reference/rounding.py bit for bit, on a GPU and
in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

E4M3_MAX = tl.constexpr(448.0)
STATIC_SCALE = tl.constexpr(0.125)  # |h| <= 7 x 8 = 56 = 448 / 8
# triton.jit makes the same choice at import. The interpreter truncates to bf16, loses carries to e4m3 and multiplies
# both formats wrongly, so there values are rounded in integer and fp32 arithmetic first and widened before tl.dot.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def to_bf16(x):  # type: ignore[no-untyped-def]
    """fp32 rounded to nearest even bf16. A NaN stays one."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, rounded)
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):  # type: ignore[no-untyped-def]
    """x rounded to bf16, as fp32."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def group_scale(amax):  # type: ignore[no-untyped-def]
    """amax / 448 by IEEE division, 1 where that is 0 (a tiny amax underflows to 0 as well)."""
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def to_e4m3(x):  # type: ignore[no-untyped-def]
    """fp32 within +-448 rounded to nearest even e4m3, subnormals included."""
    if INTERPRETED:
        exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, -6)
        # Adding 1.5 x 2^23 steps of the target's grid leaves fp32's own rounding to nearest even on that grid.
        magic = 1.5 * ((exponent + 20 + 127) << 23).to(tl.float32, bitcast=True)
        x = (x + magic) - magic
    return x.to(tl.float8e4nv)


@triton.jit
def saturate_e4m3(quotient):  # type: ignore[no-untyped-def]
    """fp32 clamped to +-448, then rounded to e4m3."""
    return to_e4m3(tl.minimum(tl.maximum(quotient, -E4M3_MAX), E4M3_MAX))


@triton.jit
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a @ b with fp32 accumulation."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc)
