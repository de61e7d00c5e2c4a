"""Triton kernels of norms, quantisation, rope, routing and tables against the CPU ops, in the interpreter.

The interpreter truncates fp32 to bf16 and breaks e4m3 ties upward: one ULP is allowed there, and bit exactness is the
GPU tier's to show.
"""

from __future__ import annotations

import pytest
import torch

import gptoss_trt.ops  # noqa: F401 - registers torch.ops.gptoss_trt
from gptoss_trt.triton_kernels import act_quant as triton_act_quant
from gptoss_trt.triton_kernels import dense as triton_dense
from gptoss_trt.triton_kernels import dense_few as triton_dense_few
from gptoss_trt.triton_kernels import dense_invariant as triton_dense_invariant
from gptoss_trt.triton_kernels import moe_route as triton_route
from gptoss_trt.triton_kernels import rmsnorm_quant as triton_norm
from gptoss_trt.triton_kernels import rmsnorm_route as triton_norm_route
from gptoss_trt.triton_kernels import rope_kv_append as triton_rope

pytestmark = pytest.mark.interpret
OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
POISON = 77.0


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(torch.bfloat16)


def assert_within_ulp(got: torch.Tensor, want: torch.Tensor) -> None:
    """At most one step of the float format apart, element by element (steps counted on the sign-magnitude codes)."""
    integer = {torch.bfloat16: torch.int16, E4M3: torch.int8}[want.dtype]
    bits = {torch.int16: 0x7FFF, torch.int8: 0x7F}[integer]

    def ordered(x: torch.Tensor) -> torch.Tensor:
        code = x.contiguous().view(integer).to(torch.int32)
        return torch.where(code < 0, -(code & bits), code & bits)

    distance = (ordered(got) - ordered(want)).abs()
    assert int(distance.max()) <= 1, f"{int(distance.max())} steps apart at {distance.argmax().item()}"


def adversarial(tokens: int, width: int) -> torch.Tensor:
    x = torch.randn(tokens, width)
    x[0] = 0  # a zero row
    if tokens > 1:
        x[1, width // 2] = 1e4  # one huge channel
    if tokens > 2:
        x[2] *= 1e-30
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("width", [2880, 192])
@pytest.mark.parametrize("group", [128, 64, 0])
@pytest.mark.parametrize("tokens", [5, 37])  # one a program, and four
def test_act_quant(tokens: int, width: int, group: int) -> None:
    x = adversarial(tokens, width)
    groups = -(-width // (group or 128))
    outputs = []
    for function in (triton_act_quant.act_quant, OPS.act_quant):
        q = torch.empty(tokens, width, dtype=E4M3)
        q.view(torch.uint8).fill_(0x55)
        scales = torch.full((groups, tokens), POISON) if group else None
        function(x, group, q, scales)
        outputs.append((q, scales))
    (q, scales), (want_q, want_scales) = outputs
    if group:
        assert torch.equal(scales, want_scales)
    assert_within_ulp(q, want_q)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("hidden", [2880, 256])
def test_rmsnorm_quant(hidden: int, with_delta: bool) -> None:
    x, weight = adversarial(4, hidden), bf16(hidden)
    delta = bf16(4, hidden) if with_delta else None
    outputs = []
    for function in (triton_norm.rmsnorm_quant, OPS.rmsnorm_quant):
        residual, normed = x.clone(), torch.full((4, hidden), POISON, dtype=torch.bfloat16)
        q, scales = torch.empty(4, hidden, dtype=E4M3), torch.full((-(-hidden // 128), 4), POISON)
        function(residual, delta, weight, 1e-5, normed, q, scales)
        outputs.append((residual, normed, q, scales))
    (residual, normed, q, scales), (want_residual, want_normed, _, want_scales) = outputs
    assert_within_ulp(residual, want_residual)
    torch.testing.assert_close(normed.float(), want_normed.float(), rtol=2**-6, atol=1e-6)
    torch.testing.assert_close(scales, want_scales, rtol=2**-6, atol=0)
    dequantised = q.float() * scales.T.repeat_interleave(128, 1)[:, :hidden]
    torch.testing.assert_close(dequantised, normed.float(), rtol=0.07, atol=float(normed.float().abs().max()) / 400)


@pytest.mark.parametrize("accumulate", [True, False])
def test_moe_combine(accumulate: bool) -> None:
    rows, ids = bf16(6, 4, 192), torch.randint(0, 8, (6, 4), dtype=torch.int32)
    ids[5] = -1
    rows[5] = float("nan")  # never written: must not be read
    start = torch.randn(6, 192)
    got, want = start.clone(), start.clone()
    triton_norm.moe_combine(rows, ids, 2, 4, accumulate, got)
    OPS.moe_combine(rows, ids, 2, 4, accumulate, want)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_moe_combine_norm() -> None:
    rows, ids = bf16(3, 4, 256), torch.randint(0, 8, (3, 4), dtype=torch.int32)
    x, weight = bf16(3, 256), bf16(256)
    outputs = []
    for function in (triton_norm.moe_combine_norm, OPS.moe_combine_norm):
        residual, normed = x.clone(), torch.empty(3, 256, dtype=torch.bfloat16)
        function(rows, ids, 0, 8, residual, weight, 1e-5, normed, None, None)
        outputs.append((residual, normed))
    assert_within_ulp(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1].float(), outputs[1][1].float(), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("windowed", [True, False])
def test_kv_slots(windowed: bool) -> None:
    query_start = torch.tensor([0, 3, 3, 5], dtype=torch.int32)  # the second sequence has nothing new
    positions = torch.tensor([254, 255, 256, 64, 65, 9, 9], dtype=torch.int32)  # two padding tokens
    table = torch.tensor([[3, 7, 9], [-1, -1, -1], [5, -1, -1]], dtype=torch.int32)
    first = torch.tensor([2, 0, 1], dtype=torch.int32) if windowed else None
    if not windowed:
        positions -= torch.tensor([128, 128, 128, 64, 64, 0, 0], dtype=torch.int32)
    got, want = torch.full((7,), 77, dtype=torch.int32), torch.full((7,), 77, dtype=torch.int32)
    triton_rope.kv_slots(positions, query_start, table, first, 64, got)
    OPS.kv_slots(positions, query_start, table, first, 64, want)
    assert got.tolist() == want.tolist()
    assert got.tolist()[-2:] == [-1, -1]


@pytest.mark.parametrize("heads", [16, 0])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_rope_kv_append(cache_dtype: torch.dtype, heads: int) -> None:
    tokens, kv_heads, d = 5, 2, 64
    qkv, positions = bf16(tokens, (heads + 2 * kv_heads) * d), torch.tensor([0, 1, 130, 4095, 9], dtype=torch.int32)
    cos_sin = torch.randn(4096, d)
    slots = torch.tensor([0, 15, 16, 40, -1], dtype=torch.int32)
    scales = (1.0, 1.0) if cache_dtype == torch.bfloat16 else (0.25, 0.5)
    outputs = []
    for function in (triton_rope.rope_kv_append, OPS.rope_kv_append):
        q = torch.empty(tokens, heads, d, dtype=torch.bfloat16)
        k, v = (torch.zeros(4, kv_heads, 16, d, dtype=cache_dtype) for _ in range(2))
        function(qkv, positions, cos_sin, slots, *scales, q, k, v)
        outputs.append((q, k, v))
    for got, want in zip(*outputs, strict=True):
        if want.numel():
            assert_within_ulp(got, want)
    assert int((outputs[0][1].view(torch.uint8) != 0).any(-1).sum()) == 4 * kv_heads  # four tokens written, no fifth


@pytest.mark.parametrize(("tokens", "experts", "first", "local"), [(7, 8, 0, 8), (33, 32, 8, 16), (1, 128, 0, 128)])
def test_moe_route(tokens: int, experts: int, first: int, local: int) -> None:
    x, weight, bias = bf16(tokens, 192), bf16(experts, 192, scale=0.1), bf16(experts)
    weight[3], bias[3] = weight[5], bias[5]  # a tie in every row: the lower index first
    count = torch.tensor([max(tokens - 2, 1)], dtype=torch.int32)
    outputs = []
    for function in (triton_route.moe_route, OPS.moe_route):
        ids, weights = torch.empty(tokens, 4, dtype=torch.int32), torch.full((tokens, 4), POISON)
        offsets, active = torch.empty(local + 1, dtype=torch.int32), torch.empty(local + 1, dtype=torch.int32)
        slots = torch.full((tokens * 4,), 77, dtype=torch.int32)
        function(x, weight, bias, count, first, local, ids, weights, offsets, active, slots)
        outputs.append((ids, weights, offsets, active, slots))
    got, want = outputs
    if torch.equal(got[0], want[0]):  # truncated logits may swap near ties in the interpreter
        for index in (2, 3, 4):
            assert got[index].tolist() == want[index].tolist()
        torch.testing.assert_close(got[1], want[1], rtol=2**-6, atol=2**-8)
    else:
        same = (got[0].sort(-1).values == want[0].sort(-1).values).all(-1)
        assert int(same.sum()) >= tokens - 1


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 32, 2880), (7, 8, 192), (16, 8, 192), (17, 8, 192)])
@pytest.mark.parametrize("with_delta", [True, False])
def test_rmsnorm_route(tokens: int, experts: int, hidden: int, with_delta: bool) -> None:
    residual, weight, router, bias = bf16(tokens, hidden), bf16(hidden), bf16(experts, hidden), bf16(experts)
    router[3], bias[3] = router[5], bias[5]  # a tie in every row: the lower index first
    delta = bf16(tokens, hidden) if with_delta else None
    count = torch.tensor([max(tokens - 2, 1)], dtype=torch.int32)
    before = residual.clone()
    outputs = []
    for function in (triton_norm_route.rmsnorm_route, OPS.rmsnorm_route):
        updated, q = torch.full((tokens, hidden), POISON, dtype=torch.bfloat16), torch.empty(tokens, hidden, dtype=E4M3)
        scales = torch.full((-(-hidden // 128), tokens), POISON)
        ids, weights = torch.empty(tokens, 4, dtype=torch.int32), torch.full((tokens, 4), POISON)
        offsets, active = torch.empty(experts + 1, dtype=torch.int32), torch.empty(experts + 1, dtype=torch.int32)
        slots = torch.full((tokens * 4,), 77, dtype=torch.int32)
        where = (updated, q, scales, ids, weights, offsets, active, slots)
        function(residual, delta, weight, 1e-5, router, bias, count, 0, experts, *where)
        outputs.append(where)
    got, want = outputs
    assert torch.equal(residual, before)
    assert_within_ulp(got[0], want[0])
    torch.testing.assert_close(got[2], want[2], rtol=2**-6, atol=0)
    values = [q.float() * scales.T.repeat_interleave(128, 1)[:, :hidden] for _, q, scales, *_ in outputs]
    torch.testing.assert_close(*values, rtol=0.07, atol=float(values[1].abs().max()) / 400)
    same = (got[3] == want[3]).all(-1)
    assert int(same.sum()) >= tokens - 1  # a sum in another order may swap a near tie
    torch.testing.assert_close(got[4][same], want[4][same], rtol=2**-6, atol=2**-8)
    flat = got[3].reshape(-1).long()
    real = int(count) * 4
    assert got[7][:real].tolist() == torch.sort(flat[:real], stable=True).indices.tolist()
    assert (got[7][real:] == -1).all() and (flat[real:] == -1).all()
    assert got[5].diff().tolist() == torch.bincount(flat[:real], minlength=experts).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_choice_among_zeros_of_both_signs_and_few(top_k: int) -> None:
    """-0 ties with 0, negative logits order by value, and top_k need not be a power of two."""
    logits = torch.tensor([[0.0, -0.0, -1.0, 0.0, -2.0], [-3.0, -1.5, -0.5, -1e30, -0.25]])
    parts, bias = logits.reshape(1, 2, 5).contiguous(), torch.zeros(5, dtype=torch.bfloat16)
    ids, weights = torch.empty(2, top_k, dtype=torch.int32), torch.empty(2, top_k)
    others = [torch.empty(size, dtype=torch.int32) for size in (6, 6, 2 * top_k)]
    triton_route.choose_and_sort(parts, bias, None, (0, 5), (ids, weights, *others))
    assert ids.tolist() == [[0, 1, 3, 2][:top_k], [4, 2, 1, 0][:top_k]]
    want = torch.softmax(torch.gather(logits, 1, ids.long()), -1)
    torch.testing.assert_close(weights, want, rtol=2**-8, atol=0)


def test_rows_of_experts_are_in_order() -> None:
    """All tokens to one expert, experts with none, and (expert, token, slot) order, on given ids."""
    ids = torch.tensor([[5, 1, 2, 7], [5, 2, 0, 1], [5, 7, 1, 3], [-1, -1, -1, -1]], dtype=torch.int32)
    offsets, active = torch.empty(9, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    slots = torch.full((16,), 77, dtype=torch.int32)
    triton_route._rows_kernel[(8,)](ids, offsets, slots, 16, 0, TILE=8)
    triton_route._active_kernel[(1,)](offsets, active, 8, E=8)
    assert offsets.tolist() == [0, 1, 4, 6, 7, 7, 10, 10, 12]
    assert active.tolist() == [6, 0, 1, 2, 3, 5, 7, -1, -1]
    assert slots.tolist() == [6, 1, 7, 10, 2, 5, 11, 0, 4, 8, 3, 9, -1, -1, -1, -1]


def test_embedding() -> None:
    weight, ids = bf16(10, 192), torch.tensor([4, 13, 3, 14], dtype=torch.int32)
    got, want = (torch.full((4, 192), POISON, dtype=torch.bfloat16) for _ in range(2))
    triton_dense.embedding(ids, weight, 4, got)
    OPS.embedding(ids, weight, 4, want)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [3, 19])
@pytest.mark.parametrize(
    ("segments", "rows"), [([], 200), ([64, 64, 64], 192), ([0, 192, 64], 256), ([256, 128, 128], 512)]
)
def test_dense_fp8(segments: list[int], rows: int, tokens: int) -> None:
    x = bf16(tokens, 320)
    q, scales = torch.empty(tokens, 320, dtype=E4M3), torch.empty(3, tokens)
    OPS.act_quant(x, 128, q, scales)
    weight = torch.randn(rows, 320).to(E4M3)
    weight_scale = torch.rand(sum(-(-s // 128) for s in (segments or [rows])), 3) + 0.5
    bias = bf16(rows, scale=100.0)
    got, want = torch.full((tokens, rows), POISON), torch.full((tokens, rows), POISON)
    triton_dense.dense_fp8(q, scales, weight, weight_scale, segments, bias, got)
    OPS.dense_fp8(q, scales, weight, weight_scale, segments, bias, want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 40, 320), (8, 24, 2880), (16, 33, 192)])
def test_dense_of_few_tokens(tokens: int, rows: int, columns: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = bf16(tokens, columns), bf16(rows, columns), bf16(rows, scale=100.0)
    for given in (bias, None):
        got, want = (torch.full((tokens, rows), POISON, dtype=out_dtype) for _ in range(2))
        triton_dense_few.dense_few(x, weight, given, got)
        OPS.dense(x, weight, given, want)
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-6 if out_dtype == torch.bfloat16 else 1e-4,
                                   atol=2e-3)  # fmt: skip


@pytest.mark.parametrize("fp8", [True, False])
def test_products_of_a_token_do_not_depend_on_the_others(fp8: bool) -> None:
    """Small integers, whose sums are exact: the interpreter's products are numpy's, which add in another order for
    another number of rows on some processors."""
    x, weight = (torch.randint(-8, 9, shape).to(torch.bfloat16) for shape in ((16, 320), (40, 320)))
    q, codes, unit = x.to(E4M3), weight.to(E4M3), 2.0 ** torch.randint(-3, 4, (1, 3))
    scales = 2.0 ** torch.randint(-3, 4, (3, 16))

    def product(first: int, last: int) -> torch.Tensor:
        out = torch.full((last - first, 40), POISON)
        if fp8:
            part = scales[:, first:last].contiguous()
            triton_dense.dense_fp8(q[first:last].contiguous(), part, codes, unit, [], None, out)
        else:
            triton_dense_few.dense_few(x[first:last].contiguous(), weight, None, out)
        return out

    together = product(0, 16)
    assert torch.equal(together[:5], product(0, 5))
    assert torch.equal(together[11:12], product(11, 12))


@pytest.mark.parametrize("segments", [[72, 64, 64], [0, 136, 64]])
@pytest.mark.parametrize("tokens", [1, 70])
def test_products_of_one_tile_for_all_tokens(tokens: int, segments: list[int]) -> None:
    """Three segments with rows of scales each, the first of them empty; tails of rows, K and tokens."""
    rows, columns = 200, 192
    x, weight, bias = bf16(tokens, columns), bf16(rows, columns), bf16(rows)
    results = []
    for function in (triton_dense_invariant.dense, OPS.dense):
        out = torch.full((tokens, rows), POISON)
        function(x, weight, bias, out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)
    codes, scales = torch.empty(tokens, columns, dtype=E4M3), torch.empty(2, tokens)
    OPS.act_quant(x, 128, codes, scales)
    stored, unit = (torch.randn(rows, columns) * 8).to(E4M3), torch.rand(3, 2)
    results = []
    for function in (triton_dense_invariant.dense_fp8, OPS.dense_fp8):
        out = torch.full((tokens, rows), POISON)
        function(codes, scales, stored, unit, segments, bias, out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-2)
