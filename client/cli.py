"""The `gptoss-trt` command: a table of commands, each imported when it is used.

Invariant: `--help` and shell completion of the top level import no command's module. Must not know what a command does.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from gptoss_trt import __version__


@dataclass(frozen=True)
class CommandEntry:
    """Where a command lives, what it does in one line, and the extra that brings its libraries."""

    module: str
    attribute: str
    summary: str
    extra: str


COMMANDS = {
    "build": CommandEntry(
        "gptoss_trt.build_engine.cli", "build", "Build an engine directory from a checkpoint.", "build"
    ),
    "inspect": CommandEntry(
        "gptoss_trt.build_engine.cli", "inspect", "Describe or verify a checkpoint or an engine.", "build"
    ),
    "serve": CommandEntry(
        "gptoss_trt.runtime.launch.serve_cli", "serve", "Serve an engine from tritonserver.", "serve"
    ),
    "chat": CommandEntry("gptoss_trt.client.chat.cli", "chat", "Talk to a served model in the terminal.", "client"),
    "bench": CommandEntry(
        "gptoss_trt.client.bench.cli", "bench", "Measure a server, the engine or its operators.", "client"
    ),
    "top": CommandEntry("gptoss_trt.client.top.cli", "top", "Watch a server live in the terminal.", "client"),
    "doctor": CommandEntry(
        "gptoss_trt.runtime.launch.doctor_cli", "doctor", "Say what this machine can and cannot do.", "serve"
    ),
    "demo": CommandEntry(
        "gptoss_trt.runtime.launch.demo_cli", "demo", "Build, serve and talk to the demo model.", "serve"
    ),
}


class LazyGroup(click.Group):
    """A click group over COMMANDS that imports a command's module only to run or complete it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            command = getattr(importlib.import_module(entry.module), entry.attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("gptoss_trt"):
                raise
            raise click.ClickException(
                f"`gptoss-trt {cmd_name}` needs the Python package {error.name!r}: "
                f"pip install 'gptoss-trt[{entry.extra}]'"
            ) from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else []
        if near:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


EPILOG = """\b
Examples:
  gptoss-trt build gpt-oss-20b/ --out engine/
  gptoss-trt serve engine/
  gptoss-trt chat
\b
Shell completion (bash; zsh and fish alike):
  eval "$(_GPTOSS_TRT_COMPLETE=bash_source gptoss-trt)"
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gptoss-trt")
def gptoss_trt() -> None:
    """Build gpt-oss engines and serve them from NVIDIA Triton Inference Server."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 1 for a failure, 2 for an error of use."""
    try:
        status = gptoss_trt.main(args=arguments, prog_name="gptoss-trt", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Aborted!", err=True)
        return 1
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
