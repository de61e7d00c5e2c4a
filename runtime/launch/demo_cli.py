"""`gptoss-trt demo`: the demo model, served and talked to, from one command.

Invariant: set-up is told on stderr; stdout holds the conversation only.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import click

from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.demo import demo_server
from gptoss_trt.runtime.launch.server_binary import LaunchError

QUESTION = "What is 17 + 25?"
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
WELCOME = (
    "A small model: it adds numbers up to 99, knows capitals and opposites, repeats,\n"
    "reverses lists, counts, tells short stories and uses tools."
)
EPILOG = """\b
Examples:
  gptoss-trt demo                             a chat in the terminal
  echo "What is 20 + 22?" | gptoss-trt demo   answers each line of its input
  gptoss-trt demo </dev/null                  answers one built-in question
"""


@click.command(epilog=EPILOG)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Where checkpoint and engine are kept.  [default: demo/ in the state folder]",
)
def demo(cache_dir: Path | None) -> int:
    """Build the demo engine, serve it from tritonserver and talk to it."""
    try:  # Ctrl-C while starting ends quietly
        folder = cache_dir or settings.state_dir() / "demo"
        server = demo_server(folder, lambda line: click.echo(line, err=True))
    except (LaunchError, settings.SettingsError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise click.ClickException(f"cannot start: {error}") from error
    except KeyboardInterrupt:
        click.echo("interrupted while starting", err=True)
        return INTERRUPTED
    try:
        return converse(server.grpc_url)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        server.stop(drain_s=2)


def converse(url: str) -> int:
    """Hands a terminal to the chat; feeds it the lines of another standard input, or QUESTION when there is none.
    Returns the chat's exit status."""
    # The demo model is small: greedy answers are its best, and the same each time.
    command = [sys.executable, "-m", "gptoss_trt", "chat", "--url", url, "--temperature", "0"]
    if sys.stdin.isatty():
        click.echo(WELCOME, err=True)
        chat = subprocess.Popen(command)
        # Ctrl-C reaches both processes: there it stops an answer and keeps the session, here it means nothing.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return chat.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    first = sys.stdin.buffer.readline()
    if not first:
        click.echo(f"no question on standard input; asking: {QUESTION}", err=True)
        first = f"{QUESTION}\n".encode()
    fed = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert fed.stdin is not None
    with contextlib.suppress(BrokenPipeError), fed.stdin:  # a chat that has ended early has said why
        for line in itertools.chain([first], sys.stdin.buffer):
            fed.stdin.write(line)
            fed.stdin.flush()
    return fed.wait()
