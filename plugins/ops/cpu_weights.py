"""Expanded weights for the CPU: each packed weight becomes, once, something that multiplies fast.

Invariant: a row's product is the same to the last bit whatever the number of rows (so a request's greedy tokens do not
depend on its neighbours), and within fp32 rounding of the exact one. Expansions live as long as the packed tensor and
stay below EXPANDED_LIMIT_BYTES in all; beyond that weights are expanded on every call, which is slow but right. Knows
formats through the reference; must not know ops or layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gptoss_trt.ops import weight_layout
from gptoss_trt.reference import fp8_block
from gptoss_trt.reference.product import Product

EXPANDED_LIMIT_BYTES = 4 << 30  # of one process; the demo needs 0.12 GiB, gpt-oss-20b 45 GiB
_TINY = 2.0**-40  # what fp16 may lose, relative to a weight's largest value: far below fp32's own rounding of a sum
_CHECKED_ROWS = 4096  # rows looked at in one go, so that a check stays in the cache
_FULL_ROWS = 16  # from so many rows on MKL adds a row's products in one order


class Fp16Product:
    """x fp32 times a weight held as fp16 with a power of two, sums in fp32 by fbgemm: one order whatever the rows.

    Half the bytes of fp32, and for bf16, FP8 and MXFP4 weights the same numbers: their significands fit fp16's 11 bits.
    """

    def __init__(self, scaled: torch.Tensor, factor: float) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._factor = factor
        self.bytes = scaled.numel() * 2

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x * self._factor, self._packed)
        return y


class Fp32Product:
    """x fp32 times an fp32 weight; few rows are padded, because MKL adds in another order for them."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.to(torch.float32).contiguous()
        self.bytes = weight.numel() * 4

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, max(0, _FULL_ROWS - rows)))
        return (padded @ self._weight.T)[:rows]


Expanded = Fp16Product | Fp32Product


def make_product(weight: torch.Tensor) -> Expanded:
    """The fastest product of a weight [N, K] that keeps its numbers: fp16 storage where they fit, else fp32."""
    wide = weight.to(torch.float32)
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    if largest > 0 and torch.backends.quantized.engine in ("x86", "fbgemm"):
        exponent = int(torch.frexp(torch.tensor(largest))[1])
        factor = 2.0 ** (15 - exponent)  # the largest value lands in [2^14, 2^15); fp16 ends at 65504
        scaled = wide * factor
        if all(_fits_fp16(rows, largest * factor * _TINY) for rows in torch.split(scaled, _CHECKED_ROWS)):
            return Fp16Product(scaled, 1.0 / factor)
    return Fp32Product(wide)


def _fits_fp16(scaled: torch.Tensor, loss: float) -> bool:
    return bool(((scaled.to(torch.float16).to(torch.float32) - scaled).abs() <= loss).all())


@dataclass
class _Held:
    """The products of one packed tensor, as it was at `version`."""

    version: int
    products: dict[int, Expanded] = field(default_factory=dict)
    bytes: int = 0


class ProductCache:
    """Products by packed weight tensor; an in-place change of the tensor makes new ones. Safe to use from threads."""

    def __init__(self, limit_bytes: int = EXPANDED_LIMIT_BYTES) -> None:
        self._entries: MutableMapping[torch.Tensor, _Held] = WeakIdKeyDictionary()
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()  # a dying tensor may remove its entry while the thread holds the lock

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(held.bytes for held in list(self._entries.values()))

    def get(self, owner: torch.Tensor, part: int, expand: Callable[[], torch.Tensor]) -> Product:
        """The product of part `part` (an expert, or 0) of `owner`, whose expanded weight [N, K] `expand` returns."""
        version = 0 if owner.is_inference() else owner._version  # inference tensors keep no count of changes
        with self._lock:
            held = self._entries.get(owner)
            if held is None or held.version != version:
                held = self._entries[owner] = _Held(version)
            product = held.products.get(part)
        if product is None:
            weight = expand()
            if self.held_bytes + 4 * weight.numel() > self._limit_bytes:
                return Fp32Product(weight)  # packing pays only for a product that stays
            product = make_product(weight)
            with self._lock:
                if part not in held.products:
                    held.products[part] = product
                    held.bytes += product.bytes
        return product


_CACHE = ProductCache()


def dense_product(weight: torch.Tensor) -> Product:
    """The product of a bf16 weight [N, K]."""
    return _CACHE.get(weight, 0, lambda: weight)


def dense_fp8_product(weight: torch.Tensor, scale: torch.Tensor, segments: Sequence[int]) -> Product:
    """The product of an FP8 weight [N, K] whose row segments each begin a row of scales ([]: one segment)."""
    parts = list(segments) or [weight.shape[0]]
    return _CACHE.get(weight, 0, lambda: fp8_block.dequantise_segments(weight, scale, parts))


def expert_products(
    weight: torch.Tensor, scale: torch.Tensor, layout: str, shape: tuple[int, int]
) -> Callable[[int], Product]:
    """Local expert -> product of its weight [N, K] = `shape`, from either storage in any layout (ops/schemas.py)."""
    mxfp4_storage = scale.dtype == torch.uint8

    def expand(expert: int) -> torch.Tensor:
        values, scales = weight[expert], scale[expert] if layout == "plain" else scale
        if layout == "sm90_v1":
            unpack = weight_layout.unpack_mxfp4 if mxfp4_storage else weight_layout.unpack_fp8
            values, scales = (part[0] for part in unpack(weight[expert : expert + 1], *shape))
        elif layout == "sm90_tiles_v1":
            values, scales = (part[0] for part in weight_layout.unpack_tiles(weight[expert : expert + 1], *shape))
        if mxfp4_storage:
            values, scales, _ = fp8_block.from_mxfp4(values, scales)
        return fp8_block.dequantise(values, scales)

    return lambda expert: _CACHE.get(weight, expert, lambda: expand(expert))


def may_hold(values: int) -> bool:
    """Whether the expansion of so many more weights certainly stays below EXPANDED_LIMIT_BYTES."""
    return _CACHE.held_bytes + 4 * values <= EXPANDED_LIMIT_BYTES
