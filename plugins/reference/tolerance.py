"""How close two results must be: four classes, and one table that says which op is held to which.

Invariant: a comparison looks at every element or row and reports the worst; no average can hide a wrong row. Must not
know how results were made.

- EXACT: the same bits (copies, indices, codes).
- ULP(n): every element within n units in the last place of the output's dtype (elementwise arithmetic).
- ROW(eps): every element within max(1 ulp of the output's dtype, eps x its bound), where the bound is the sum of
  absolute scaled products that made it; without bounds, the largest magnitude of its row (attention, norms).
- TOKENS: greedy ids; where two differ first, the logits' margin there must be within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Exact:
    """The same bits; NaN equals NaN."""


@dataclass(frozen=True)
class Ulp:
    """At most n units in the last place of the output's dtype apart."""

    n: int


@dataclass(frozen=True)
class Row:
    """Within max(1 ulp, eps x bound), see the module."""

    eps: float


Tolerance = Exact | Ulp | Row

# Source of 2^-12: KERNELS, format reference (measured 1.6e-4 on heavy-tailed inputs). Attention sums in fp32 or tensor
# cores over bf16 probabilities: 2^-8 of the row's largest value.
TOLERANCES: dict[str, Tolerance] = {
    "embedding": Exact(),
    "act_quant": Exact(),
    "kv_slots": Exact(),
    "rmsnorm_quant": Ulp(1),
    "rope_kv_append": Ulp(1),
    "dense": Row(2**-12),
    "dense_fp8": Row(2**-12),
    "dense_fp8_add": Row(2**-7),  # two roundings to bf16
    "dense_fp8_rope_kv_append": Row(2**-8),  # of q, k and v that were rounded to bf16 on the way
    "attention_prefill": Row(2**-8),
    "attention_decode": Row(2**-8),
    "attention_prefill_quant": Row(2**-8),  # before the quantisation
    "attention_decode_quant": Row(2**-8),
    "moe_route": Exact(),  # away from ties: compare the indices where the fourth and fifth logit are 2 bf16 ulp apart
    "rmsnorm_route": Exact(),  # its indices, as moe_route's; what it shares with rmsnorm_quant, as that one
    "feed": Exact(),
    "sample": Exact(),  # where greedy; a share within rounding of a column's edge may take its neighbour
    "moe_gate_up": Row(2**-12),  # before the next quantisation
    "moe_down": Row(2**-12),
    "moe_combine": Ulp(1),
    "moe_combine_norm": Ulp(1),
}

_SIGN_MAGNITUDE = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
}


def ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Representable numbers between two tensors of one float dtype, int64 elementwise; -0 and 0 are the same number.

    Raises TypeError for dtypes that differ or have no such order.
    """
    if actual.dtype != expected.dtype or actual.dtype not in _SIGN_MAGNITUDE:
        raise TypeError(f"no ulp distance between {actual.dtype} and {expected.dtype}")
    integer, mask = _SIGN_MAGNITUDE[actual.dtype]

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(integer).to(torch.int64)
        return torch.where(bits < 0, -(bits & mask), bits)

    return (ordered(actual) - ordered(expected)).abs()


def ulp(x: torch.Tensor) -> torch.Tensor:
    """One unit in the last place at |x|, fp64, for a bf16, fp32 or e4m3 tensor."""
    digits = {torch.bfloat16: 8, torch.float32: 24, torch.float8_e4m3fn: 4}[x.dtype]
    exponent = torch.frexp(x.to(torch.float64))[1]
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - digits)


def worst(
    tolerance: Tolerance, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None
) -> float:
    """The largest deviation in units of what the tolerance allows: at most 1 passes. NaN on one side only is inf.

    Shapes are equal; `bound` is broadcastable to them (ROW). Raises ValueError for shapes or dtypes that differ.
    """
    if actual.shape != expected.shape or (actual.dtype != expected.dtype and not isinstance(tolerance, Row)):
        raise ValueError(
            f"comparing {actual.dtype} {tuple(actual.shape)} with {expected.dtype} {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return 0.0
    if isinstance(tolerance, Exact):
        return 0.0 if _same_bits(actual, expected) else float("inf")
    wide_actual, wide_expected = actual.to(torch.float64), expected.to(torch.float64)
    if not bool((wide_actual.isfinite() == wide_expected.isfinite()).all()):
        return float("inf")
    if isinstance(tolerance, Ulp):
        return float(ulp_distance(actual, expected).max()) / tolerance.n
    if bound is None:
        bound = wide_expected.abs().amax(dim=-1, keepdim=True)
    allowed = torch.maximum(ulp(wide_expected.to(actual.dtype)), tolerance.eps * bound.to(torch.float64))
    return float(((wide_actual - wide_expected).abs() / allowed).nan_to_num(0.0).max())


def assert_close(op: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None) -> None:
    """Raises AssertionError, naming the worst row, unless `actual` is within the table's tolerance for `op`."""
    tolerance = TOLERANCES[op]
    if worst(tolerance, actual, expected, bound) <= 1:
        return
    rows = range(len(actual)) if actual.dim() else range(0)
    broadcast = None if bound is None else bound.expand(actual.shape)
    by_row = [worst(tolerance, actual[r], expected[r], None if broadcast is None else broadcast[r]) for r in rows]
    row = max(rows, key=by_row.__getitem__)
    raise AssertionError(
        f"{op}: row {row} of {len(actual)} is {by_row[row]:.3g} times what {tolerance} allows; "
        f"{sum(value > 1 for value in by_row)} rows are outside"
    )


def compare_tokens(
    actual: Sequence[int], expected: Sequence[int], expected_logits: torch.Tensor, margin: float
) -> str | None:
    """None when the greedy ids agree, or first differ where the expected logits [n, V] of the two ids lie within
    `margin`; else what differs, for a message."""
    for place, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours != theirs:
            gap = float(expected_logits[place, theirs] - expected_logits[place, ours])
            if gap <= margin:
                return None
            return f"token {place} is {ours}, not {theirs}: its logit is {gap:.3g} lower, more than {margin:.3g}"
    return None


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if not actual.dtype.is_floating_point:
        return bool(torch.equal(actual, expected))
    return bool(torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)))
