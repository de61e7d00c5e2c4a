"""dense and dense_fp8 on libgptoss_trt.so: few tokens of both, any number of FP8, with rotation and append behind it
where q, k and v are made; the rest goes to cuBLAS and Triton.

Invariant: which of them runs depends on shapes and the plan (plan.py) alone, so a captured graph fixes it. For one
choice a token's result does not depend on the others; another number of tokens may have another choice, which rounds
otherwise. Must not know layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from gptoss_trt.ops import library, plan
from gptoss_trt.ops.library import DenseFewArgs, DenseFormat, DenseFp8Args, OutDtype
from gptoss_trt.triton_kernels import dense as triton_dense
from gptoss_trt.triton_kernels.rope_kv_append import rope_kv_append

# The built-in rule, where no plan names the shape.
# Measured on an H200: at 16 tokens cuBLAS takes 10.2 us for qkv and the kernel 13.3; in FP8 tiles take 7.4 to 7.7 us at
# 1 to 16 tokens and the kernel 7.4, 9.0 and 11.3 at 1, 8 and 16.
MOST_TOKENS = {DenseFormat.BF16: 8, DenseFormat.FP8: 4}
LIBRARY_TOKENS = 16  # the most that dense_few takes
MOST_COLUMNS = 4096
COLUMNS = {DenseFormat.BF16: 32, DenseFormat.FP8: 64}  # K is a multiple of them
MOST_ROWS = 1 << 14  # the lm head has more: its blocks of threads follow each other too slowly here (FP8: tiles 151 us)
SEGMENT_ROWS = 8
HEAD_DIM = 64  # that the library's dense_fp8 rotates
ADDING_TILES = (0, 128, 256)  # tokens of a tile, 0 left to the library
LEAST_ADDING = 512  # tokens: of fewer the library would cut K
TILE_COLUMNS = 16  # dense_fp8 of the library: K is a multiple of them
_OUT_DTYPES = {torch.bfloat16: OutDtype.BF16, torch.float32: OutDtype.FP32}
_OPS = {DenseFormat.BF16: "dense", DenseFormat.FP8: "dense_fp8"}  # of a plan


@dataclass(frozen=True)
class Tiles:
    """How the library's dense_fp8 cuts a product; 0 leaves it to the library. See gptoss_trt_dense_fp8_args."""

    tokens: int = 0
    parts: int = 0


CHOSEN = Tiles()


def takes(dense_format: DenseFormat, x: torch.Tensor, weight: torch.Tensor, segments: list[int]) -> bool:
    """Whether the product of x [T, K] and weight [N, K] goes to the library's kernel for few tokens."""
    tokens, columns = x.shape
    fits = (
        0 < tokens <= LIBRARY_TOKENS
        and columns <= MOST_COLUMNS
        and columns % COLUMNS[dense_format] == 0
        and all(rows % SEGMENT_ROWS == 0 for rows in segments[:2])
    )
    if not fits:
        return False
    choices = plan.choices(_OPS[dense_format], (len(weight), columns))
    if choices is not None:
        return choices.at(tokens) == "few"
    return tokens <= MOST_TOKENS[dense_format] and len(weight) <= MOST_ROWS


def tiles_for(tokens: int, rows: int, columns: int) -> Tiles:
    """How dense_fp8 cuts a product of x [tokens, columns] and weight [rows, columns] that tiles take."""
    choices = plan.choices("dense_fp8", (rows, columns))
    return CHOSEN if choices is None else _tiles_of(choices.at(tokens))


@functools.cache
def _tiles_of(choice: str) -> Tiles:
    if "/" not in choice:  # the library's own; `few` of a call that dense_few does not take
        return CHOSEN
    tokens, parts = choice.split("/")
    return Tiles(int(tokens), int(parts))


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. Raises LibraryError when the call fails."""
    if takes(DenseFormat.BF16, x, weight, []):
        _launch(DenseFormat.BF16, x, None, weight, None, [], bias, out)
    else:
        triton_dense.dense(x, weight, bias, out)


def dense_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Runs on the current stream. Raises LibraryError when the call fails."""
    if len(segments) > triton_dense.MAX_SEGMENTS or not takes_tiles(x, weight, segments):
        triton_dense.dense_fp8(x, x_scale, weight, weight_scale, segments, bias, out)
    elif takes(DenseFormat.FP8, x, weight, segments):
        _launch(DenseFormat.FP8, x, x_scale, weight, weight_scale, segments, bias, out)
    else:
        tiles = tiles_for(x.shape[0], *weight.shape)
        dense_fp8_tiles(x, x_scale, weight, weight_scale, segments, bias, out, tiles)


def dense_fp8_add(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    residual: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py: one kernel where the library's tiles keep K whole. Runs on the current
    stream. Raises LibraryError when a call fails."""
    tiles = tiles_for(len(x), *weight.shape)
    if takes_addition(x, weight, segments, tiles):
        dense_fp8_tiles(x, x_scale, weight, weight_scale, segments, bias, residual, tiles, adds=True)
    else:
        delta = torch.empty_like(residual)
        dense_fp8(x, x_scale, weight, weight_scale, segments, bias, delta)
        residual.add_(delta)


def takes_addition(x: torch.Tensor, weight: torch.Tensor, segments: list[int], tiles: Tiles) -> bool:
    """Whether `dense_fp8_tiles`, cut as `tiles` says, can end with the addition of dense_fp8_add."""
    whole = tiles.tokens in ADDING_TILES and tiles.parts <= 1
    fits = len(segments) <= triton_dense.MAX_SEGMENTS and takes_tiles(x, weight, segments)
    return len(x) >= LEAST_ADDING and whole and fits


def takes_rotation(weight: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether `dense_fp8_tiles` can end with rotation and append: heads of 64 columns, a bf16 cache."""
    block_tokens = k_cache.shape[2]
    whole = block_tokens & (block_tokens - 1) == 0
    return k_cache.dtype == torch.bfloat16 and q.shape[2] == HEAD_DIM and whole and weight.shape[1] % TILE_COLUMNS == 0


def dense_fp8_rope_kv_append(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py: one kernel where tiles take the product, else two and the q, k and v
    between them. Runs on the current stream. Raises LibraryError when a call fails."""
    if takes_rotation(weight, q, k_cache) and not takes(DenseFormat.FP8, x, weight, segments):
        args = _tiles_arguments(x, x_scale, weight, weight_scale, segments, bias, q, tiles_for(len(x), *weight.shape))
        args.kv_heads, args.block_tokens = k_cache.shape[1], k_cache.shape[2]
        args.positions, args.slots, args.cos_sin = positions.data_ptr(), slots.data_ptr(), cos_sin.data_ptr()
        args.k_cache, args.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        _launch_tiles(args, x.device)
        return
    qkv = torch.empty((len(x), len(weight)), dtype=torch.bfloat16, device=x.device)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, qkv)
    rope_kv_append(qkv, positions, cos_sin, slots, k_scale, v_scale, q, k_cache, v_cache)


def takes_tiles(x: torch.Tensor, weight: torch.Tensor, segments: list[int]) -> bool:
    """Whether `dense_fp8_tiles` takes the product of x [T, K] and weight [N, K]."""
    return x.shape[1] % TILE_COLUMNS == 0 and all(rows % SEGMENT_ROWS == 0 for rows in [*segments, len(weight)])


def dense_fp8_tiles(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    adds: bool = False,
) -> None:
    """dense_fp8 on tensor cores, cut as `tiles` says; with `adds` dense_fp8_add of what is in `out`, by tiles of 128 or
    256 tokens with K whole. Runs on the current stream. Raises LibraryError when the call fails."""
    args = _tiles_arguments(x, x_scale, weight, weight_scale, segments, bias, out, tiles)
    args.flags |= library.DENSE_ADDS if adds else 0
    _launch_tiles(args, x.device)


def _tiles_arguments(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
) -> DenseFp8Args:
    first = _two_segments(segments, len(weight))
    return DenseFp8Args(
        flags=library.DEPENDENT_LAUNCH,
        out_dtype=_OUT_DTYPES[out.dtype],
        tokens=x.shape[0],
        n=weight.shape[0],
        k=x.shape[1],
        first_segment=first[0],
        second_segment=first[1],
        tile_tokens=tiles.tokens,
        parts=tiles.parts,
        x=x.data_ptr(),
        x_scale=x_scale.data_ptr(),
        weight=weight.data_ptr(),
        weight_scale=weight_scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )


def _launch_tiles(args: DenseFp8Args, device: torch.device) -> None:
    if not args.tokens:
        return
    with torch.cuda.device(device):
        library.load().dense_fp8(args, torch.cuda.current_stream(device).cuda_stream)


def _two_segments(segments: list[int], rows: int) -> list[int]:
    """Rows of the first two segments, as the library wants them."""
    return [*segments, 0, 0][:2] if segments else [rows, 0]


def _launch(
    dense_format: DenseFormat,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    first = _two_segments(segments, len(weight))
    args = DenseFewArgs(
        flags=library.DEPENDENT_LAUNCH,
        format=dense_format,
        out_dtype=_OUT_DTYPES[out.dtype],
        tokens=x.shape[0],
        n=weight.shape[0],
        k=x.shape[1],
        first_segment=first[0],
        second_segment=first[1],
        x=x.data_ptr(),
        x_scale=None if x_scale is None else x_scale.data_ptr(),
        weight=weight.data_ptr(),
        weight_scale=None if weight_scale is None else weight_scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )
    with torch.cuda.device(x.device):
        library.load().dense_few(args, torch.cuda.current_stream(x.device).cuda_stream)
