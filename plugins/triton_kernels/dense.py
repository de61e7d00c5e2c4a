"""embedding, dense and dense_fp8: rows of a table, and products with a bias that is added once before the one rounding.

Invariant: fp32 accumulation. The bf16 product is cuBLAS's through torch (out and bias in one call), the FP8 128x128 one
a kernel of ours with weights as the M operand, as in moe_gemm_fp8. For few tokens the lm head and the FP8 products are
dense_few's, which adds in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.dense_few import MOST_TOKENS, dense_few, dense_fp8_few, row_of_scales
from gptoss_trt.triton_kernels.dependent import DEPENDENT, release, wait
from gptoss_trt.triton_kernels.numerics import dot
from gptoss_trt.triton_kernels.weight_tile import fp8_tile

MIN_TOKENS = 16
MAX_TOKENS = 64
MAX_SEGMENTS = 3  # q, k and v
# dense_few reads the lm head at 4.55 TB/s at one token and 4.32 at 8, cuBLAS at 4.35 and 4.25; cuBLAS is ahead on less.
LEAST_LM_HEAD_WEIGHTS = 1 << 28
MOST_LM_HEAD_TOKENS = 8


@triton.jit
def _embedding_kernel(  # type: ignore[no-untyped-def]
    token_ids, weight, out, first_row, rows, H: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = (tl.load(token_ids + token) - first_row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bound = tl.where((row >= 0) & (row < rows), H, 0)
    value = tl.load(weight + row * H + column, mask=column < bound, other=0.0)
    tl.store(out + token * H + column, value, mask=column < H)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, first_row: int, out: torch.Tensor) -> None:
    """The op of that name; see ops/schemas.py."""
    tokens, hidden = out.shape
    if tokens:
        _embedding_kernel[(tokens, triton.cdiv(hidden, 1024))](
            token_ids, weight, out, first_row, weight.shape[0], H=hidden, BLOCK=1024, num_warps=4
        )


def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The op of that name; see ops/schemas.py. cuBLAS accumulates in fp32 and rounds once, the bias included."""
    if 0 < len(x) <= MOST_LM_HEAD_TOKENS and weight.numel() >= LEAST_LM_HEAD_WEIGHTS:
        dense_few(x, weight, bias, out)
    elif out.dtype == torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


@triton.jit
def _dense_fp8_kernel(  # type: ignore[no-untyped-def]
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
):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    token = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    valid = token < tokens
    release()
    wait()
    blocks: tl.constexpr = (K + 127) // 128
    scale_row = row_of_scales(row, S0, S1)
    acc = tl.zeros((128, TILE_T), tl.float32)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    for block in range(blocks):
        codes = fp8_tile(weight, row, rows, block * 128, K, 128)
        column = block * 128 + tl.arange(0, 128)
        values = tl.load(
            x + token.to(tl.int64)[None, :] * K + column[:, None],
            mask=valid[None, :] & (column < K)[:, None],
            other=0.0,
        )
        part = dot(codes, values, tl.zeros((128, TILE_T), tl.float32))
        unit = tl.load(weight_scale + scale_row * blocks + block, mask=row < rows, other=0.0)
        acc += part * (unit[:, None] * tl.load(x_scale + block * tokens + token, mask=valid, other=0.0)[None, :])
    tl.store(
        out + token.to(tl.int64)[None, :] * rows + row[:, None],
        acc.to(out.dtype.element_ty),
        mask=valid[None, :] & (row < rows)[:, None],
    )


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
    if len(segments) > MAX_SEGMENTS:
        raise ValueError(f"dense_fp8 takes at most {MAX_SEGMENTS} segments, not {len(segments)}: {segments}")
    (tokens, channels), rows = x.shape, weight.shape[0]
    if tokens == 0:
        return
    first = [*segments, rows, 0][:2] if segments else [rows, 0]
    if tokens <= MOST_TOKENS:
        dense_fp8_few(x, x_scale, weight, weight_scale, (first[0], first[1]), bias, out)
        return
    tile = min(max(triton.next_power_of_2(tokens), MIN_TOKENS), MAX_TOKENS)
    _dense_fp8_kernel[(triton.cdiv(rows, 128), triton.cdiv(tokens, tile))](
        x, x_scale, weight, weight_scale, bias, out, tokens, rows,
        K=channels, S0=first[0], S1=first[1], TILE_T=tile, BIAS=bias is not None, num_warps=4, **DEPENDENT,
    )  # fmt: skip


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
