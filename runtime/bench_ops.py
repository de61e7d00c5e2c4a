"""`gptoss-trt bench ops`: each operator at a model's sizes against its own bound, one JSON line a case.

Invariant: a GPU is timed by replays of a graph whose calls go round several copies of the weights; a CPU by its clock.
Must not know what an operator computes.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import torch

from gptoss_trt.build_engine.shapes import MODELS, model_config
from gptoss_trt.build_engine.spec import Dense, Experts, Formats, HScale
from gptoss_trt.ops import attention_flashinfer, dispatch
from gptoss_trt.ops.gpu_clock import graph_seconds
from gptoss_trt.runtime.bench.bound import H200
from gptoss_trt.runtime.bench.op_cases import Case, Cases
from gptoss_trt.runtime.bench.record import card_name, source_commit
from gptoss_trt.runtime.bench_engine import read_counts, write_line
from gptoss_trt.runtime.engine.kernel_plan import use_plan

DECODE_OPS = (
    "embedding", "rmsnorm_quant", "dense", "kv_slots", "rope_kv_append", "attention_decode", "moe_route",
    "rmsnorm_route", "moe_gate_up", "moe_down", "moe_combine_norm", "sample", "feed",
)  # fmt: skip
PREFILL_OPS = tuple("attention_prefill" if op == "attention_decode" else op for op in DECODE_OPS)
CALLS = 16  # in one graph
REPEATS = 10
COPY_BYTES = 1 << 30  # of weights in all copies of a case; an H200 caches 60 MB


EPILOG = """\b
Examples:
  gptoss-trt bench ops --batch 1,64
  gptoss-trt bench ops --op moe_gate_up --op moe_down --prefill 1024,8192
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-oss-20b", help="Whose sizes.")
@click.option("--experts", type=click.Choice(get_args(Experts)), default="mxfp4", help="Storage of the experts.")
@click.option("--dense", type=click.Choice(get_args(Dense)), default="bf16",
              help="Storage of attention projections and lm head.")  # fmt: skip
@click.option("--h-scale", type=click.Choice(get_args(HScale)), default="static",
              help="Scales of the activations between the two expert products.")  # fmt: skip
@click.option("--batch", callback=read_counts, default="1,8,64", help="Decode batches.")
@click.option("--context", type=click.IntRange(1), default=1024, help="Keys of each sequence in decode.")
@click.option("--prefill", callback=read_counts, help="Prompt lengths.")
@click.option("--op", "only", multiple=True, help="Only this operator (repeatable).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where there is one.")
@click.option("--commit", help="What to write as the commit, instead of the clone's.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Append the lines to this file too.")
def ops(**given: Any) -> None:
    """Measure each operator against its own bound; one JSON line a case."""
    known = sorted({*DECODE_OPS, *PREFILL_OPS})
    for op in given["only"]:
        if op not in known:
            raise click.UsageError(f"no case for operator {op!r}; there are: {', '.join(known)}")
    device = torch.device(given["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    use_plan(None, device.type)
    formats = Formats(given["experts"], given["dense"], "bf16", given["h_scale"])
    cases = Cases(model_config(given["model"]), formats, device, COPY_BYTES if device.type == "cuda" else 0)
    shared = {
        "card": card_name(device),
        "commit": given["commit"] or source_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **{name: given[name] for name in ("model", "experts", "dense", "h_scale")},
    }
    failed = 0
    for op, tokens, decode in _plan(given):
        try:
            made = cases.make(op, tokens, given["context"], decode)
            for case in made:
                for record in _records(case, tokens, decode, device):
                    context = given["context"] if decode else tokens
                    write_line({**shared, **record, "context": context}, given["out"])
        except Exception as error:  # one operator that fails must not cost the others
            failed += 1
            click.echo(f"{op} at {tokens} tokens: {type(error).__name__}: {error}", err=True)
    if failed:
        raise click.ClickException(f"{failed} operators failed")


def _plan(given: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    sizes = [(tokens, True) for tokens in given["batch"]] + [(tokens, False) for tokens in given["prefill"]]
    for tokens, decode in sizes:
        for op in DECODE_OPS if decode else PREFILL_OPS:
            if not given["only"] or op in given["only"]:
                yield op, tokens, decode


def _records(case: Case, tokens: int, decode: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of the default, then of the other implementations that have a kernel for the case."""
    yield _record(case, tokens, decode, device)
    for name, reason in case.others.items():
        if reason is not None:
            click.echo(f"{case.op} {case.what} at {tokens} tokens: {name} is not measured: {reason}", err=True)
            continue
        dispatch.select(case.op, name)
        try:
            with attention_flashinfer.kept_plans():
                yield _record(case, tokens, decode, device)
        finally:
            dispatch.select(case.op, None)


def _record(case: Case, tokens: int, decode: bool, device: torch.device) -> dict[str, Any]:
    seconds = _on_gpu(case, device) if device.type == "cuda" else _on_cpu(case)
    bound = H200.seconds(case.bytes_moved, case.fp8_flop, case.bf16_flop)
    return {
        "op": case.op,
        "what": case.what,
        "implementation": dispatch.preferred(case.op) if device.type == "cuda" else "cpu",
        "kind": "decode" if decode else "prefill",
        "tokens": tokens,
        "us": round(seconds * 1e6, 2),
        "tb_s": round(case.bytes_moved / seconds / 1e12, 3),
        "tflop_s": round((case.fp8_flop + case.bf16_flop) / seconds / 1e12, 2),
        "share_of_bound": round(bound / seconds, 4),
    }


def _on_gpu(case: Case, device: torch.device) -> float:
    """Median seconds of a call over replays of a graph of at least CALLS calls."""
    return graph_seconds(device, case.call, case.copies, max(CALLS, case.copies), REPEATS)


def _on_cpu(case: Case) -> float:
    """Median seconds of a few calls after one that warms up."""
    case.call(0)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        case.call(0)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
