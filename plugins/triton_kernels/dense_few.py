"""dense and dense_fp8 for few tokens: a weight is read once, at the memory's speed, whatever the number of tokens.

Invariant: one program holds all of K for its rows; its warps take turns along K, each adds up its part on the tensor
cores, and the parts are added in one order. So a token's result depends on nothing but its row of x: the same bits come
out alone and among up to MOST_TOKENS. The weights of a program are requested into the L2 cache ahead of the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, prefetch, release, wait
from gptoss_trt.triton_kernels.numerics import dot

MOST_TOKENS = 16  # a tile of the tensor cores; more tokens cost more there, and cuBLAS reads well by then
FP8_STEP = 128  # columns that share a scale


@dataclass(frozen=True)
class Tile:
    """`rows` of the weight a program, `step` columns a turn for each of `warps`, `stages` turns under way."""

    rows: int = 16
    warps: int = 4
    step: int = 64
    stages: int = 4
    prefetch: bool = True


BF16_TILE = Tile()
FP8_TILE = Tile(step=FP8_STEP)


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    tokens,
    rows,
    K: tl.constexpr,
    TILE_T: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    if PREFETCH > 0:
        prefetch(weight + first * K, tl.minimum(rows - first, ROWS) * (2 * K), PREFETCH)
    release()
    wait()
    row = first + tl.arange(0, ROWS)
    token = tl.arange(0, TILE_T).to(tl.int64)
    acc = tl.zeros((WARPS, ROWS, TILE_T), tl.float32)
    for start in tl.range(0, K, WARPS * STEP, num_stages=STAGES):
        column = start + (tl.arange(0, WARPS) * STEP)[:, None] + tl.arange(0, STEP)[None, :]
        a = tl.load(
            weight + row[None, :, None] * K + column[:, None, :],
            mask=(row < rows)[None, :, None] & (column < K)[:, None, :],
            other=0.0,
        )
        b = tl.load(
            x + token[None, None, :] * K + column[:, :, None],
            mask=(token < tokens)[None, None, :] & (column < K)[:, :, None],
            other=0.0,
        )
        acc = dot(a, b, acc)
    _store(acc, bias, out, row, token, tokens, rows, BIAS)


@triton.jit
def _store(acc, bias, out, row, token, tokens, rows, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The warps' parts [WARPS, ROWS, TILE_T] added up, with the bias, rounded once."""
    total = tl.sum(acc, axis=0)
    if BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + token[None, :] * rows + row[:, None],
        total.to(out.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < rows)[:, None],
    )


@triton.jit
def row_of_scales(row, S0: tl.constexpr, S1: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of scales of weight row `row`: each segment (S0 rows, S1 rows, the rest) begins a new one."""
    c0: tl.constexpr = (S0 + 127) // 128
    c1: tl.constexpr = c0 + (S1 + 127) // 128
    behind = row - S0
    return tl.where(
        row < S0, row // 128, tl.where(behind < S1, c0 + behind // 128, c1 + (behind - S1) // 128)
    )  # fmt: skip


@triton.jit
def _product_fp8_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tokens,
    rows,
    K: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    TILE_T: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """A warp's turn is one block of 128 columns: its product is promoted with the block's scales."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    if PREFETCH > 0:
        prefetch(weight + first * K, tl.minimum(rows - first, ROWS) * K, PREFETCH)
    release()
    wait()
    BLOCKS: tl.constexpr = (K + STEP - 1) // STEP
    row = first + tl.arange(0, ROWS)
    token = tl.arange(0, TILE_T).to(tl.int64)
    scales = weight_scale + row_of_scales(row, S0, S1) * BLOCKS
    acc = tl.zeros((WARPS, ROWS, TILE_T), tl.float32)
    for start in tl.range(0, BLOCKS, WARPS, num_stages=STAGES):
        block = start + tl.arange(0, WARPS)
        column = (block * STEP)[:, None] + tl.arange(0, STEP)[None, :]
        a = tl.load(
            weight + row[None, :, None] * K + column[:, None, :],
            mask=(row < rows)[None, :, None] & (column < K)[:, None, :],
            other=0.0,
        )
        b = tl.load(
            x + token[None, None, :] * K + column[:, :, None],
            mask=(token < tokens)[None, None, :] & (column < K)[:, :, None],
            other=0.0,
        )
        there = (block < BLOCKS)[:, None]
        unit = tl.load(scales[None, :] + block[:, None], mask=(row < rows)[None, :] & there, other=0.0)
        scale = tl.load(
            x_scale + block[:, None] * tokens + token[None, :], mask=(token < tokens)[None, :] & there, other=0.0
        )
        part = dot(a, b, tl.zeros((WARPS, ROWS, TILE_T), tl.float32))
        acc += part * (unit[:, :, None] * scale[:, None, :])
    _store(acc, bias, out, row, token, tokens, rows, BIAS)


def dense_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile = BF16_TILE
) -> None:
    """The op `dense` for 1 to MOST_TOKENS tokens."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    _product_kernel[(triton.cdiv(rows, tile.rows),)](
        x, weight, bias, out, tokens, rows, K=columns, TILE_T=_tile_tokens(tokens), BIAS=bias is not None,
        **_options(tile, 2 * columns),
    )  # fmt: skip


def dense_fp8_few(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: tuple[int, int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile = FP8_TILE,
) -> None:
    """The op `dense_fp8` for 1 to MOST_TOKENS tokens; `segments` are the rows of the first two."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    _product_fp8_kernel[(triton.cdiv(rows, tile.rows),)](
        x, x_scale, weight, weight_scale, bias, out, tokens, rows, K=columns, S0=segments[0], S1=segments[1],
        TILE_T=_tile_tokens(tokens), BIAS=bias is not None, **_options(tile, columns),
    )  # fmt: skip


def _tile_tokens(tokens: int) -> int:
    return 8 if tokens <= 8 else MOST_TOKENS


def _options(tile: Tile, row_bytes: int) -> dict[str, int | bool]:
    ahead = tile.rows * row_bytes if tile.prefetch else 0
    return {
        "ROWS": tile.rows, "WARPS": tile.warps, "STEP": tile.step, "STAGES": tile.stages, "PREFETCH": ahead,
        "num_warps": tile.warps, **DEPENDENT,
    }  # fmt: skip
