"""The `bench serve` command: its options, and where results go.

Invariant: stdout holds the tables or the JSON lines, progress goes to stderr. Must not know how a request is sent.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gptoss_trt.client.bench.cost import Price
from gptoss_trt.client.bench.load import Level, Target
from gptoss_trt.client.bench.measure import Slo
from gptoss_trt.client.bench.report import Line, json_line, print_tables, write_report
from gptoss_trt.client.bench.sweep import Sweep, run_sweep
from gptoss_trt.client.bench.workload import Lengths
from gptoss_trt.client.connect import DEFAULT_URL, split_url
from gptoss_trt.client.errors import NO_SERVER, ServerError
from gptoss_trt.client.requests import Sampling

DEFAULT_CONCURRENCY = (1.0, 2.0, 4.0, 8.0)

EPILOG = """\b
Examples:
  gptoss-trt bench serve --concurrency 1,8 --input-tokens 512
  gptoss-trt bench serve --model chat --dataset chats.jsonl \\
      --request-rate 2,4 --slo-ttft-ms 500 --slo-tpot-ms 20
  gptoss-trt bench serve --gpu-hour-usd 3 --json > results.jsonl

Tokens are counted by the server's num_output_tokens or usage. Time between tokens is (last - first) / (tokens - 1).
Throughput counts requests that succeeded; the rest are in `errors`. Goodput is good requests a second.

Cost (--gpu-hour-usd): a pass with one token of answer measures the prompt rate P; of a level of T seconds with I input
and O output tokens, F = min(T, I / P) seconds are prefill: USD/M in = 1e6 p F / I, USD/M out = 1e6 p (T - F) / O,
with p the price of a second on all GPUs. A --dataset's prompts repeat in that pass: a prefix cache makes it faster.
"""


def lengths(_ctx: click.Context, _option: click.Parameter, text: str) -> Lengths:
    """A length option's value, or an error of use that shows the forms."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def levels(_ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Comma-separated positive numbers; whole ones for --concurrency."""
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    whole = option.name == "concurrency"
    if not numbers or min(numbers) <= 0 or (whole and not all(number.is_integer() for number in numbers)):
        raise click.BadParameter(f"{text!r} is no list of positive {'whole ' if whole else ''}numbers, like 1,2,4")
    return numbers


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Server: grpc://host:port or http://host:port.")
@click.option(
    "--model",
    type=click.Choice(["ensemble", "tensorrt_llm", "tensorrt_llm_bls", "chat"]),
    default="tensorrt_llm",
    show_default=True,
    help="Triton model to load: token ids (tensorrt_llm), text or chats.",
)
@click.option("--served-name", default="gpt-oss", show_default=True, help="`model` in the bodies sent to chat.")
@click.option(
    "--concurrency", metavar="LIST", callback=levels, help="Requests in flight, one level each.  [default: 1,2,4,8]"
)
@click.option(
    "--request-rate", metavar="LIST", callback=levels, help="Requests a second (Poisson arrivals), one level each."
)
@click.option("--requests", type=click.IntRange(min=1), help="Requests of a level.  [default: 4 a slot, at least 16]")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Requests before each level, not counted.",
)
@click.option(
    "--input-tokens",
    metavar="LENGTH",
    callback=lengths,
    default="512",
    show_default=True,
    help="512, uniform:64,1024 or normal:512,128.",
)
@click.option(
    "--output-tokens",
    metavar="LENGTH",
    callback=lengths,
    default="128",
    show_default=True,
    help="Most tokens of an answer, in the same forms.",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens that all prompts begin with (a prefix cache's work).",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with prompt, input_ids or messages; max_tokens optional. Levels take them in turn, over and over.",
)
@click.option(
    "--ignore-eos/--stop-at-eos", default=True, show_default=True, help="Raw models write all tokens asked for."
)
@click.option("--temperature", type=click.FloatRange(min=0.0), help="Sample (with top_p 1); greedy unless given.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts, lengths and arrivals."
)
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0.0), help="Goodput: most milliseconds to the first token.")
@click.option("--slo-tpot-ms", type=click.FloatRange(min=0.0), help="Goodput: most milliseconds between tokens.")
@click.option("--gpu-hour-usd", type=click.FloatRange(min=0.0, min_open=True), help="Price of a GPU hour; adds costs.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that the server uses.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Of one request.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout in place of tables.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write a text report.")
@click.option("--records", type=click.Path(dir_okay=False, path_type=Path), help="Write every request as a JSON line.")
def serve(**options: Any) -> None:
    """Load a server at one level after another and report what it did. Exit status 1 when no request succeeded."""
    try:
        sweep = sweep_of(options)
        sweep.source(salt=0)
        split_url(sweep.url)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    notes = Console(stderr=True)

    def on_line(line: Line) -> None:
        if options["as_json"]:
            click.echo(json_line(line))
        else:
            notes.print(f"{line['load']}: {line['output_tok_s']:,.1f} tokens/s", markup=False, highlight=False)

    try:
        results = asyncio.run(run_sweep(sweep, on_line))
    except ServerError as error:
        raise click.ClickException(f"{sweep.url}: {error}\n{NO_SERVER}") from error
    finish(options, [line for line, _level in results], [level for _line, level in results])


def sweep_of(options: dict[str, Any]) -> Sweep:
    """The run that the options describe. Raises ValueError where they contradict each other."""
    rates, counts = options["request_rate"], options["concurrency"]
    if rates and counts:
        raise ValueError("--concurrency and --request-rate are two kinds of load; give one")
    kind = "request_rate" if rates else "concurrency"
    temperature = options["temperature"]
    sampling = Sampling() if temperature is None else Sampling(temperature=temperature, top_p=1.0)
    ttft, tpot, usd = options["slo_ttft_ms"], options["slo_tpot_ms"], options["gpu_hour_usd"]
    return Sweep(
        url=options["url"],
        target=Target(options["model"], sampling, options["ignore_eos"], options["served_name"], options["timeout_s"]),
        levels=tuple((kind, number) for number in rates or counts or DEFAULT_CONCURRENCY),
        inputs=options["input_tokens"],
        outputs=options["output_tokens"],
        dataset=options["dataset"],
        requests=options["requests"],
        warmup=options["warmup"],
        shared_prefix=options["shared_prefix"],
        seed=options["seed"],
        slo=None if ttft is None and tpot is None else Slo(ttft, tpot),
        price=None if usd is None else Price(usd, options["gpus"]),
    )


def finish(options: dict[str, Any], lines: list[Line], levels: list[Level]) -> None:
    """Prints and writes what was asked for; exits with 1 when nothing succeeded."""
    if not options["as_json"]:
        console = Console()
        console.print(f"{options['model']} at {options['url']}: {_load_text(options)}", markup=False, highlight=False)
        print_tables(lines, console)
    if options["report"] is not None:
        settings = {name: _shown(value) for name, value in options.items() if value is not None}
        write_report(options["report"], settings, lines)
    if options["records"] is not None:
        with options["records"].open("w", encoding="utf-8") as file:
            for line, level in zip(lines, levels, strict=True):
                for record in level.records:
                    file.write(json.dumps({"load": line["load"], **vars(record)}) + "\n")
    if not any(line["requests"] for line in lines):
        raise click.ClickException(f"no request succeeded; first error: {lines[0].get('first_error', 'none')}")


def _shown(value: Any) -> str:
    return ", ".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


def _load_text(options: dict[str, Any]) -> str:
    """What every level sent, in words."""
    sampled = "greedy" if options["temperature"] is None else f"temperature {options['temperature']:g}"
    if options["dataset"] is not None:
        return f"{options['dataset']}, {sampled}"
    return f"{options['input_tokens']} tokens in, {options['output_tokens']} out, {sampled}"
