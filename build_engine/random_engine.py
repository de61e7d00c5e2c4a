"""`gptoss-trt bench random-engine`: an engine of a full-size model whose weights are made at load from a seed.

Invariant: the directory holds the manifest and the tokenizer's files only. Must not know how weights are made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from gptoss_trt.build_engine.engine_folder import BuildingFolder
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.shapes import MODELS, model_config
from gptoss_trt.build_engine.spec import (
    MANIFEST_NAME,
    RANDOM_SEED,
    Dense,
    Experts,
    Formats,
    HScale,
    Kv,
    Manifest,
    ParallelMapping,
)
from gptoss_trt.build_engine.tokenizer_files import write_tokenizer_files

EPILOG = """\b
Examples:
  gptoss-trt bench random-engine engine-120b/ --model gpt-oss-120b
  gptoss-trt serve engine-120b/
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-oss-20b", help="Shape of the model.")
@click.option("--experts", type=click.Choice(get_args(Experts)), default="mxfp4", help="Storage of the experts.")
@click.option("--dense", type=click.Choice(get_args(Dense)), default="bf16",
              help="Storage of attention projections and lm head.")  # fmt: skip
@click.option("--kv", type=click.Choice(get_args(Kv)), default="bf16", help="KV cache format.")
@click.option("--h-scale", type=click.Choice(get_args(HScale)), default="static",
              help="Scales of the activations between the two expert products.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 256), help="Layers, instead of the model's.")
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, help="Of the weights.")
@click.option("--force", is_flag=True, help="Replace an engine that is there.")
def random_engine(out: Path, **chosen: Any) -> None:
    """Write OUT, an engine whose weights are random numbers made at load: no weight file, whatever the model."""
    formats = Formats(chosen["experts"], chosen["dense"], chosen["kv"], chosen["h_scale"])
    try:
        write_random_engine(
            out, chosen["model"], formats, layers=chosen["layers"], seed=chosen["seed"], force=chosen["force"]
        )
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {chosen['model']}, random weights of seed {chosen['seed']}, made at load")


def write_random_engine(
    out: Path, model: str, formats: Formats, *, layers: int | None = None, seed: int = 0, force: bool = False
) -> None:
    """Writes such an engine. Raises CheckpointError when `out` is there and `force` is not given."""
    with BuildingFolder(out, force=force) as folder:
        manifest = Manifest(
            model_config(model, layers), formats, ParallelMapping(), {}, provenance={RANDOM_SEED: seed, "model": model}
        )
        (folder.path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        if model != "tiny":  # its vocabulary is not Harmony's
            write_tokenizer_files(folder.path)
        folder.publish()
