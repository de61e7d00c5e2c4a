"""dense and dense_fp8 for few tokens: a weight is read once, at the memory's speed, whatever the number of tokens.

Invariant: one program holds all of K for its rows; its warps take turns along K, each adds up its part on the tensor
cores, and the parts are added in one order. So a token's result depends on nothing but its row of x: the same bits come
out alone and among up to MOST_TOKENS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
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

    def options(self, tokens: int) -> dict[str, int | bool]:
        """What a kernel is launched with."""
        return {
            "ROWS": self.rows, "WARPS": self.warps, "STEP": self.step, "STAGES": self.stages,
            "TILE_T": 8 if tokens <= 8 else MOST_TOKENS, "num_warps": self.warps, **DEPENDENT,
        }  # fmt: skip


BF16_TILE = Tile()
FP8_TILE = Tile(step=FP8_STEP)


@triton.jit
def sum_bf16(  # type: ignore[no-untyped-def]
    x,
    weight,
    row,
    rows,
    token,
    tokens,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 [ROWS, TILE_T]: weight rows `row` [ROWS] times x rows `token` [TILE_T]."""
    acc = tl.zeros((WARPS, row.shape[0], token.shape[0]), tl.float32)
    for start in tl.range(0, K, WARPS * STEP, num_stages=STAGES):
        column = start + (tl.arange(0, WARPS) * STEP)[:, None] + tl.arange(0, STEP)[None, :]
        a, b = _tiles(x, weight, row, rows, token, tokens, column, K)
        acc = dot(a, b, acc)
    return tl.sum(acc, axis=0)


@triton.jit
def sum_fp8(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    weight,
    scales,
    row,
    rows,
    token,
    tokens,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """sum_bf16 of e4m3 operands; `scales` [ROWS] points to each row's scales. A warp's turn is one block of STEP = 128
    columns: its product is promoted with the block's scales."""
    BLOCKS: tl.constexpr = (K + STEP - 1) // STEP
    acc = tl.zeros((WARPS, row.shape[0], token.shape[0]), tl.float32)
    for start in tl.range(0, BLOCKS, WARPS, num_stages=STAGES):
        block = start + tl.arange(0, WARPS)
        a, b = _tiles(
            x, weight, row, rows, token, tokens, (block * STEP)[:, None] + tl.arange(0, STEP)[None, :], K
        )  # fmt: skip
        there = (block < BLOCKS)[:, None]
        unit = tl.load(scales[None, :] + block[:, None], mask=(row < rows)[None, :] & there, other=0.0)
        scale = tl.load(
            x_scale + block[:, None] * tokens + token[None, :], mask=(token < tokens)[None, :] & there, other=0.0
        )
        acc += dot(a, b, tl.zeros_like(acc)) * (unit[:, :, None] * scale[:, None, :])
    return tl.sum(acc, axis=0)


@triton.jit
def _tiles(x, weight, row, rows, token, tokens, column, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of columns `column` [WARPS, STEP]: weights [WARPS, ROWS, STEP] and x [WARPS, STEP, TILE_T], zeros outside."""
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
    return a, b


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
def _few_kernel(  # type: ignore[no-untyped-def]
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
    FP8: tl.constexpr,
    TILE_T: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows of out^T; bf16 operands, or e4m3 ones with their scales when FP8."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    release()
    wait()
    row = first + tl.arange(0, ROWS)
    token = tl.arange(0, TILE_T).to(tl.int64)
    if FP8:
        scales = weight_scale + row_of_scales(row, S0, S1) * ((K + STEP - 1) // STEP)
        total = sum_fp8(x, x_scale, weight, scales, row, rows, token, tokens, K, WARPS, STEP, STAGES)
    else:
        total = sum_bf16(x, weight, row, rows, token, tokens, K, WARPS, STEP, STAGES)
    if BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + token[None, :] * rows + row[:, None],
        total.to(out.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < rows)[:, None],
    )


def dense_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile = BF16_TILE
) -> None:
    """The op `dense` for 1 to MOST_TOKENS tokens."""
    _launch(x, None, weight, None, (0, 0), bias, out, tile)


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
    _launch(x, x_scale, weight, weight_scale, segments, bias, out, tile)


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    segments: tuple[int, int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    (tokens, columns), rows = x.shape, weight.shape[0]
    _few_kernel[(triton.cdiv(rows, tile.rows),)](
        x, x_scale, weight, weight_scale, bias, out, tokens, rows, K=columns, S0=segments[0], S1=segments[1],
        FP8=x_scale is not None, BIAS=bias is not None, **tile.options(tokens),
    )  # fmt: skip
