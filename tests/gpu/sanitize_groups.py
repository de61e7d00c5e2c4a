"""Calls of every hand-written kernel in small shapes that reach its branches, in groups, for sanitize.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from moe_case import Case, run
from op_case import bf16, poisoned
from test_attention import PREFILL_PLANS, Paged, options
from test_decode_one import STEPS, batch_of, make_model

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops import dense as library_dense
from gptoss_trt.ops.dense import Tiles
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import PACKED, Options
from gptoss_trt.ops.rmsnorm_route import rmsnorm_route_many, sort_rows
from gptoss_trt.runtime.model import GptOssModel, StepBatch
from gptoss_trt.runtime.model.loader import random_weights

OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
TILES = (Tiles(64, 1), Tiles(64, 2), Tiles(128, 1), Tiles(128, 2), Tiles(256, 1))  # each shape of dense_fp8
TILED = (Storage.FP8_TILES, Storage.MXFP4)


def report(words: str) -> None:
    """How far a group has come, for whoever reads the log of one that ran out of time."""
    torch.cuda.synchronize()
    print(words, flush=True)


def smaller_blocks(case: Paged, block_tokens: int) -> Paged:
    """The same keys in blocks of `block_tokens`, which divides the case's own size."""
    each = case.k.shape[2] // block_tokens
    for name in ("k", "v"):
        cache = getattr(case, name)
        blocks, heads, tokens, width = cache.shape
        cut = cache.view(blocks, heads, each, block_tokens, width).transpose(1, 2)
        setattr(case, name, cut.reshape(blocks * each, heads, tokens // each, width).contiguous())
    offsets = torch.arange(each, dtype=torch.int32)
    case.table = torch.where(case.table[..., None] < 0, -1, case.table[..., None] * each + offsets).flatten(1)
    if case.first is not None:
        case.first = case.first * each
    return case


def attention_decode() -> None:
    """The library's decode kernel: block sizes, windows, plans, cuts, several tokens a sequence."""
    for block_tokens in (16, 32, 64):
        for window in (0, 128):
            contexts = [1, 17, 129, 300, 0]
            case = smaller_blocks(Paged.make(contexts, [1] * 5, window, 2, width=0 if window else 16), block_tokens)
            for plan in (0, 1, 2, 3):
                case.cuda().decode(options(plan, 0 if window else plan))
            ragged = smaller_blocks(Paged.make([40, 300, 7], [3, 8, 1], window, 2, padding=3), block_tokens)
            ragged.cuda().prefill(options(0))


def attention_prefill() -> None:
    """The library's prefill kernels."""
    for window in (0, 128):
        case = Paged.make([200, 1, 70], [150, 1, 70], window, 2, padding=5).cuda()
        for plan in PREFILL_PLANS[window][1:]:
            case.prefill(options(plan))


def attention_quantised() -> None:
    """Output in e4m3, of every plan of the library's; one token has scores that outgrow their base."""
    for window in (0, 128):
        decode = Paged.make([1, 129, 300, 0], [1] * 4, window, 2, width=0 if window else 16).cuda()
        for plan in (1, 2, 3):
            decode.quantised(False, options(plan, 0 if window else plan))
        prompts = Paged.make([200, 1, 70], [150, 1, 70], window, 2, padding=5).cuda()
        prompts.q[7] *= 1e4
        for plan in PREFILL_PLANS[window][1:]:
            prompts.quantised(True, options(plan))


def attention_lasting() -> None:
    """Blocks of prefill that take tile after tile, whose scores outgrow their base, and strips of more than a page."""
    case = Paged.make([450], [450], 0)
    case.k[:, :, ::5] *= 100
    case.cuda().quantised(True, options(1))
    case = Paged.make([1100], [1100], 128).cuda()
    for plan in PREFILL_PLANS[128][2:]:
        case.quantised(True, options(plan))


def attention_triton() -> None:
    """What the library does not take: prefill with small blocks, FP8 caches."""
    for window in (0, 128):
        for block_tokens in (16, 32):
            prompts = Paged.make([18, 19, 150, 300], [18, 19, 150, 40], window, 2)
            smaller_blocks(prompts, block_tokens).cuda().prefill()
        for fresh in ([1, 1], [70, 9]):
            case = Paged.make([300, 65], fresh, window, 2)
            case.k, case.v = case.k.to(E4M3), case.v.to(E4M3)
            card = case.cuda()
            card.prefill()
            if fresh == [1, 1]:
                card.decode()


def dense() -> None:
    """The products in both formats, of few tokens and of more."""
    for tokens in (1, 3, 8, 13, 16, 20, 70, 200):
        for rows, columns in ((640, 256), (256, 1024), (264, 192)):
            x, weight, bias = (part.cuda() for part in (bf16(tokens, columns), bf16(rows, columns), bf16(rows)))
            OPS.dense(x, weight, bias, poisoned(tokens, rows, dtype=torch.bfloat16).cuda())
            codes = torch.empty(tokens, columns, dtype=E4M3, device="cuda")
            scales = torch.empty(-(-columns // 128), tokens, device="cuda")
            OPS.act_quant(x, 128, codes, scales)
            units = torch.ones(-(-rows // 128), -(-columns // 128), device="cuda")
            OPS.dense_fp8(codes, scales, weight.to(E4M3), units, [], bias, poisoned(tokens, rows).cuda())


def fp8_product(tokens: int, rows: int, columns: int, segments: list[int]) -> tuple[torch.Tensor, ...]:
    """x, its scales, weights and theirs, of one product."""
    x, scales = torch.randn(tokens, columns).to(E4M3).cuda(), torch.rand(-(-columns // 128), tokens).cuda()
    unit = torch.rand(sum(-(-segment // 128) for segment in segments or [rows]), -(-columns // 128)).cuda()
    return x, scales, torch.randn(rows, columns).to(E4M3).cuda(), unit


def dense_tiles() -> None:
    """dense_fp8 in every shape of the library's, tails of all sizes; added to a residual where a tile can be."""
    for tokens, rows, columns, segments in ((5, 264, 272, [128, 64, 72]), (300, 200, 400, [])):
        case = fp8_product(tokens, rows, columns, segments)
        bias = bf16(rows).cuda()
        for tiles in TILES:
            for dtype in (torch.bfloat16, torch.float32):
                out = poisoned(tokens, rows, dtype=dtype).cuda()
                library_dense.dense_fp8_tiles(*case, segments, bias, out, tiles)
            if tiles.tokens in library_dense.ADDING_TILES and tiles.parts == 1:
                library_dense.dense_fp8_tiles(*case, segments, bias, bf16(tokens, rows).cuda(), tiles, adds=True)


def dense_rotation() -> None:
    """The product of q, k and v that ends with rotation and append, in every shape, and without q; tokens without a
    slot."""
    heads, kv_heads, width = 8, 1, 64
    segments = [heads * width, kv_heads * width, kv_heads * width]
    rows = sum(segments)
    library_dense.takes = lambda *_: False
    for tokens in (5, 70, 300):
        case = fp8_product(tokens, rows, 272, segments)
        positions = torch.randint(400, (tokens,)).to(torch.int32).cuda()
        slots = torch.randperm(320)[:tokens].to(torch.int32).cuda()
        slots[tokens // 3 :: 7] = -1
        cos_sin, bias = torch.randn(400, width).cuda(), bf16(rows).cuda()
        q = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device="cuda")
        caches = [torch.zeros(5, kv_heads, 64, width, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
        for tiles in TILES:
            library_dense.tiles_for = lambda *_, tiles=tiles: tiles
            rotation = (positions, cos_sin, slots, 1.0, 1.0)
            OPS.dense_fp8_rope_kv_append(*case, segments, bias, *rotation, q, *caches)
            x, scales, weight, unit = case
            behind = (weight[heads * width :], unit[heads * width // 128 :], [0, *segments[1:]], bias[heads * width :])
            OPS.dense_fp8_rope_kv_append(x, scales, *behind, *rotation, q.new_empty(tokens, 0, width), *caches)


def norms() -> None:
    """The library's norms: every source and output, a tail of columns."""
    for tokens, hidden in ((1, 72), (5, 264), (3, 2880)):
        groups = -(-hidden // 128)
        residual, delta, gain = (bf16(*size).cuda() for size in ((tokens, hidden), (tokens, hidden), (hidden,)))
        rows, ids = bf16(tokens, 4, hidden).cuda(), torch.randint(-1, 32, (tokens, 4), dtype=torch.int32).cuda()
        normed, quantised = torch.empty_like(residual), torch.empty_like(residual, dtype=E4M3)
        scales = poisoned(groups, tokens).cuda()
        for outputs in ((normed, None, None), (None, quantised, scales), (normed, quantised, scales)):
            for more in (None, delta):
                OPS.rmsnorm_quant(residual, more, gain, 1e-5, *outputs)
            OPS.moe_combine_norm(rows, ids, 8, 16, residual, gain, 1e-5, *outputs)


def routed(tokens: int, experts: int) -> list[torch.Tensor]:
    """Poisoned outputs of a routing: ids, weights, offsets, active experts, slots."""
    ints = [poisoned(*size, dtype=torch.int32) for size in ((tokens, 4), (experts + 1,), (experts + 1,), (tokens * 4,))]
    return [x.cuda() for x in (ints[0], poisoned(tokens, 4), *ints[1:])]


def routing_cluster() -> None:
    """Norm and routing in one kernel, of both its shapes; in pieces, with a router that stays; rows of many tokens
    sorted."""
    for tokens, hidden, experts in ((8, 256, 8), (17, 1032, 32), (9, 520, 40), (21, 264, 128), (530, 392, 20)):
        residual, delta, gain = (bf16(*size).cuda() for size in ((tokens, hidden), (tokens, hidden), (hidden,)))
        router = (bf16(experts, hidden).cuda(), bf16(experts).cuda())
        count = torch.tensor([tokens - 1], dtype=torch.int32, device="cuda")
        outputs = (torch.empty_like(residual), torch.empty_like(residual, dtype=E4M3))
        scales = poisoned(-(-hidden // 128), tokens).cuda()
        for kernel in (OPS.rmsnorm_route, rmsnorm_route_many):
            for more in (None, delta):
                kernel(
                    residual, more, gain, 1e-5, *router, count, experts // 4, experts // 2, *outputs, scales,
                    *routed(tokens, experts // 2),
                )  # fmt: skip
    for tokens, experts in ((1, 32), (700, 128), (3000, 32)):
        ids = (torch.rand(tokens, 4).pow(3) * experts).to(torch.int32)
        ids[tokens - tokens // 9 :] = -1
        _, _, *rows = routed(tokens, experts)
        sort_rows(ids.cuda(), 0, experts, *rows)


def routing() -> None:
    """Norms, routing, the sums behind the experts, and embedding."""
    hidden, experts = 256, 8
    for tokens in (1, 4, 16, 17, 70):
        ints = [
            poisoned(*size, dtype=torch.int32).cuda()
            for size in ((tokens, 4), (experts + 1,), (experts + 1,), (tokens * 4,))
        ]
        residual, delta, gain = (part.cuda() for part in (bf16(tokens, hidden), bf16(tokens, hidden), bf16(hidden)))
        router = (bf16(experts, hidden).cuda(), bf16(experts).cuda())
        count = torch.tensor([tokens - 1], dtype=torch.int32, device="cuda")
        normed = (torch.empty_like(residual), torch.empty_like(residual, dtype=E4M3), poisoned(2, tokens).cuda())
        chosen = (ints[0], poisoned(tokens, 4).cuda(), *ints[1:])
        OPS.rmsnorm_quant(residual, delta, gain, 1e-5, *normed)
        OPS.rmsnorm_route(residual, delta, gain, 1e-5, *router, count, 0, experts, *normed, *chosen)
        OPS.moe_route(residual, *router, count, 0, experts, *chosen)
        rows = bf16(tokens, 4, hidden).cuda()
        OPS.moe_combine(rows, chosen[0], 0, experts, True, residual)
        OPS.moe_combine_norm(rows, chosen[0], 0, experts, residual, gain, 1e-5, *normed)
        ids = torch.arange(tokens, dtype=torch.int32, device="cuda")
        OPS.embedding(ids, bf16(100, hidden).cuda(), 0, residual)


def experts_decode(product: str) -> None:
    """The decode plans of an expert product."""
    for tokens, hidden, inter, group in ((1, 256, 192, 0), (3, 320, 192, 128), (12, 96, 96, 64), (40, 256, 192, 0)):
        case = Case(hidden, inter, tokens=tokens, product=product, group=group)
        for storage in PACKED:
            for plan in (Plan.SIMT, Plan.WGMMA):
                run(case, Options(plan), storage)


def experts_prefill(product: str) -> None:
    """The prefill plan of an expert product."""
    for tokens, group in ((40, 0), (150, 128), (150, 64)):
        for storage in PACKED:
            run(Case(tokens=tokens, product=product, group=group, routing="skewed"), Options(Plan.PREFILL), storage)


def experts_tiles(product: str) -> None:
    """An expert product on FP8 tiles: experts of no, few and many rows, blocks alone and two that share tokens; copies
    of tiles, and MXFP4 that becomes tiles from 256 rows an expert on."""
    for tokens, experts, storages in ((40, 8, (Storage.FP8_TILES,)), (260, 1, TILED), (520, 1, TILED)):
        case = Case(tokens=tokens, experts=experts, top_k=min(4, experts), product=product, group=0)
        for storage in storages:
            run(case, Options(Plan.PREFILL if storage is Storage.MXFP4 else Plan.AUTO), storage)


def decode_one(dense: str, block_tokens: int) -> None:
    """One token through two layers in one launch: an empty context, one beyond the window, one in parts, padding."""
    contexts = (0, 140, 3000)
    made = make_model(8, 2, dense, block_tokens, contexts[-1])
    assert made.one_token is not None
    blocks = -(-(contexts[-1] + STEPS) // block_tokens)
    for context in contexts:
        made.forward(batch_of([5], context, blocks))
        report(f"context {context}")
    empty = batch_of([5], 0, blocks)
    empty.context_lens.zero_()
    made.forward(empty)


def steps() -> None:
    """What begins and ends a step: inputs from pinned memory, slots and rotation, drawing."""
    host = (torch.arange(700, dtype=torch.int32) % 256).pin_memory()
    memory, ids = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (700, 8))
    OPS.feed(host, torch.arange(256, dtype=torch.int32, device="cuda"), 256, memory, ids)
    for block_tokens in (16, 64):
        starts = torch.tensor([0, 40, 41], dtype=torch.int32, device="cuda")
        positions = torch.arange(45, dtype=torch.int32, device="cuda")
        table = torch.randperm(40)[:20].to(torch.int32).reshape(2, 10).cuda()
        slots = poisoned(45, dtype=torch.int32).cuda()
        OPS.kv_slots(positions, starts, table, None, block_tokens, slots)
        caches = [torch.zeros(40, 2, block_tokens, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        q = torch.empty(45, 16, 64, dtype=torch.bfloat16, device="cuda")
        OPS.rope_kv_append(bf16(45, 20 * 64).cuda(), positions, torch.randn(64, 64).cuda(), slots, 1.0, 1.0, q, *caches)
    for rows in (1, 5):
        tokens = torch.zeros((2, rows), dtype=torch.int32, pin_memory=True)
        fed = torch.zeros(rows, dtype=torch.int32, device="cuda")
        heat, share = torch.ones(rows, device="cuda"), torch.rand(rows, device="cuda")
        turn = torch.ones(1, dtype=torch.int32, device="cuda")
        for where in (turn, None):
            OPS.sample(torch.randn(rows, 5000, device="cuda"), heat, share, where, tokens, fed)


def model() -> None:
    """Whole steps of a small model: prompts of odd lengths, decode of some sequences, blocks of 16 and 64 tokens."""
    sizes = {"hidden_size": 256, "intermediate_size": 192, "num_experts": 8, "num_heads": 16, "num_kv_heads": 2}
    config = replace(model_config("gpt-oss-20b", 2), vocab_size=1000, max_context=1024, **sizes)
    device = torch.device("cuda")
    made = GptOssModel(random_weights(config, Formats(), 1, device), device)
    for block_tokens in (16, 64):
        blocks = 200 // block_tokens
        made.allocate_kv(7 * blocks, 7 * blocks, block_tokens)
        for lengths, known in (([14], 0), ([1, 1, 1], 14), ([14, 3, 1, 60], 0), ([5], 130)):
            made.forward(step_batch(lengths, known, blocks, device))


def step_batch(lengths: list[int], known: int, blocks: int, device: torch.device) -> StepBatch:
    """`lengths[s]` new tokens behind `known` of each sequence, whose blocks are its own `blocks` ones."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = len(lengths)
    ends = [sum(lengths[: s + 1]) for s in range(count)]
    table = torch.arange(count * blocks, dtype=torch.int32, device=device).reshape(count, blocks)
    return StepBatch(
        token_ids=torch.arange(ends[-1], dtype=torch.int32, device=device),
        positions=ints([known + i for length in lengths for i in range(length)]),
        query_start=ints([0, *ends]),
        context_lens=ints([known + length for length in lengths]),
        full_blocks=table,
        window_blocks=table,
        window_first_block=ints([0] * count),
        logits_rows=ints([end - 1 for end in ends]),
    )


GROUPS: dict[str, Callable[[], None]] = {
    group.__name__: group
    for group in (
        norms, routing_cluster, dense_tiles, dense_rotation, attention_prefill, attention_quantised,
        attention_lasting, attention_decode, attention_triton, dense, routing, steps, model,
    )
}  # fmt: skip
GROUPS |= {
    f"{group.__name__}-{product}": partial(group, product)
    for group in (experts_tiles, experts_decode, experts_prefill)
    for product in ("gate_up", "down")
}
GROUPS |= {
    "decode_one-fp8": partial(decode_one, "fp8_block128", 64),
    "decode_one-bf16": partial(decode_one, "bf16", 16),
}
