"""A gateway as a child process: start it, know its address, end it.

Invariant: `start_gateway` returns a gateway that listens, or raises with what it said. Must not know the server behind
it. Imports neither FastAPI nor gRPC, for launchers' sake.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gptoss_trt.runtime.openai.gateway.options import GatewayOptions, gateway_command

LISTENS = "gateway listens on "
LOG_TAIL_BYTES = 2000


class GatewayError(RuntimeError):
    """A gateway that did not start."""


class GatewayProcess:
    """A running gateway. `url`: where clients find the API."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path

    def stop(self, timeout_s: float = 10.0) -> int:
        """Asks it to end, waits, kills it when it does not. Returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def start_gateway(
    options: GatewayOptions, log_path: Path, timeout_s: float = 60.0, *, before: Callable[[], None] | None = None
) -> GatewayProcess:
    """Starts a gateway whose output goes to `log_path`; `before` runs in the child first. Raises GatewayError when it
    ends or says nothing in time."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            gateway_command(options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=before,  # noqa: PLW1509 - one system call, which takes no lock
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which drains
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if line.startswith(LISTENS) and line.endswith("\n"):
                return GatewayProcess(process, line.removeprefix(LISTENS).strip(), log_path)
        time.sleep(0.05)
    process.kill()
    process.wait()
    tail = log_path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    raise GatewayError(f"the gateway did not start: {tail or f'it said nothing within {timeout_s:.0f} s'}")
