"""The commands around perf_analyzer: `bench inputs`, `bench profile` and `bench perf-analyzer`.

Invariant: each prints or writes what it was asked for and nothing else. Must not know how files are made.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gptoss_trt.client.bench.inputs import input_data
from gptoss_trt.client.bench.measure import Slo
from gptoss_trt.client.bench.perf_analyzer import CACHE, UnavailableError, command, write_script
from gptoss_trt.client.bench.profile import ProfileError, read_profile
from gptoss_trt.client.bench.report import json_line, print_tables
from gptoss_trt.client.bench.serve_cli import lengths
from gptoss_trt.client.bench.workload import FORMS, Lengths, synthetic

HELP = {"help_option_names": ["-h", "--help"]}
EPILOG = """\b
Examples:
  gptoss-trt bench inputs --model ensemble --out inputs.json
  gptoss-trt bench perf-analyzer -- -m ensemble -i grpc -u localhost:8001 \\
      --streaming --async --input-data inputs.json --request-count 32 \\
      --concurrency-range 4 --profile-export-file profile.json
  gptoss-trt bench profile profile.json
\b
  gptoss-trt bench perf-analyzer --script ~/bin
  genai-perf profile -m ensemble --backend tensorrtllm --streaming \\
      --url localhost:8001 --tokenizer engine/

--request-count needs a profile file that does not exist yet.
"""


@click.command(epilog=EPILOG, context_settings=HELP)
@click.option("--model", type=click.Choice(sorted(FORMS)), default="ensemble", show_default=True,
              help="Triton model that the requests are for.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), default=32, show_default=True, help="Requests in the file.")
@click.option("--input-tokens", metavar="LENGTH", callback=lengths, default="128", show_default=True,
              help="512, uniform:64,1024 or normal:512,128.")  # fmt: skip
@click.option("--output-tokens", metavar="LENGTH", callback=lengths, default="64", show_default=True,
              help="Most tokens of an answer, in the same forms.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and lengths.")
@click.option("--streaming/--whole", default=True, show_default=True, help="Whether requests ask for a stream.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
def inputs(
    model: str, count: int, input_tokens: Lengths, output_tokens: Lengths, seed: int, streaming: bool, out: Path
) -> None:
    """Write requests as a file for perf_analyzer's --input-data."""
    requests = synthetic(model, input_tokens, output_tokens, seed)
    data = input_data(model, requests, count, streaming=streaming)
    out.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


@click.command(epilog=EPILOG, context_settings=HELP)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0.0), help="Goodput: most milliseconds to the first token.")
@click.option("--slo-tpot-ms", type=click.FloatRange(min=0.0), help="Goodput: most milliseconds between tokens.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines in place of the table.")
def profile(file: Path, slo_ttft_ms: float | None, slo_tpot_ms: float | None, as_json: bool) -> None:
    """Read a profile that perf_analyzer exported, with tokens counted by the server's own counts."""
    slo = None if slo_ttft_ms is None and slo_tpot_ms is None else Slo(slo_ttft_ms, slo_tpot_ms)
    try:
        experiments = read_profile(file, slo)
    except ProfileError as error:
        raise click.ClickException(str(error)) from error
    lines: list[dict[str, Any]] = [
        {"kind": "perf_analyzer", "load": load, **summary.line()} for load, summary in experiments
    ]
    if as_json:
        for line in lines:
            click.echo(json_line(line))
    else:
        print_tables(lines, Console())


@click.command(
    name="perf-analyzer",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    epilog=EPILOG,
)
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), default=CACHE, show_default=True,
              help="Folder for the download.")  # fmt: skip
@click.option(
    "--script",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Only write a script named perf_analyzer there; with it on PATH genai-perf 0.0.16 works.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def perf_analyzer(cache: Path, folder: Path | None, arguments: tuple[str, ...]) -> None:
    """Run perf_analyzer 2.51 with the arguments given; the first run downloads it into a cache folder."""
    try:
        if folder is not None:
            click.echo(write_script(folder, cache))
            return
        line, environment = command(list(arguments), cache)
    except (UnavailableError, FileExistsError) as error:
        raise click.ClickException(str(error)) from error
    os.execve(line[0], line, environment)
