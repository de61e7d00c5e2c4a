"""moe_gate_up and moe_down: grouped FP8 128x128 products over sorted rows, weights as the M operand.

Invariant: fp32 promotion every 128 of K (every 64 under h_group 64) with weight scale x activation scale; the bias
starts the promoted accumulator; no tile reads another expert's rows. Right for any shape in layout `plain`; the CUDA
library has the fast path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gptoss_trt.triton_kernels.numerics import STATIC_SCALE, dot, group_scale, saturate_e4m3
from gptoss_trt.triton_kernels.weight_tile import block_exponent, fp8_tile, mxfp4_tile, power_of_two

LAYOUT = "plain"
MIN_TOKENS = 16  # columns of the smallest tl.dot
MAX_TOKENS = 64


@triton.jit
def _own_tile(offsets, tile, experts, E: tl.constexpr, TILE_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first row, end of the expert's rows) of tile number `tile`; expert = experts behind the last tile."""
    index = tl.arange(0, E)
    begin = tl.load(offsets + index, mask=index < experts, other=0)
    end = tl.load(offsets + index + 1, mask=index < experts, other=0)
    tiles = (end - begin + TILE_T - 1) // TILE_T
    passed = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((passed <= tile) & (index < experts)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    row = tl.sum(tl.where(index == expert, begin, 0), axis=0) + (tile - before) * TILE_T
    return expert, row, tl.sum(tl.where(index == expert, end, 0), axis=0)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    weight,
    weight_scale,
    bias,
    row,
    rows,
    x,
    source,
    valid,
    x_scale,
    scale_stride,
    K: tl.constexpr,
    TILE_T: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
):
    """fp32 [128, TILE_T]: bias[row] + sum over K of weight[row] . x[source]; x_scale at [group, source]."""
    acc = tl.zeros((128, TILE_T), tl.float32)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    first = tl.min(row, axis=0)
    for block in range(tl.cdiv(K, 128)):
        if MXFP4:
            exponent = block_exponent(weight, weight_scale, row, rows, block, K)
            unit = power_of_two(exponent)
        else:
            unit = tl.load(weight_scale + (first // 128) * tl.cdiv(K, 128) + block)
        for part in tl.static_range(128 // STEP):
            start = block * 128 + part * STEP
            if MXFP4:
                codes = mxfp4_tile(weight, weight_scale, row, rows, start, exponent, K, STEP)
            else:
                codes = fp8_tile(weight, row, rows, start, K, STEP)
            column = start + tl.arange(0, STEP)
            values = tl.load(
                x + source.to(tl.int64)[None, :] * K + column[:, None],
                mask=valid[None, :] & (column < K)[:, None], other=0.0,
            )  # fmt: skip
            part_sum = dot(codes, values, tl.zeros((128, TILE_T), tl.float32))
            if GROUP == 0:
                acc += part_sum * (unit * STATIC_SCALE)
            else:
                # Behind K the values are zeros, but the scale's row must be one that exists.
                group = tl.minimum(start, K - 1) // GROUP
                token_scale = tl.load(x_scale + group * scale_stride + source, mask=valid, other=0.0)
                acc += part_sum * (unit * token_scale)[None, :]
    return acc


@triton.jit
def _swiglu(y, limit, alpha, TILE_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [64, TILE_T] of interleaved rows [128, TILE_T]."""
    gate, up = tl.split(tl.permute(tl.reshape(y, (64, 2, TILE_T)), (0, 2, 1)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * (1.0 / (1.0 + tl.exp(-alpha * gate))) * (up + 1.0)


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    offsets,
    row_slots,
    h,
    h_scale,
    tokens,
    total_rows,
    experts,
    limit,
    alpha,
    weight_stride,
    scale_stride,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_T: tl.constexpr,
    H_GROUP: tl.constexpr,
    MXFP4: tl.constexpr,
):
    """128 intermediates (256 interleaved rows) of one tile of sorted rows."""
    expert, first, end = _own_tile(offsets, tl.program_id(1), experts, E, TILE_T)
    if expert >= experts:
        return
    sorted_row = first + tl.arange(0, TILE_T)
    valid = sorted_row < end
    token = tl.load(row_slots + sorted_row, mask=valid, other=0) // TOP_K
    base = tl.program_id(0) * 256
    w = weight + expert.to(tl.int64) * weight_stride
    ws = weight_scale + expert.to(tl.int64) * scale_stride
    b = bias + expert * (2 * I)
    upper = base + tl.arange(0, 128)
    y = _product(w, ws, b, upper, 2 * I, x, token, valid, x_scale, tokens, H, TILE_T, 128, 128, MXFP4, True)
    a0 = _swiglu(y, limit, alpha, TILE_T)
    y = _product(w, ws, b, upper + 128, 2 * I, x, token, valid, x_scale, tokens, H, TILE_T, 128, 128, MXFP4, True)
    a1 = _swiglu(y, limit, alpha, TILE_T)
    i0 = tl.program_id(0) * 128 + tl.arange(0, 64)
    a0 = tl.where((i0 < I)[:, None], a0, 0.0)
    a1 = tl.where((i0 + 64 < I)[:, None], a1, 0.0)
    m0 = tl.max(tl.abs(a0), axis=0)
    m1 = tl.max(tl.abs(a1), axis=0)
    if H_GROUP == 0:
        s0 = tl.zeros_like(m0) + STATIC_SCALE
        s1 = s0
    elif H_GROUP == 64:
        s0 = group_scale(m0)
        s1 = group_scale(m1)
        line = h_scale + tl.program_id(0) * 2 * total_rows + sorted_row
        tl.store(line, s0, mask=valid)
        second_end = tl.where(tl.program_id(0) * 128 + 64 < I, end, 0)
        tl.store(line + total_rows, s1, mask=sorted_row < second_end)
    else:
        s0 = group_scale(tl.maximum(m0, m1))
        s1 = s0
        tl.store(h_scale + tl.program_id(0) * total_rows + sorted_row, s0, mask=valid)
    q0 = saturate_e4m3(tl.div_rn(a0, tl.broadcast_to(s0[None, :], (64, TILE_T))))
    q1 = saturate_e4m3(tl.div_rn(a1, tl.broadcast_to(s1[None, :], (64, TILE_T))))
    place = h + sorted_row.to(tl.int64)[None, :] * I + i0[:, None]
    tl.store(place, q0, mask=valid[None, :] & (i0 < I)[:, None])
    tl.store(place + 64, q1, mask=valid[None, :] & (i0 + 64 < I)[:, None])


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    h,
    h_scale,
    weight,
    weight_scale,
    bias,
    expert_weights,
    offsets,
    row_slots,
    out,
    total_rows,
    experts,
    weight_stride,
    scale_stride,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    TILE_T: tl.constexpr,
    H_GROUP: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
):
    """128 output channels of one tile of sorted rows, written to (token, slot)."""
    expert, first, end = _own_tile(offsets, tl.program_id(1), experts, E, TILE_T)
    if expert >= experts:
        return
    sorted_row = first + tl.arange(0, TILE_T)
    valid = sorted_row < end
    channel = tl.program_id(0) * 128 + tl.arange(0, 128)
    STEP: tl.constexpr = 64 if H_GROUP == 64 else 128
    y = _product(
        weight + expert.to(tl.int64) * weight_stride, weight_scale + expert.to(tl.int64) * scale_stride,
        bias + expert * H if BIAS else bias, channel, H, h, sorted_row, valid, h_scale, total_rows,
        I, TILE_T, STEP, H_GROUP, MXFP4, BIAS,
    )  # fmt: skip
    slot = tl.load(row_slots + sorted_row, mask=valid, other=0).to(tl.int64)
    y *= tl.load(expert_weights + slot, mask=valid, other=0.0)[None, :]
    tl.store(
        out + slot[None, :] * H + channel[:, None],
        y.to(out.dtype.element_ty),
        mask=valid[None, :] & (channel < H)[:, None],
    )


def _tiling(rows: int, experts: int) -> tuple[int, int]:
    """(rows of a tile, upper bound of the number of tiles) for `rows` sorted rows over `experts` experts."""
    tile = min(max(triton.next_power_of_2(triton.cdiv(rows, experts)), MIN_TOKENS), MAX_TOKENS)
    return tile, rows // tile + min(experts, rows)


def _check_layout(layout: str) -> None:
    if layout != LAYOUT:
        raise ValueError(f"the Triton expert products read weight_layout {LAYOUT!r}, not {layout!r}")


def moe_gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor,
    expert_offsets: torch.Tensor,
    active_experts: torch.Tensor,
    row_slots: torch.Tensor,
    top_k: int,
    limit: float,
    alpha: float,
    layout: str,
    h_group: int,
    h: torch.Tensor,
    h_scale: torch.Tensor | None,
) -> None:
    """The op of that name; see ops/schemas.py."""
    _check_layout(layout)
    (rows, intermediate), hidden, experts = h.shape, x.shape[1], weight.shape[0]
    if rows == 0:
        return
    tile, tiles = _tiling(rows, experts)
    _gate_up_kernel[(triton.cdiv(intermediate, 128), tiles)](
        x, x_scale, weight, weight_scale, bias, expert_offsets, row_slots, h, h_scale, x.shape[0], rows, experts,
        limit, alpha, weight.stride(0), weight_scale.stride(0),
        E=triton.next_power_of_2(experts), H=hidden, I=intermediate, TOP_K=top_k, TILE_T=tile, H_GROUP=h_group,
        MXFP4=weight.dtype == torch.uint8, num_warps=4,
    )  # fmt: skip


def moe_down(
    h: torch.Tensor,
    h_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    expert_weights: torch.Tensor,
    expert_offsets: torch.Tensor,
    active_experts: torch.Tensor,
    row_slots: torch.Tensor,
    layout: str,
    h_group: int,
    out: torch.Tensor,
) -> None:
    """The op of that name; see ops/schemas.py."""
    _check_layout(layout)
    (rows, intermediate), hidden, experts = h.shape, out.shape[2], weight.shape[0]
    if rows == 0:
        return
    tile, tiles = _tiling(rows, experts)
    _down_kernel[(triton.cdiv(hidden, 128), tiles)](
        h, h_scale, weight, weight_scale, bias, expert_weights, expert_offsets, row_slots, out, rows, experts,
        weight.stride(0), weight_scale.stride(0),
        E=triton.next_power_of_2(experts), H=hidden, I=intermediate, TILE_T=tile, H_GROUP=h_group,
        MXFP4=weight.dtype == torch.uint8, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
