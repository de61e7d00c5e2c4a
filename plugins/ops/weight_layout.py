"""Layouts sm90_v1 and sm90_tiles_v1 of expert weights, as csrc/moe_gemm_fp8/layout.h defines them: packing and
unpacking on any device.

Invariant: both storages of sm90_v1 put weight (row, column) at the place that the kernels read it from; unpack(pack(x))
is x byte for byte, except where an MXFP4 block is not exact in FP8 (its values are then the rounded ones) and for the
scale byte of an all-zero group that lies outside its block's 15 shifts. Must not know engines or kernels' tiles.
"""

from __future__ import annotations

import torch

from gptoss_trt.reference import fp8_block, mxfp4

STRIP_ROWS = 64
HALF = 64  # columns of half a record
RECORD = 128  # columns of a record, one FP8 scale block
HEADER_BYTES = 16
SHIFT_BYTES = 64
ALIGNMENT = 128
_TILE_CODES = RECORD * RECORD
TILE_BYTES = _TILE_CODES + ALIGNMENT  # of layout sm90_tiles_v1: codes, then the scale
BOTTOM_SHIFT, TOP_SHIFT = fp8_block.BOTTOM_SHIFT, fp8_block.TOP_SHIFT
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # e2m1 magnitudes times two, by code
_CHUNK_WEIGHTS = 1 << 27  # weights handled at once: temporaries take some ten times as many bytes


class LayoutError(ValueError):
    """Weights that layout sm90_v1 cannot hold, or packed bytes of another size."""


def half_bytes(mxfp4_storage: bool) -> int:
    """Bytes of 64 rows x 64 columns."""
    return SHIFT_BYTES + STRIP_ROWS * HALF // 2 if mxfp4_storage else STRIP_ROWS * HALF


def strip_bytes(k: int, mxfp4_storage: bool) -> int:
    """Bytes of 64 rows x k columns, padding to 128 included."""
    size = -(-k // RECORD) * HEADER_BYTES + -(-k // HALF) * half_bytes(mxfp4_storage)
    return -(-size // ALIGNMENT) * ALIGNMENT


def expert_bytes(n: int, k: int, mxfp4_storage: bool) -> int:
    """Bytes of one expert's [n, k]."""
    return -(-n // STRIP_ROWS) * strip_bytes(k, mxfp4_storage)


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 u8 [E, N, K/32, 16] and u8 [E, N, K/32] -> u8 [E, bytes].

    Raises FormatError for bytes that are no MXFP4, LayoutError for an odd N.
    """
    _check_rows(scales.shape[1])
    experts, n, groups = scales.shape
    out = torch.zeros(experts, expert_bytes(n, groups * mxfp4.GROUP, True), dtype=torch.uint8, device=blocks.device)
    for part in chunks(experts, n * groups * mxfp4.GROUP):
        _pack_mxfp4_chunk(blocks[part], scales[part], out[part])
    return out


def _pack_mxfp4_chunk(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    experts, n, groups = scales.shape
    plan = fp8_block.block_exponents(blocks, scales)
    k = _per_group(plan.k, n, groups)
    shift = scales.to(torch.int32) - mxfp4.EXPONENT_BIAS - k  # [E, N, G]
    codes = _round_codes(mxfp4.unpack_codes(blocks).reshape(experts, n, groups, mxfp4.GROUP), shift)
    fields = _fragment_fields(codes.reshape(experts, n, groups * mxfp4.GROUP))
    words = _encode_words(fields.permute(0, 1, 5, 2, 3, 6, 7, 8, 4, 9, 10))  # [E, S, hf, w, g, G, u, i, row, 4]
    rows = (shift.clamp(BOTTOM_SHIFT, TOP_SHIFT) - BOTTOM_SHIFT).to(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, groups % 2, 0, -n % STRIP_ROWS))
    rows = rows.reshape(experts, -1, 4, 8, 2, rows.shape[-1] // 2, 2).permute(0, 1, 5, 2, 3, 6, 4)
    shifts = rows[..., 0] | (rows[..., 1] << 4)  # [E, S, hf, w, g, G]
    halves = torch.cat((shifts.flatten(3), words.flatten(3)), dim=-1)
    _write_records(halves, mxfp4.power_of_two(plan.k), out)


def unpack_mxfp4(packed: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 [E, bytes] -> MXFP4 u8 [E, n, k/32, 16] and u8 [E, n, k/32]. Raises LayoutError for another size."""
    halves, scale = _read_records(packed, n, k, mxfp4_storage=True)
    experts, strips, count = halves.shape[:3]
    words = halves[..., SHIFT_BYTES:].reshape(experts, strips, count, 4, 8, 2, 2, 2, 2, 4)
    fields = _decode_words(words).permute(0, 1, 3, 4, 8, 2, 5, 6, 7, 9, 10)
    codes = fields.reshape(experts, strips * STRIP_ROWS, count * HALF)[:, :n, :k]
    shifts = halves[..., :SHIFT_BYTES].reshape(experts, strips, count, 4, 8, 2)
    rows = torch.stack((shifts & 15, shifts >> 4), dim=-1).permute(0, 1, 3, 4, 6, 2, 5)
    shift = rows.reshape(experts, strips * STRIP_ROWS, count * 2)[:, :n, : k // mxfp4.GROUP].to(torch.int32)
    exponent = (torch.frexp(scale)[1] - 1).to(torch.int32)  # [E, NB, KB]
    total = shift + BOTTOM_SHIFT + _per_group(exponent, n, k // mxfp4.GROUP) + mxfp4.EXPONENT_BIAS
    return mxfp4.pack_codes(codes), total.to(torch.uint8)


def pack_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [E, N, K] and f32 [E, ceil(N/128), ceil(K/128)] -> u8 [E, bytes].

    Raises LayoutError for an odd N or a K that is no multiple of 32.
    """
    experts, n, k = weight.shape
    _check_rows(n)
    if k % mxfp4.GROUP:
        raise LayoutError(f"K is {k}, not a multiple of {mxfp4.GROUP}")
    out = torch.zeros(experts, expert_bytes(n, k, False), dtype=torch.uint8, device=weight.device)
    for part in chunks(experts, n * k):
        fields = _fragment_fields(weight[part].view(torch.uint8))
        halves = fields.permute(0, 1, 5, 8, 2, 3, 6, 7, 9, 4, 10).flatten(3)  # [E, S, hf, (i, w, g, G, u, h, row, b)]
        _write_records(halves, scale[part], out[part])
    return out


def unpack_fp8(packed: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 [E, bytes] -> e4m3 [E, n, k] and f32 [E, ceil(n/128), ceil(k/128)]. Raises LayoutError for another size."""
    halves, scale = _read_records(packed, n, k, mxfp4_storage=False)
    experts, strips, count = halves.shape[:3]
    fields = halves.reshape(experts, strips, count, 2, 4, 8, 2, 2, 2, 2, 4)
    plain = fields.permute(0, 1, 4, 5, 9, 2, 6, 7, 3, 8, 10).reshape(experts, strips * STRIP_ROWS, count * HALF)
    return plain[:, :n, :k].contiguous().view(fp8_block.E4M3), scale


def tiles_bytes(n: int, k: int) -> int:
    """Bytes of one expert's [n, k] in layout sm90_tiles_v1."""
    return -(-n // RECORD) * -(-k // RECORD) * TILE_BYTES


def pack_tiles(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3 [E, N, K] and f32 [E, ceil(N/128), ceil(K/128)] -> u8 [E, bytes] of layout sm90_tiles_v1, `out` if given."""
    experts, n, k = weight.shape
    if out is None:
        out = torch.empty(experts, tiles_bytes(n, k), dtype=torch.uint8, device=weight.device)
    tiles = out.view(experts, -(-n // RECORD), -(-k // RECORD), TILE_BYTES)
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, -k % RECORD, 0, -n % RECORD))
    chunks = padded.reshape(experts, tiles.shape[1], RECORD, tiles.shape[2], 8, 16).transpose(2, 3)
    codes = torch.gather(chunks, 4, _swizzle(weight.device).expand(chunks.shape))
    tiles[..., :_TILE_CODES] = codes.flatten(3)
    tiles[..., _TILE_CODES : _TILE_CODES + 4] = scale.unsqueeze(-1).contiguous().view(torch.uint8)
    tiles[..., _TILE_CODES + 4 :] = 0
    return out


def unpack_tiles(packed: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 [E, bytes] -> e4m3 [E, n, k] and f32 [E, ceil(n/128), ceil(k/128)]. Raises LayoutError for another size."""
    if packed.dtype != torch.uint8 or packed.shape[1:] != (tiles_bytes(n, k),):
        raise LayoutError(f"tiles are {packed.dtype} {tuple(packed.shape)}; [{n}, {k}] needs {tiles_bytes(n, k)} bytes")
    tiles = packed.view(len(packed), -(-n // RECORD), -(-k // RECORD), TILE_BYTES)
    chunks = tiles[..., :_TILE_CODES].reshape(*tiles.shape[:3], RECORD, 8, 16)
    codes = torch.gather(chunks, 4, _swizzle(packed.device).expand(chunks.shape))
    rows = codes.flatten(4).transpose(2, 3).reshape(len(packed), tiles.shape[1] * RECORD, tiles.shape[2] * RECORD)
    scale = tiles[..., _TILE_CODES : _TILE_CODES + 4].contiguous().view(torch.float32).squeeze(-1)
    return rows[:, :n, :k].contiguous().view(fp8_block.E4M3), scale


def _swizzle(device: torch.device) -> torch.Tensor:
    """Which chunk of 16 columns a row of a tile has at each place, and where each of its chunks is: [128, 8, 1]."""
    row, chunk = torch.arange(RECORD, device=device), torch.arange(8, device=device)
    return (row.unsqueeze(1) % 8 ^ chunk).unsqueeze(-1)


def _check_rows(n: int) -> None:
    if n < 2 or n % 2:
        raise LayoutError(f"an expert weight has {n} rows, not a positive even number")


def chunks(experts: int, weights: int) -> list[slice]:
    """Experts of so many weights each, in parts that are handled at once."""
    step = max(1, _CHUNK_WEIGHTS // max(1, weights))
    return [slice(first, first + step) for first in range(0, experts, step)]


def _per_group(per_block: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """[E, NB, KB] -> [E, n, groups of 32 columns]."""
    wide = per_block.repeat_interleave(fp8_block.BLOCK, dim=1)[:, :n]
    return wide.repeat_interleave(RECORD // mxfp4.GROUP, dim=2)[:, :, :groups]


def _fragment_fields(values: torch.Tensor) -> torch.Tensor:
    """u8 [E, N, K] -> [E, strip, warp 4, g 8, low/high row 2, half, G 2, u 2, instruction 2, h 2, b 4], zeros behind
    N and K."""
    experts, n, k = values.shape
    padded = torch.nn.functional.pad(values, (0, -k % HALF, 0, -n % STRIP_ROWS))
    return padded.reshape(experts, -1, 4, 8, 2, padded.shape[2] // HALF, 2, 2, 2, 2, 4)


def _round_codes(codes: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Codes of groups below the bottom shift become the codes, at the bottom shift, of the rounded values."""
    table = torch.arange(16, dtype=torch.uint8).repeat(8, 1)
    for below in range(1, 8):
        for code, doubled in enumerate(_DOUBLED):
            units = round(doubled / 2**below)  # of 2^-9; halves go to even
            table[below, code] = _DOUBLED.index(units)
            table[below, code + 8] = _DOUBLED.index(units) + 8
    deficit = (BOTTOM_SHIFT - shift).clamp(0, 7)
    if not bool((deficit > 0).any()):
        return codes
    index = deficit.unsqueeze(-1) * 16 + codes.to(torch.int32)
    return table.to(codes.device).reshape(-1)[index.long()]


def _encode_words(codes: torch.Tensor) -> torch.Tensor:
    """u8 codes [..., h 2, b 4] -> u8 [..., 4], the little-endian bytes of a word."""
    magnitudes = (codes & 7).flatten(-2)
    signs = codes >> 3
    return magnitudes[..., 0::2] | (signs[..., 1, :] << 3) | (magnitudes[..., 1::2] << 4) | (signs[..., 0, :] << 7)


def _decode_words(words: torch.Tensor) -> torch.Tensor:
    """u8 [..., 4] -> u8 codes [..., h 2, b 4]."""
    magnitudes = torch.stack((words & 7, (words >> 4) & 7), dim=-1).reshape(*words.shape[:-1], 2, 4)
    signs = torch.stack((words >> 7, (words >> 3) & 1), dim=-2)
    return magnitudes | (signs << 3)


def _write_records(halves: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """u8 [E, S, half, bytes] and f32 [E, NB, KB] -> out u8 [E, S * strip bytes]."""
    experts, strips, count, size = halves.shape
    view = out.view(experts, strips, -1)
    headers = scale.repeat_interleave(2, dim=1)[:, :strips].contiguous().unsqueeze(-1).view(torch.uint8)
    record = HEADER_BYTES + 2 * size
    full = count // 2
    if full:
        whole = view.as_strided((experts, strips, full, record), (*view.stride()[:2], record, 1), view.storage_offset())
        whole[..., :4] = headers[:, :, :full]
        whole[..., HEADER_BYTES:] = halves[:, :, : 2 * full].reshape(experts, strips, full, 2 * size)
    if count % 2:
        tail = view[:, :, full * record : full * record + HEADER_BYTES + size]
        tail[..., :4] = headers[:, :, full]
        tail[..., HEADER_BYTES:] = halves[:, :, -1]


def _read_records(packed: torch.Tensor, n: int, k: int, *, mxfp4_storage: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 [E, bytes] -> u8 [E, S, half, bytes] and f32 [E, NB, KB]."""
    expected = expert_bytes(n, k, mxfp4_storage)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != expected:
        raise LayoutError(f"packed weights are {packed.dtype} {tuple(packed.shape)}; [{n}, {k}] needs {expected} bytes")
    experts, size, count = packed.shape[0], half_bytes(mxfp4_storage), -(-k // HALF)
    view = packed.view(experts, -(-n // STRIP_ROWS), -1)
    record, full = HEADER_BYTES + 2 * size, count // 2
    starts = [i * record for i in range(-(-count // 2))]
    halves = [
        view[:, :, i // 2 * record + HEADER_BYTES + i % 2 * size :][:, :, :size] for i in range(2 * full + count % 2)
    ]
    headers = torch.stack([view[:, ::2, at : at + 4] for at in starts], dim=2).contiguous()
    return torch.stack(halves, dim=2), headers.view(torch.float32).squeeze(-1)
