"""What a conversion did to the numbers: blocks exact or not, the largest spread, errors of what was quantised.

Invariant: the totals do not depend on the order in which threads add to them. Must not convert or read anything.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

from gptoss_trt.reference.fp8_block import BlockExponents, BlockQuantised

LISTED = 100  # rounded (layer, tensor, expert) places named in the manifest; all are counted


@dataclass
class _Blocks:
    total: int = 0
    exact: int = 0
    spread: int = -1
    spread_at: tuple[str, int, int, int] = ("", 0, 0, 0)


class ConversionReport:
    """Collects exactness and errors from the threads of a build; `to_dict` is what the manifest keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = _Blocks()
        self._rounded: dict[tuple[str, int], int] = {}
        self._errors: dict[str, list[float]] = {}  # tensor class -> [squared error, squared value]

    def add_blocks(self, stem: str, expert: int, plan: BlockExponents) -> None:
        """Counts the 128 x 128 blocks of one expert's weight, [NB, KB]."""
        total, exact = plan.exact.numel(), int(plan.exact.sum())
        flat = int(plan.spread.argmax())
        row, column = divmod(flat, plan.spread.shape[-1])
        place = (stem, expert, row, column)
        spread = int(plan.spread[row, column])
        with self._lock:
            known = self._blocks
            known.total += total
            known.exact += exact
            if spread > known.spread or (spread == known.spread and place < known.spread_at):
                known.spread, known.spread_at = spread, place
            if exact < total:
                self._rounded[stem, expert] = total - exact

    def add_error(self, tensor_class: str, squared_error: float, squared_value: float) -> None:
        """Adds to a class (`experts`, `qkv`, `out`, `lm_head`) sums over some of its values."""
        with self._lock:
            sums = self._errors.setdefault(tensor_class, [0.0, 0.0])
            sums[0] += squared_error
            sums[1] += squared_value

    def add_quantised(self, tensor_class: str, result: BlockQuantised) -> None:
        self.add_error(tensor_class, float(result.squared_error.sum()), float(result.squared_value.sum()))

    def to_dict(self) -> dict[str, Any]:
        """{"mxfp4_blocks": {...}, "relative_rms_error": {class: number}}, as JSON values; only what there was."""
        result: dict[str, Any] = {}
        known = self._blocks
        if known.total:
            stem, expert, row, column = known.spread_at
            rounded = sorted(self._rounded.items())
            result["mxfp4_blocks"] = {
                "total": known.total,
                "exact": known.exact,
                "rounded": known.total - known.exact,
                "largest_spread_octaves": known.spread,
                "largest_spread_at": {"tensor": stem, "expert": expert, "block": [row, column]},
                "rounded_at": [
                    {"tensor": place[0], "expert": place[1], "blocks": count} for place, count in rounded[:LISTED]
                ],
            }
        if self._errors:
            result["relative_rms_error"] = {
                name: math.sqrt(error / value) if value else 0.0
                for name, (error, value) in sorted(self._errors.items())
            }
        return result
