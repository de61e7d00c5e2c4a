"""The `gptoss-trt bench` group: a table of benchmarks, each imported when it is used.

Invariant: `bench --help` imports none of them, and the client's own need no torch. Must not know what one measures.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import click

from gptoss_trt.client.protocol import did_you_mean


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's command lives, what it does in one line, and the extra that brings its libraries."""

    module: str
    attribute: str
    summary: str
    extra: str


BENCHMARKS = {
    "serve": Benchmark(
        "gptoss_trt.client.bench.serve_cli", "serve", "Load a server; latencies, throughput, cost.", "client"
    ),
    "engine": Benchmark("gptoss_trt.runtime.bench_engine", "engine", "Decode and prefill of the bare engine.", "serve"),
    "ops": Benchmark("gptoss_trt.runtime.bench_ops", "ops", "Each operator against its own bound.", "build"),
    "random-engine": Benchmark(
        "gptoss_trt.build_engine.random_engine", "random_engine", "Write a full-size engine of random weights.", "build"
    ),
    "inputs": Benchmark(
        "gptoss_trt.client.bench.files_cli", "inputs", "Write input files for perf_analyzer.", "client"
    ),
    "profile": Benchmark(
        "gptoss_trt.client.bench.files_cli", "profile", "Read a profile that perf_analyzer exported.", "client"
    ),
    "perf-analyzer": Benchmark(
        "gptoss_trt.client.bench.files_cli", "perf_analyzer", "Run perf_analyzer, fetched on first use.", "client"
    ),
}


class LazyBenchmarks(click.Group):
    """A click group over BENCHMARKS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = BENCHMARKS.get(cmd_name)
        if entry is None:
            return None
        try:
            command = getattr(importlib.import_module(entry.module), entry.attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, entry, error)) from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in BENCHMARKS and not args[0].startswith("-"):
            ctx.fail(f"No benchmark {args[0]!r}{did_you_mean(args[0], BENCHMARKS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, entry.summary) for name, entry in BENCHMARKS.items()])


def _missing(name: str, entry: Benchmark, error: ModuleNotFoundError) -> str:
    if error.name is not None and entry.module.startswith(error.name):
        return f"this installation has no `bench {name}`: module {entry.module} is not part of it"
    return f"`bench {name}` needs the Python package {error.name!r}: pip install 'gptoss-trt[{entry.extra}]'"


EPILOG = """\b
Examples:
  gptoss-trt bench serve --concurrency 1,8,64
  gptoss-trt bench engine --random --model gpt-oss-20b --decode 1024:1,64
  gptoss-trt bench inputs --model ensemble --out inputs.json
"""


@click.group(cls=LazyBenchmarks, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a server, the engine or its operators."""
