"""dense and dense_fp8 whose results do not depend on the number of tokens: one tile for all of them.

Invariant: a token's sums take K in one order, in instructions of one shape, whatever stands beside it and however many
tokens there are. A decode step multiplies mostly padding for that; the weights still pass once for 64 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dense_few import row_of_scales
from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import dot, to_bf16
from gptoss_trt.triton_kernels.weight_tile import fp8_tile

TILE_TOKENS = 64
TILE_ROWS = 128  # of a weight, as fp8_tile has them
BF16_STEP = 64  # columns of K that are multiplied at once
FP8_STEP = 128  # columns that share a scale


@triton.jit
def _dense_kernel(  # type: ignore[no-untyped-def]
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
    ROWS: tl.constexpr,
    TILE_T: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
    BIAS: tl.constexpr,
):
    """ROWS x TILE_T of out^T; bf16 operands, or e4m3 ones with their scales when FP8."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    valid = token < tokens
    release()
    wait()
    blocks: tl.constexpr = (K + STEP - 1) // STEP
    scale_row = row_of_scales(row, S0, S1)
    acc = tl.zeros((ROWS, TILE_T), tl.float32)
    for block in range(blocks):
        column = block * STEP + tl.arange(0, STEP)
        values = tl.load(
            x + token.to(tl.int64)[None, :] * K + column[:, None],
            mask=valid[None, :] & (column < K)[:, None],
            other=0.0,
        )
        codes = fp8_tile(weight, row, rows, block * STEP, K, STEP)  # any format: a tile of the matrix
        if FP8:
            part = dot(codes, values, tl.zeros((ROWS, TILE_T), tl.float32))
            unit = tl.load(weight_scale + scale_row * blocks + block, mask=row < rows, other=0.0)
            acc += part * (unit[:, None] * tl.load(x_scale + block * tokens + token, mask=valid, other=0.0)[None, :])
        else:
            acc = dot(codes, values, acc)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[None, :] * rows + row[:, None]
    inside = valid[None, :] & (row < rows)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(target, to_bf16(acc), mask=inside)
    else:
        tl.store(target, acc, mask=inside)


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The op of that name; see ops/schemas.py."""
    _launch(x, None, weight, None, [], bias, out, BF16_STEP)


def dense_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Raises ValueError for more than three segments."""
    if len(segments) > 3:
        raise ValueError(f"dense_fp8 takes at most 3 segments, not {len(segments)}: {segments}")
    _launch(x, x_scale, weight, weight_scale, segments, bias, out, FP8_STEP)


def dense_fp8_add(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    segments: list[int],
    bias: torch.Tensor | None,
    residual: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py. Raises as dense_fp8."""
    delta = torch.empty_like(residual)
    dense_fp8(x, x_scale, weight, weight_scale, segments, bias, delta)
    residual.add_(delta)


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    segments: list[int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    step: int,
) -> None:
    (tokens, columns), rows = x.shape, weight.shape[0]
    if tokens == 0:
        return
    first = [*segments, rows, 0][:2] if segments else [rows, 0]
    _dense_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(tokens, TILE_TOKENS))](
        x, x_scale, weight, weight_scale, bias, out, tokens, rows,
        K=columns, S0=first[0], S1=first[1], ROWS=TILE_ROWS, TILE_T=TILE_TOKENS, STEP=step,
        FP8=x_scale is not None, BIAS=bias is not None, num_warps=4, **DEPENDENT,
    )  # fmt: skip
