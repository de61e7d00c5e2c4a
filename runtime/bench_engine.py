"""`gptoss-trt bench engine`: decode and prefill of the bare engine, one record a cell as soon as it is measured.

Invariant: a cell that fails is reported and the others still run; the exit status is then 1. Must not know operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import click
import torch

from gptoss_trt.build_engine.random_engine import write_random_engine
from gptoss_trt.build_engine.shapes import MODELS, model_config
from gptoss_trt.build_engine.spec import Dense, Experts, Formats, HScale, SpecError
from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.bench.cells import FULL, QUICK, STEP_TOKENS, Bench, Effort
from gptoss_trt.runtime.bench.client_cells import ClientBench
from gptoss_trt.runtime.bench.record import Cell, Setting, card_name, line, record, source_commit
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.kernel_plan import use_plan
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.prefill_weights import copy_experts
from gptoss_trt.runtime.model.graphed import GraphedModel
from gptoss_trt.runtime.model.loader import RankWeights, load_weights, random_weights
from gptoss_trt.runtime.model.model import GptOssModel

BATCHES = (1, 8, 32, 64, 128)
DECODE = ((1024, BATCHES), (8192, BATCHES))
PREFILL = (1024, 4096, 8192, 32768)


Counts = tuple[int, ...]
DecodeCells = tuple[tuple[int, Counts], ...]


def counts(text: str) -> Counts:
    """1,8,64 -> (1, 8, 64). Raises BadParameter."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,8,64") from error
    if min(found) < 1:
        raise click.BadParameter(f"{text!r} holds {min(found)}; the least is 1")
    return found


def read_counts(_context: click.Context, _option: click.Parameter, text: str | None) -> Counts:
    """An option's callback: counts(text), none of them without the option."""
    return () if text is None else counts(text)


def _read_decode_cells(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> DecodeCells:
    """1024:1,8 -> (1024, (1, 8)), for each use of the option."""
    cells = []
    for text in texts:
        context, colon, batches = text.partition(":")
        if not colon or not context.isdigit() or int(context) < 1:
            raise click.BadParameter(f"{text!r} is not a context and batch sizes such as 1024:1,8,64")
        cells.append((int(context), counts(batches)))
    return tuple(cells)


@dataclass(frozen=True)
class Options:
    """The command's options, by their names there."""

    model: str
    is_random: bool
    engine_dir: Path | None
    experts: Experts
    dense: Dense
    h_scale: HScale
    layers: int | None
    decode_cells: DecodeCells
    prefill_cells: Counts
    steps: int | None
    quick: bool
    block_tokens: int
    run_ahead: bool
    prefill_weights: str
    deterministic: bool
    at: Literal["core", "client"]
    device: str | None
    seed: int
    usd_per_hour: float
    commit: str | None
    as_json: bool
    out: Path | None


EPILOG = """\b
Examples:
  gptoss-trt bench engine --random --model gpt-oss-20b --decode 1024:1,64
  gptoss-trt bench engine --engine engine/ --prefill 1024,8192 --json

share_of_bound is the least time that an H200 could take (runtime/bench/bound.py) over the time measured.
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-oss-20b", help="Shape of a random engine.")
@click.option("--random", "is_random", is_flag=True, help="Make the engine from a seed, on its device.")
@click.option("--engine", "engine_dir", type=click.Path(path_type=Path), help="An engine directory instead.")
@click.option("--experts", type=click.Choice(get_args(Experts)), default="mxfp4", help="Storage of the experts.")
@click.option("--dense", type=click.Choice(get_args(Dense)), default="bf16",
              help="Storage of attention projections and lm head.")  # fmt: skip
@click.option("--h-scale", type=click.Choice(get_args(HScale)), default="static",
              help="Scales of the activations between the two expert products.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 256), help="Layers of a random engine, instead of the model's.")
@click.option(
    "--decode", "decode_cells", callback=_read_decode_cells, multiple=True, help="CONTEXT:BATCHES, as 1024:1,8."
)
@click.option("--prefill", "prefill_cells", callback=read_counts, help="Prompt lengths, as 1024,4096.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Decode steps a cell, instead of 100 (--quick: 20); of one sequence at a client 4 times as many.",
)
@click.option("--quick", is_flag=True, help="Fewer steps and repetitions.")
@click.option("--block-tokens", type=click.IntRange(1, 64), default=64, help="Tokens of a KV block.")
@click.option("--run-ahead/--serial", default=True, help="Launch steps before the last one's tokens are known.")
@click.option("--prefill-weights", default="auto", help="FP8 copies of experts: auto, none, or GiB.")
@click.option("--deterministic", is_flag=True, help="Bits that do not depend on the batch, on a GPU.")
@click.option(
    "--at", type=click.Choice(["core", "client"]), default="core", help="In this process, or at a client of one."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda where there is one.")
@click.option("--seed", type=int, default=0, help="Of weights and prompts.")
@click.option("--usd-per-hour", type=float, default=3.0, help="Price of the GPU.")
@click.option("--commit", help="What to write as the commit, instead of the clone's.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Append the JSON lines to this file too.")
def engine(**given: Any) -> None:
    """Measure decode and prefill of the bare engine.

    Without --decode and --prefill: all cells of the results table. Every cell is one line, written as it comes.
    """
    options = Options(**given)
    if options.is_random == (options.engine_dir is not None):
        raise click.UsageError("give either --random or --engine DIRECTORY")
    if options.layers is not None and not options.is_random:
        raise click.UsageError("--layers belongs to --random")
    where = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError(f"--device is cuda, but torch {torch.__version__} sees no GPU here")
    effort = QUICK if options.quick else FULL
    if options.steps is not None:
        effort = dataclasses.replace(effort, steps=options.steps)
    try:
        failed = _measure(options, effort, where)
    except (SpecError, EngineLoadError) as error:
        raise click.ClickException(str(error)) from error
    if failed:
        raise click.ClickException(f"{failed} cells failed")


def _measure(options: Options, effort: Effort, where: torch.device) -> int:
    """All cells, each reported as it comes; how many failed."""
    began = time.perf_counter()
    failed = 0
    with (_client_bench if options.at == "client" else _core_bench)(options, effort, where) as (bench, name, formats):
        click.echo(f"{name}: ready in {time.perf_counter() - began:.1f} s", err=True)
        commit = options.commit or source_commit()
        setting = Setting(name, formats, card_name(where), commit, options.usd_per_hour, on_gpu=where.type == "cuda")
        for what, measure in _cells(bench, options):
            failed += not _report(setting, what, measure, options)
    return failed


@contextlib.contextmanager
def _core_bench(options: Options, effort: Effort, where: torch.device) -> Iterator[tuple[Bench, str, Formats]]:
    """The engine core in this process: a bench, the name that records give the model, its formats."""
    chosen = EngineOptions(
        prefill_weights=options.prefill_weights, step_tokens=STEP_TOKENS, deterministic=options.deterministic
    )
    use_plan(options.engine_dir, where.type, deterministic=chosen.deterministic)
    if where.type == "cuda":
        dispatch.be_invariant(chosen.deterministic)
    weights, name = _weights(options, where)
    formats = _as_run(weights.manifest.formats, where)
    loaded = GptOssModel(weights, where)
    del weights
    loaded.one_launch = chosen.one_launch and not chosen.deterministic
    copy_experts(loaded, chosen)
    model = GraphedModel(loaded)
    yield Bench(model, formats, options.block_tokens, effort, options.seed, run_ahead=options.run_ahead), name, formats


@contextlib.contextmanager
def _client_bench(options: Options, effort: Effort, where: torch.device) -> Iterator[tuple[ClientBench, str, Formats]]:
    """An engine process of its own, seen by its client."""
    with tempfile.TemporaryDirectory() as folder:
        engine_dir, name = options.engine_dir, options.model
        if engine_dir is None:
            engine_dir = Path(folder) / "engine"
            formats = Formats(options.experts, options.dense, "bf16", options.h_scale)
            write_random_engine(engine_dir, options.model, formats, layers=options.layers, seed=options.seed)
        else:
            name = engine_dir.name
        most = max((batch for _, batches in _chosen(options)[0] for batch in batches), default=1)
        chosen = EngineOptions(
            block_tokens=options.block_tokens, max_batch=most, step_tokens=STEP_TOKENS, device=where.type,
            prefix_cache=False, run_ahead=options.run_ahead, prefill_weights=options.prefill_weights,
            deterministic=options.deterministic,
        )  # fmt: skip
        with ClientBench(engine_dir, Path(folder) / "state", chosen, effort, options.seed) as bench:
            yield bench, name, _as_run(bench.formats, where)


def _weights(options: Options, device: torch.device) -> tuple[RankWeights, str]:
    """Weights and the name that records give the model."""
    if options.engine_dir is not None:
        return load_weights(options.engine_dir, 0, device, 1), options.engine_dir.name
    config = model_config(options.model, options.layers)
    formats = Formats(options.experts, options.dense, "bf16", options.h_scale)
    return random_weights(config, formats, options.seed, device), options.model


def _as_run(formats: Formats, device: torch.device) -> Formats:
    """The formats with the weight layout that the model really runs on: prepare_experts packs at load on a GPU."""
    packs = device.type == "cuda" and dispatch.layout_of("moe_gate_up") == "sm90_v1"
    return dataclasses.replace(formats, weight_layout="sm90_v1") if packs else formats


def _chosen(options: Options) -> tuple[DecodeCells, Counts]:
    if not options.decode_cells and not options.prefill_cells:
        return DECODE, PREFILL
    return options.decode_cells, options.prefill_cells


def _cells(bench: Bench | ClientBench, options: Options) -> Iterator[tuple[str, Callable[[], Cell]]]:
    decode_cells, prefill_cells = _chosen(options)
    for context, batches in decode_cells:
        for batch in batches:
            yield f"decode of {batch} at {context}", functools.partial(bench.decode, context, batch)
    for tokens in prefill_cells:
        yield f"prefill of {tokens}", functools.partial(bench.prefill, tokens)


def _report(setting: Setting, what: str, measure: Callable[[], Cell], options: Options) -> bool:
    """Measures and prints a cell; False, with the reason on the error stream, when it failed for whatever reason: a
    cell that does not fit must not cost the others."""
    try:
        values = record(setting, measure()) | ({"deterministic": True} if options.deterministic else {})
    except Exception as error:
        click.echo(f"{setting.model} {what}: {type(error).__name__}: {error}", err=True)
        return False
    write_line(values, options.out, text=line(values, options.as_json, setting.on_gpu))
    return True


def write_line(values: dict[str, Any], out: Path | None, *, text: str | None = None) -> None:
    """Prints `text` (or the JSON object) at once and appends the JSON object to `out`."""
    click.echo(json.dumps(values) if text is None else text)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
