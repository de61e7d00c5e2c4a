"""The commands `build` and `inspect`: arguments in, text or JSON out.

Invariant: results go to standard output, progress and errors to standard error; errors of use end with status 2,
failures with 1. Must not know file formats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from tqdm import tqdm

from gptoss_trt.build_engine import inspection
from gptoss_trt.build_engine.builder import BuildOptions, BuildResult, build_engine
from gptoss_trt.build_engine.names import LAYOUTS
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import PARALLEL_SIZES, Dense, Experts, HScale, Kv, ParallelMapping, SpecError
from gptoss_trt.ops import plan
from gptoss_trt.reference.mxfp4 import FormatError

_SIZES = ", ".join(map(str, PARALLEL_SIZES))
_ONE_RANK = "`gptoss-trt serve` runs one rank so far."
MOST_TUNED_TOKENS = 8192
_HELP = {"help_option_names": ["-h", "--help"]}


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, SpecError, FormatError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'disk'}: {error.strerror}") from error


@contextlib.contextmanager
def _progress_bar(text: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on standard error, shown on terminals only."""
    with tqdm(desc=text, unit="B", unit_scale=True, disable=True if quiet else None, file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def _read_tokens(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """1,64 -> (1, 64)."""
    parts = text.split(",") if text else []
    if not all(part.isdigit() and 1 <= int(part) <= MOST_TUNED_TOKENS for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 1 to {MOST_TUNED_TOKENS}, such as 1,64")
    return tuple(map(int, parts))


BUILD_EPILOG = """\b
Examples:
  gptoss-trt build gpt-oss-20b/ --out engine/
  gptoss-trt build gpt-oss-120b/ --out engine/ --dense fp8_block128
  gptoss-trt build my-finetune-bf16/ --out engine/ --experts mxfp4 --force
  gptoss-trt build engine/ --tune

CHECKPOINT is a folder with config.json and safetensors in any of these layouts: OpenAI's original/, Hugging Face with
MXFP4 experts, Hugging Face in BF16, an nvidia-modelopt FP8 export. With --tune and without --out it is an engine that
was built before.

--tune times the kernels and tiles that the engine's shapes may take on this GPU, and writes the fastest to
tune/GPU.json in the engine; within 2% the shipped choice stays. The runtime follows that file on a GPU of the same
name, before the plan that is shipped for it. A plan changes which rounding a result has, as another number of tokens
does.
"""


@click.command(epilog=BUILD_EPILOG, context_settings=_HELP)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option(
    "--experts",
    type=click.Choice(get_args(Experts)),
    help="Storage of the experts. Default: mxfp4 from MXFP4, fp8_block128 from BF16 and FP8. "
    "mxfp4 from those is encoded anew, its error reported.",
)
@click.option("--dense", type=click.Choice(get_args(Dense)), default="bf16", show_default=True,
              help="Storage of attention projections and lm head.")  # fmt: skip
@click.option("--kv", type=click.Choice(get_args(Kv)), default="bf16", show_default=True, help="KV cache format.")
@click.option("--h-scale", type=click.Choice(get_args(HScale)), default="static", show_default=True,
              help="Scales of the activations between the two expert products.")  # fmt: skip
@click.option(
    "--tp",
    type=int,
    default=1,
    show_default=True,
    help=f"Tensor-parallel ranks of each data-parallel group: {_SIZES}. {_ONE_RANK}",
)
@click.option(
    "--ep",
    type=int,
    default=1,
    show_default=True,
    help=f"Groups of the tp x dp ranks that share out the experts: {_SIZES}.",
)
@click.option("--dp", type=int, default=1, show_default=True, help=f"Data-parallel groups: {_SIZES}.")
@click.option("--workers", type=click.IntRange(1, 64), help="Threads, one weight each. Default: processors, at most 8.")
@click.option("--force", is_flag=True, help="Replace an engine that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--tune", is_flag=True, help="Measure a plan of kernels for the engine on this GPU.")
@click.option("--tune-op", multiple=True, type=click.Choice(list(plan.OPS)), help="Only this op (repeatable).")
@click.option("--tune-tokens", callback=_read_tokens, help="Numbers of tokens, as 1,64. Default: 1, 2, 4 to 8192.")
def build(**given: Any) -> None:
    """Build an engine directory from CHECKPOINT.

    Reads weight by weight with bounded memory, converts, cuts for every rank, and gives the engine its name only when
    it is whole. Says block by block whether the FP8 weights equal the checkpoint's.
    """
    tune, ops, tokens = (given.pop(name) for name in ("tune", "tune_op", "tune_tokens"))
    if not tune and (ops or tokens):
        raise click.UsageError("--tune-op and --tune-tokens belong to --tune")
    checkpoint, out = given["checkpoint"], given["out"]
    if tune and (given["tp"], given["ep"], given["dp"]) != (1, 1, 1):
        raise click.UsageError("--tune takes engines of one rank")
    if tune:
        _check_gpu()
    if out is not None:
        if inspection.is_engine(checkpoint):
            raise click.UsageError(f"{checkpoint} is an engine; --out builds one of a checkpoint")
        _build(**given)
    elif not tune:
        raise click.UsageError("Missing option '--out'.")
    elif not inspection.is_engine(checkpoint):
        raise click.UsageError(f"{checkpoint} is a checkpoint: --out names the engine to build and tune")
    else:
        _refuse_build_options()
    if tune:
        _tune(checkpoint if out is None else out, ops, tokens, to_errors=given["as_json"])


def _build(
    checkpoint: Path, out: Path, experts: Experts | None, dense: Dense, kv: Kv, h_scale: HScale,
    tp: int, ep: int, dp: int, workers: int | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    try:
        mapping = ParallelMapping(tp=tp, ep=ep, dp=dp)
    except SpecError as error:
        raise click.UsageError(str(error)) from error
    if mapping.world > 1:  # ahead of a build, which may take long
        click.echo(f"warning: an engine of {mapping.world} ranks can be built and inspected; {_ONE_RANK}", err=True)
    options = BuildOptions(
        experts=experts, dense=dense, kv=kv, h_scale=h_scale, mapping=mapping, force=force, workers=workers
    )
    with _failures(), _progress_bar("build", as_json) as progress:
        result = build_engine(checkpoint, out, options, progress)
    click.echo(json.dumps(_result_json(out, result), indent=1) if as_json else "\n".join(_result_text(out, result)))


def _refuse_build_options() -> None:
    """Where an engine is tuned and not built."""
    context = click.get_current_context()
    for name in context.params:
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if typed and name != "checkpoint" and not name.startswith("tune"):
            raise click.UsageError(
                f"--{name.removeprefix('as_').replace('_', '-')} belongs to building, not to an engine"
            )


def _check_gpu() -> None:
    """Ahead of a build, which may take long."""
    from gptoss_trt.build_engine.tune_gpu import TuneError, require_gpu

    try:
        require_gpu()
    except TuneError as error:
        raise click.ClickException(str(error)) from error


def _tune(engine_dir: Path, ops: tuple[str, ...], tokens: tuple[int, ...], *, to_errors: bool) -> None:
    """Measures and writes; a line for each op, shape and number of tokens as it comes."""
    from gptoss_trt.build_engine import tune
    from gptoss_trt.build_engine.tune_gpu import TuneError

    click.echo("us by op, shape and tokens; * chosen, - refused or another result", err=to_errors)
    try:
        with _failures():
            path = tune.tune_engine(
                engine_dir, lambda row: click.echo(str(row), err=to_errors), ops=ops or tuple(plan.OPS),
                tokens=tokens or tune.TOKENS,
            )  # fmt: skip
    except (TuneError, plan.PlanError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{path}: written", err=to_errors)


def _result_json(out: Path, result: BuildResult) -> dict[str, Any]:
    manifest = dataclasses.asdict(result.manifest)
    return {
        "engine": str(out),
        "formats": manifest["formats"],
        "mapping": manifest["mapping"],
        "layout": result.manifest.provenance["layout"],
        "exactness": manifest["exactness"],
        "files": manifest["files"],
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
        "seconds": round(result.seconds, 3),
        "gb_per_second": round(result.gb_per_second, 3),
    }


def _result_text(out: Path, result: BuildResult) -> Iterator[str]:
    manifest = result.manifest
    mapping, formats = manifest.mapping, dataclasses.asdict(manifest.formats)
    yield f"{out}: {manifest.model.num_layers} layers, {manifest.model.num_experts} experts, world {mapping.world}"
    yield f"  from     {LAYOUTS[manifest.provenance['layout']]}"
    yield f"  formats  {' '.join(f'{name}={value}' for name, value in formats.items())}"
    yield from _exactness_text(manifest.exactness)
    yield (
        f"  read {result.bytes_read / 1e9:.2f} GB, wrote {result.bytes_written / 1e9:.2f} GB in {result.seconds:.1f} s "
        f"({result.gb_per_second:.2f} GB/s)"
    )


def _exactness_text(exactness: Any) -> Iterator[str]:
    blocks = exactness.get("mxfp4_blocks")
    if blocks:
        at = blocks["largest_spread_at"]
        yield (
            f"  MXFP4 as FP8 128x128: {blocks['exact']} of {blocks['total']} blocks exact, {blocks['rounded']} "
            f"rounded; largest spread {blocks['largest_spread_octaves']} octaves at {at['tensor']}, "
            f"expert {at['expert']}, block {at['block']}"
        )
        for place in blocks["rounded_at"]:
            yield f"    rounded: {place['tensor']}, expert {place['expert']}: {place['blocks']} blocks"
    for name, error in exactness.get("relative_rms_error", {}).items():
        yield f"  {name}: relative rms error {error:.3e}" + (" (exact)" if error == 0 else "")


INSPECT_EPILOG = """\b
Examples:
  gptoss-trt inspect gpt-oss-20b/
  gptoss-trt inspect engine/ --verify
  gptoss-trt inspect engine/ --tensor layers.0.moe.gate_up --json
"""


@click.command(epilog=INSPECT_EPILOG, context_settings=_HELP)
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--verify", is_flag=True, help="Read everything: checksums, shapes, numbers. Status 1 if anything is wrong."
)
@click.option("--tensor", metavar="NAME", help="Dequantise one tensor and print its statistics.")
@click.option("--rank", type=int, default=0, show_default=True, help="Rank of an engine whose tensor is looked at.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def inspect(path: Path, verify: bool, tensor: str | None, rank: int, as_json: bool) -> None:
    """Describe or verify PATH, an engine directory or a checkpoint."""
    problems: list[str] = []
    with _failures():
        if tensor is not None:
            result = inspection.tensor_statistics(path, tensor, rank)
        else:
            result = inspection.describe(path)
            if verify:
                with _progress_bar("verify", as_json) as progress:
                    problems = inspection.verify(path, progress)
                result = {"kind": result["kind"], "path": result["path"], "ok": not problems, "problems": problems}
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        click.echo("\n".join(_verdict(result) if "problems" in result else _plain_lines(result, "")))
    if problems:
        raise click.exceptions.Exit(1)


VERIFIED = {
    "engine": "every file has the manifest's length and checksum, every tensor its name, shape and format",
    "checkpoint": "every tensor has its name, shape and dtype, every number is one",
}


def _verdict(result: dict[str, Any]) -> Iterator[str]:
    """What --verify found, for people."""
    kind, path, problems = result["kind"], result["path"], result["problems"]
    if not problems:
        yield f"{kind} {path} is right: {VERIFIED[kind]}"
        return
    yield f"{kind} {path} is wrong; problems: {len(problems)}"
    yield from (f"  {problem}" for problem in problems)


def _plain_lines(value: dict[str, Any], indent: str) -> Iterator[str]:
    for name, entry in value.items():
        if isinstance(entry, dict) and entry:
            yield f"{indent}{name}:"
            yield from _plain_lines(entry, indent + "  ")
        elif isinstance(entry, list | tuple) and entry and isinstance(entry[0], str) and len(set(entry)) > 2:
            yield f"{indent}{name}:"
            yield from (f"{indent}  {item}" for item in entry)
        else:
            yield f"{indent}{name}: {_plain(entry)}"


def _plain(entry: Any) -> str:
    if isinstance(entry, list | tuple):
        if not entry:
            return "none"
        names = list(dict.fromkeys(entry)) if isinstance(entry[0], str) else list(entry)
        return ", ".join(map(str, names)) + (f", ... ({len(entry)})" if len(names) < len(entry) else "")
    return f"{entry:.6g}" if isinstance(entry, float) else str(entry)
