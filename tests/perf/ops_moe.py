"""Times moe_gemm_fp8 at the two models' shapes: one JSON line per (model, product, storage, batch).

    python tests/perf/ops_moe.py --model gpt-oss-120b --batch 1 8 32 64 128
    python tests/perf/ops_moe.py --plan prefill --skew 1 --h-scale block128 --layer-gib 0.5 --batch 1024 8192
    python tests/perf/ops_moe.py --plan prefill --storage fp8_tiles --layer-gib 0.5 --batch 1024 8192

Weights of several layers (several GB) are multiplied in turn inside one CUDA graph, each launch with its own random
routing, so L2 holds nothing that a launch needs. `share_of_bound` is counted bytes (experts in use, in the storage's
own format as TARGETS counts them) over 4.54 TB/s, divided by the measured time.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from gptoss_trt.build_engine.spec import H_GROUPS
from gptoss_trt.ops import library, weight_layout
from gptoss_trt.ops.gpu_clock import graph_seconds
from gptoss_trt.ops.library import Plan, Storage
from gptoss_trt.ops.moe_gemm_fp8 import LAYOUT, TILES, Options, moe_down, moe_gate_up
from gptoss_trt.reference import fp8_block

HIDDEN, INTER, TOP_K = 2880, 2880, 4
EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
BANDWIDTH = 4.54e12  # bytes per second, the most that a kernel which only reads reached on an H200
BYTES_PER_WEIGHT = {Storage.MXFP4: 4.25 / 8} | dict.fromkeys((Storage.FP8, Storage.FP8_TILES), 1.0 + 4 / (128 * 128))
MIN_LAUNCHES = 24
MANY_TOKENS = 1024  # from here on a launch is long enough for few of them to tell


def random_packed(experts: int, n: int, k: int, storage: Storage) -> torch.Tensor:
    """Packed weights u8 [experts, bytes] with group scales 2^-9 to 2^-7 and nibbles uniform."""
    if storage is Storage.MXFP4:
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 121, (experts, n, k // 32), dtype=torch.uint8, device="cuda")
        return weight_layout.pack_mxfp4(blocks, scales)
    weight = (torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * 64).to(fp8_block.E4M3)
    scale = torch.full((experts, -(-n // 128), -(-k // 128)), 2.0**-12, device="cuda")
    pack = weight_layout.pack_tiles if storage is Storage.FP8_TILES else weight_layout.pack_fp8
    return pack(weight, scale)


def packed_bytes(n: int, k: int, storage: Storage) -> int:
    """Of one expert."""
    if storage is Storage.FP8_TILES:
        return weight_layout.tiles_bytes(n, k)
    return weight_layout.expert_bytes(n, k, storage is Storage.MXFP4)


class Routing:
    """Random distinct experts for each token, sorted as moe_route leaves them. `skew` is the spread of experts' own
    logits over that of a token's: 0 is uniform; 1 to 1.5 leave experts as uneven as one random prompt does."""

    def __init__(self, tokens: int, experts: int, skew: float) -> None:
        logits = torch.randn(tokens, experts) + skew * torch.randn(experts)
        ids = logits.topk(TOP_K).indices.reshape(-1)
        self.slots = torch.argsort(ids, stable=True).to(torch.int32).cuda()
        counts = torch.bincount(ids, minlength=experts)
        self.distinct = int((counts > 0).sum())
        offsets = torch.zeros(experts + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        self.offsets = offsets.cuda()


class Bench:
    """Weights of one (model, product, storage) and timed launches over them."""

    def __init__(self, model: str, product: str, storage: Storage, layer_bytes: int) -> None:
        self.model, self.product, self.storage = model, product, storage
        self.experts = EXPERTS[model]
        self.n, self.k = (2 * INTER, HIDDEN) if product == "gate_up" else (HIDDEN, INTER)
        size = self.experts * packed_bytes(self.n, self.k, storage)
        self.layout = TILES if storage is Storage.FP8_TILES else LAYOUT
        self.layers = [random_packed(self.experts, self.n, self.k, storage) for _ in range(-(-layer_bytes // size))]
        self.bias = torch.randn(self.experts, self.n, device="cuda").to(torch.bfloat16)

    def measure(self, tokens: int, h_scale: str, options: Options, skew: float, repeats: int) -> dict[str, Any]:
        group = H_GROUPS[h_scale]
        launches = max(MIN_LAUNCHES if tokens < MANY_TOKENS else 4, len(self.layers))
        routings = [Routing(tokens, self.experts, skew) for _ in range(launches)]
        run = self._launcher(tokens, group, options)

        def launch(i: int) -> None:
            run(self.layers[i % len(self.layers)], routings[i])

        seconds = graph_seconds(torch.device("cuda"), launch, launches, launches, repeats)
        record = self._record(tokens, h_scale, options, routings, seconds)
        return record | {"plan": options.plan.name.lower(), "skew": skew}

    def _launcher(self, tokens: int, group: int, options: Options) -> Any:
        rows, none = tokens * TOP_K, torch.empty(0)
        groups = -(-INTER // group) if group else 0
        h = (torch.randn(rows, INTER, device="cuda") * 8).to(fp8_block.E4M3)
        h_scales = torch.rand(groups, rows, device="cuda") / 100
        scales = h_scales if group else None
        if self.product == "gate_up":
            x = (torch.randn(tokens, HIDDEN, device="cuda") * 64).to(fp8_block.E4M3)
            x_scale = torch.rand(-(-HIDDEN // 128), tokens, device="cuda") / 100

            def gate_up(packed: torch.Tensor, routing: Routing) -> None:
                moe_gate_up(
                    x, x_scale, packed, none, self.bias, routing.offsets, none, routing.slots, TOP_K, 7.0, 1.702,
                    self.layout, group, h, scales, options,
                )  # fmt: skip

            return gate_up
        weights = torch.rand(tokens, TOP_K, device="cuda")
        out = torch.empty(tokens, TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)

        def down(packed: torch.Tensor, routing: Routing) -> None:
            moe_down(
                h, scales, packed, none, self.bias, weights, routing.offsets, none, routing.slots, self.layout, group,
                out, options,
            )  # fmt: skip

        return down

    def _record(
        self, tokens: int, h_scale: str, options: Options, routings: list[Routing], seconds: float
    ) -> dict[str, Any]:
        distinct = statistics.mean(routing.distinct for routing in routings)
        counted = distinct * self.n * self.k * BYTES_PER_WEIGHT[self.storage]
        packed = distinct * packed_bytes(self.n, self.k, self.storage)
        return {
            "op": f"moe_{self.product}",
            "model": self.model,
            "storage": self.storage.name.lower(),
            "batch": tokens,
            "h_scale": h_scale,
            "k_split": options.k_split,
            "flags": options.flags,
            "experts": self.experts,
            "n": self.n,
            "k": self.k,
            "distinct_experts": round(distinct, 2),
            "counted_bytes": round(counted),
            "packed_bytes": round(packed),
            "operations": 2 * tokens * TOP_K * self.n * self.k,
            "tflop_per_s": round(2 * tokens * TOP_K * self.n * self.k / seconds / 1e12, 1),
            "us": round(seconds * 1e6, 2),
            "packed_tb_per_s": round(packed / seconds / 1e12, 3),
            "share_of_bound": round(counted / BANDWIDTH / seconds, 4),
        }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument("--product", nargs="+", choices=["gate_up", "down"], default=["gate_up", "down"])
    parser.add_argument("--storage", nargs="+", choices=["mxfp4", "fp8", "fp8_tiles"], default=["mxfp4", "fp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--h-scale", nargs="+", choices=list(H_GROUPS), default=["static"])
    parser.add_argument("--plan", nargs="+", choices=["auto", "wgmma", "prefill"], default=["wgmma"])
    parser.add_argument("--skew", type=float, default=0.0, help="how uneven experts are (0 uniform, 1 like a prompt)")
    parser.add_argument("--layer-gib", type=float, default=4.0, help="weights multiplied in turn, at least")
    parser.add_argument("--k-split", nargs="+", type=int, default=[0])
    parser.add_argument("--dependent-launch", action="store_true", help="launch with programmatic dependent launch")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--library", type=Path, help="another build of libgptoss_trt.so")
    parser.add_argument("--commit", help="the commit to record where there is no git")
    parser.add_argument("--label", help="a word for the record, to tell builds apart")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    if args.library is not None:
        library.SEARCH_PATHS = (args.library,)
    flags = library.DEPENDENT_LAUNCH | library.ROUTING_READY if args.dependent_launch else 0
    torch.manual_seed(0)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    extra = {"card": torch.cuda.get_device_name(), "commit": args.commit or commit(), "date": today}
    extra |= {"label": args.label} if args.label else {}
    for model, product, storage in itertools.product(args.model, args.product, args.storage):
        bench = Bench(model, product, Storage[storage.upper()], int(args.layer_gib * (1 << 30)))
        for tokens, plan, h_scale, split in itertools.product(args.batch, args.plan, args.h_scale, args.k_split):
            options = Options(Plan[plan.upper()], split, flags)
            line = json.dumps(extra | bench.measure(tokens, h_scale, options, args.skew, args.repeats))
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")
        del bench


if __name__ == "__main__":
    main()
