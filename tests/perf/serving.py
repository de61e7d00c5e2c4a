"""A server of an engine for the length of a measurement."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

COMMAND = [sys.executable, "-m", "gptoss_trt"]
STOP_S = 60.0


@contextlib.contextmanager
def served(engine: Path, state: Path, options: Sequence[str], instances: int) -> Iterator[dict[str, str]]:
    """What `serve --json` prints (`grpc`, `state`, ...) of a server of the engine, which ends behind the block.
    `options` are the engine's, NAME=VALUE; `state` is a folder of its own. Raises RuntimeError when it does not
    start."""
    chosen = [word for option in options for word in ("--engine-option", option)]
    command = [*COMMAND, "serve", str(engine), "--state-dir", str(state), "--no-openai", "--model", "tensorrt_llm"]
    process = subprocess.Popen(
        [*command, "--instances", str(instances), "--json", *chosen], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("{"):
            raise RuntimeError(f"serve ended with status {process.wait()} before it was ready")
        yield json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
