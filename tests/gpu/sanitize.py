"""Small shapes of every hand-written kernel under compute-sanitizer: `python tests/gpu/sanitize.py` (make sanitize).

    sanitize.py [--tools memcheck,racecheck,synccheck] [--groups NAME,...] [--seconds N] [--logs FOLDER] [--here GROUP]

Each group of calls runs in a process of its own under each tool, all of them at once, with an allocation of its own for
each tensor, so that memcheck knows where one ends; the exit status is 1 when a tool or a group reports an error. Shapes
are small, because a tool slows a kernel down a hundredfold: results are compared in the tests beside this file, here
only accesses and barriers count. The tools do not see races between copies of the tensor memory accelerator or WGMMA
and ordinary accesses (test_moe_gemm.py and test_attention.py repeat those under load).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from moe_case import Case, run
from test_attention import Paged, options
from test_ops_on_cuda import bf16, poisoned

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import PACKED, Options
from gptoss_trt.runtime.model import GptOssModel, StepBatch
from gptoss_trt.runtime.model.loader import random_weights

OPS = torch.ops.gptoss_trt
E4M3 = torch.float8_e4m3fn
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 99  # exit status of a tool that found something
# What a tool cannot judge, as far as its reports tell: racecheck sees races where warps hand h over by bar.arrive and
# where an item is handed over by an mbarrier that counts bytes too, both of which order accesses.
BLIND = {("racecheck", "experts_prefill")}


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
    """The library's three prefill kernels."""
    for window in (0, 128):
        case = Paged.make([200, 1, 70], [150, 1, 70], window, 2, padding=5).cuda()
        for plan in (1, 2, 3) if window else (1, 2):
            case.prefill(options(plan))


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


def experts_decode() -> None:
    """The decode plans of the expert products."""
    for product in ("gate_up", "down"):
        for tokens, hidden, inter, group in ((1, 256, 192, 0), (3, 320, 192, 128), (12, 96, 96, 64), (40, 256, 192, 0)):
            case = Case(hidden, inter, tokens=tokens, product=product, group=group)
            for storage in PACKED:
                for plan in (Plan.SIMT, Plan.WGMMA):
                    run(case, Options(plan), storage)


def experts_prefill() -> None:
    """The prefill plan of the expert products."""
    for product in ("gate_up", "down"):
        for tokens, group in ((40, 0), (150, 128), (150, 64)):
            for storage in PACKED:
                run(Case(tokens=tokens, product=product, group=group, routing="skewed"), Options(Plan.PREFILL), storage)


def experts_tiles() -> None:
    """The expert products on FP8 tiles, alone and in clusters."""
    for product in ("gate_up", "down"):
        for tokens, experts in ((40, 8), (300, 8), (600, 1)):
            case = Case(tokens=tokens, experts=experts, top_k=min(4, experts), product=product, group=0)
            run(case, Options(), Storage.FP8_TILES)


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
        attention_decode, attention_prefill, attention_triton, dense, routing, experts_decode, experts_prefill,
        experts_tiles, steps, model,
    )
}  # fmt: skip


def sanitizer() -> str:
    """The tool's path. Raises SystemExit when there is none."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise SystemExit("compute-sanitizer is not on the PATH nor in /usr/local/cuda/bin")
    return found


def start(tool: str, group: str, log: Path) -> subprocess.Popen[bytes]:
    options = ["--error-exitcode", str(FOUND), "--print-limit", "20", "--target-processes", "application-only"]
    command = [sanitizer(), "--tool", tool, *options, sys.executable, __file__, "--here", group]
    own_memory = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=own_memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"))
    parser.add_argument("--here", choices=GROUPS, help="run one group in this process, without a tool")
    args = parser.parse_args()
    if args.here:
        GROUPS[args.here]()
        torch.cuda.synchronize()
        print(f"{args.here}: done")
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    asked = [(tool, group) for tool in args.tools.split(",") for group in args.groups.split(",")]
    pairs = [pair for pair in asked if pair not in BLIND]
    for tool, group in sorted(BLIND & set(asked)):
        print(f"{tool:10} {group:18} left out: the tool cannot judge it")
    deadline = time.monotonic() + args.seconds
    running = {pair: start(*pair, args.logs / f"{pair[0]}-{pair[1]}.log") for pair in pairs}
    failed = 0
    for (tool, group), process in running.items():
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = -1
        log = args.logs / f"{tool}-{group}.log"
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        verdict = {0: "clean", FOUND: "ERRORS", -1: f"not done after {args.seconds:.0f} s"}.get(
            status, f"exit {status}"
        )
        failed += status != 0
        print(f"{tool:10} {group:18} {verdict}: {' '.join(last)} ({log})", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
