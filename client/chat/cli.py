"""The `gptoss-trt chat` command: its options, and the choice of client, inputs and display.

Invariant: stdout carries the conversation and nothing else. Must not know how a turn goes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from gptoss_trt.client.chat.conversation import EFFORTS, Conversation, Settings, load_tools
from gptoss_trt.client.chat.inputs import Inputs, LineInputs, TerminalInputs
from gptoss_trt.client.chat.loop import COMMANDS, ChatLoop
from gptoss_trt.client.chat.show import Display, JsonDisplay, PlainDisplay, TerminalDisplay
from gptoss_trt.client.connect import DEFAULT_URL, connect
from gptoss_trt.client.errors import NO_SERVER, ServerError

EPILOG = """\b
Examples:
  gptoss-trt chat
  echo 'What is 17 + 25?' | gptoss-trt chat
  gptoss-trt chat --tools weather.json --reasoning high
  echo 'The capital of France is' | gptoss-trt chat --raw --max-tokens 8

In a terminal: Ctrl-C cancels the answer and keeps the session, Alt-Enter makes a new line, /help lists the commands.
When the model calls a tool, type its result. In a pipe each line is a user turn; after a tool call a line of JSON is
the tool's result. Slash commands are for terminals: in a pipe they are text.
"""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Server: grpc://host:port or http://host:port.")
@click.option("--model", default="gpt-oss", show_default=True, help="Served model's name.")
@click.option("--system", help="System prompt.")
@click.option("--reasoning", "effort", type=click.Choice(EFFORTS), help="Reasoning effort.")
@click.option(
    "--tools",
    "tools_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON file with a list of tools (OpenAI's form, or bare functions).",
)
@click.option("--temperature", type=click.FloatRange(min=0.0), help="0 is greedy.  [default: the server's]")
@click.option("--top-p", type=click.FloatRange(min=0.0, max=1.0), help="Nucleus sampling.  [default: the server's]")
@click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), help="The same answers each time.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer (--raw: 512 unless given).")
@click.option("--show-reasoning/--hide-reasoning", default=None, help="Default: shown in a terminal, hidden in a pipe.")
@click.option("--raw", is_flag=True, help="Send each line to `ensemble` as a raw prompt; no chat format, no history.")
@click.option("--json", "as_json", is_flag=True, help="Events as JSON lines.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0.0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the server.",
)
def chat(
    url: str,
    tools_file: Path | None,
    show_reasoning: bool | None,
    raw: bool,
    as_json: bool,
    wait_s: float,
    **settings: Any,
) -> None:
    """Talk to a served model in the terminal, or answer the lines of a pipe."""
    try:
        tools = load_tools(tools_file) if tools_file else []
        client = connect(url)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with client:
        try:
            client.wait_ready(["ensemble" if raw else "chat"], timeout_s=wait_s)
        except ServerError as error:
            raise click.ClickException(f"{url}: {error}\n{NO_SERVER}") from error
        inputs, display = open_inputs(), open_display(as_json, show_reasoning)
        if inputs.interactive:
            what = "ensemble, raw prompts" if raw else settings["model"]
            display.notice(f"{what} at {url}\n/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends\n")
        loop = ChatLoop(client, Conversation(Settings(tools=tools, **settings)), inputs, display, raw=raw)
        try:
            failures = loop.run()
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(1 if failures else 0)


def open_inputs() -> Inputs:
    """A prompt when stdin and stdout are a terminal, else the lines of stdin."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalInputs(COMMANDS)
    return LineInputs()


def open_display(as_json: bool, show_reasoning: bool | None) -> Display:
    """Colours on a terminal, plain text elsewhere, JSON lines when asked."""
    if as_json:
        return JsonDisplay()
    if sys.stdout.isatty():
        return TerminalDisplay(show_reasoning=show_reasoning is not False)
    return PlainDisplay(show_reasoning=bool(show_reasoning))
