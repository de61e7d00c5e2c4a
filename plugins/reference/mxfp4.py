"""The MXFP4 codec: what the bytes of a checkpoint's expert weights mean, and how values become such bytes.

Invariant: `decode(*encode(x)[:2])` is x wherever x already is an MXFP4 tensor. Pure torch on any device; allocates only
its results and temporaries of the same size. Must not know checkpoints, files, experts or FP8.
"""

from __future__ import annotations

import torch

GROUP = 32  # values along the input dimension that share one scale byte
GROUP_BYTES = GROUP // 2
EXPONENT_BIAS = 127  # OCP microscaling, E8M0: value of a scale byte b is 2^(b - 127)
SCALE_NAN = 255  # the one E8M0 byte that is no number
E2M1_MAX = 6.0
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 x 2^2
# Code c: bit 3 is the sign, bits 0..2 the magnitude (OCP microscaling, E2M1).
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


_STRIP_ROWS = 512  # worked on at a time: temporaries stay in a core's cache


class FormatError(ValueError):
    """Bytes that are not numbers of the format, or tensors whose shapes do not belong together."""


def check_packed(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Checks u8 blocks [..., K/32, 16] against u8 scales [..., K/32]. Raises FormatError with both shapes, or with the
    place of a scale byte 255."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise FormatError(f"MXFP4 blocks and scales are {blocks.dtype} and {scales.dtype}, not uint8")
    if blocks.shape != (*scales.shape, GROUP_BYTES):
        raise FormatError(
            f"MXFP4 blocks {tuple(blocks.shape)} do not belong to scales {tuple(scales.shape)}: "
            f"expected {(*scales.shape, GROUP_BYTES)}"
        )
    invalid = scales == SCALE_NAN
    if bool(invalid.any()):
        first = tuple(int(index) for index in invalid.nonzero()[0])
        raise FormatError(f"MXFP4 scale byte 255 (not a number) at {first}, {int(invalid.sum())} in all")


def power_of_two(exponents: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """2^exponents, exact (subnormals included): int [...] -> dtype [...]."""
    return torch.ldexp(torch.ones(exponents.shape, dtype=dtype, device=exponents.device), exponents)


def unpack_codes(blocks: torch.Tensor) -> torch.Tensor:
    """u8 [..., G, 16] -> u8 codes 0..15 [..., G * 32]: byte i holds element 2i (low nibble) and 2i + 1 (high)."""
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)  # [..., G, 16, 2]
    return pairs.reshape(*blocks.shape[:-2], blocks.shape[-2] * GROUP)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """u8 codes [..., K] -> u8 blocks [..., K/32, 16], the inverse of `unpack_codes`."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // GROUP, GROUP_BYTES, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def decode(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """value = e2m1 x 2^(scale - 127): u8 [..., K/32, 16] and u8 [..., K/32] -> dtype [..., K].

    Exact in bf16 and fp32 for scale bytes 1..252 (beyond, 2^-127 x 0.5 is subnormal and 6 x 2^126 overflows);
    exact everywhere in fp64. Raises FormatError as `check_packed` does.
    """
    check_packed(blocks, scales)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.tensor(E2M1_VALUES, dtype=wide, device=blocks.device)
    groups = values[unpack_codes(blocks).long()].reshape(*scales.shape, GROUP)
    exponents = scales.to(torch.int32) - EXPONENT_BIAS
    scaled = groups * power_of_two(exponents, wide).unsqueeze(-1)
    return scaled.reshape(*scales.shape[:-1], scales.shape[-1] * GROUP).to(dtype)


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest MXFP4 tensor of finite values [..., K], K a multiple of 32.

    Each group takes, of the two exponents that put its largest magnitude at 4..6 (clipping what lies above 6) or at
    half of that, the one with the smaller squared error; the smaller exponent at a tie. Ties of values go to the even
    code. Returns u8 blocks [..., K/32, 16], u8 scales [..., K/32] and the fp64 sum of squared errors, a scalar.
    An all-zero group has scale byte 127. Raises FormatError for another K and for values that are not finite.
    """
    if values.shape[-1] % GROUP:
        raise FormatError(f"MXFP4 needs a multiple of {GROUP} values in a row, not {values.shape[-1]}")
    flat = values.reshape(-1, values.shape[-1])
    parts = [_encode_rows(flat[at : at + _STRIP_ROWS]) for at in range(0, max(len(flat), 1), _STRIP_ROWS)]
    blocks, scales = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    shape = (*values.shape[:-1], values.shape[-1] // GROUP)
    return blocks.reshape(*shape, GROUP_BYTES), scales.reshape(shape), torch.stack([part[2] for part in parts]).sum()


def _encode_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`encode` of a few rows [R, K]."""
    groups = rows.to(torch.float32).reshape(len(rows), -1, GROUP)
    amax = groups.abs().amax(dim=-1)  # [R, G]
    if not bool(torch.isfinite(amax).all()):
        raise FormatError("values to be stored as MXFP4 are not finite")
    low = torch.frexp(amax)[1] - 1 - E2M1_MAX_EXPONENT  # floor(log2(amax)) - 2
    low = torch.where(amax == 0, torch.zeros_like(low), low).clamp(-EXPONENT_BIAS, EXPONENT_BIAS - 1)
    codes_low, error_low = _encode_with(groups, low)
    codes_high, error_high = _encode_with(groups, low + 1)
    higher = error_high < error_low  # [R, G]
    codes = torch.where(higher.unsqueeze(-1), codes_high, codes_low)
    exponents = low + higher.to(low.dtype)
    error = torch.where(higher, error_high, error_low).sum(dtype=torch.float64)
    return pack_codes(codes.reshape(rows.shape)), (exponents + EXPONENT_BIAS).to(torch.uint8), error


def _encode_with(groups: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes u8 [..., G, 32] of groups under given exponents int [..., G], and each group's squared error [..., G]."""
    scaled = groups / power_of_two(exponents).unsqueeze(-1)
    magnitude = scaled.abs().clamp_(max=E2M1_MAX)
    # Codes are 1/2 apart below 2, 1 apart below 4, 2 apart above; rounding to even codes is rounding to even there.
    low, middle, high = torch.round(magnitude * 2), torch.round(magnitude) + 2, torch.round(magnitude / 2) + 4
    nearest = torch.where(magnitude < 2, low, torch.where(magnitude < 4, middle, high)).to(torch.uint8)
    codes = nearest | (torch.signbit(scaled).to(torch.uint8) << 3)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=groups.device)
    difference = table[codes.long()] * power_of_two(exponents).unsqueeze(-1) - groups
    return codes, difference.square().sum(dim=-1)
