"""`python -m gptoss_trt.runtime.openai.gateway`: one process, or several that share a socket.

Invariant: the socket is bound before a worker starts, so `gateway listens` on standard output is true when it is
printed, and a port that is taken ends the start with a message. Must not know routes.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gptoss_trt.runtime.launch.json_log import log_as_json
from gptoss_trt.runtime.openai.gateway.files import check_files
from gptoss_trt.runtime.openai.gateway.options import (
    LOST_SIGNALS,
    GatewayOptions,
    OptionsError,
    read_options,
    with_port,
)
from gptoss_trt.runtime.openai.gateway.process import LISTENS
from gptoss_trt.runtime.openai.gateway.workers import serve, serve_with_workers

BACKLOG = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    options = read_options(arguments)
    for number in LOST_SIGNALS.values():
        signal.signal(number, signal.SIG_IGN)  # until there are requests that could be lost
    log_as_json()
    try:
        check_files(options)
        listener = _bind(options)
    except (OptionsError, OSError) as error:
        print(f"the gateway cannot start: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="gptoss-gateway-") as folder:
        if options.store_file is None:
            options = dataclasses.replace(options, store_file=Path(folder) / "responses.sqlite")
        options = with_port(options, listener.getsockname()[1])
        print(f"{LISTENS}{options.url}", flush=True)
        if options.api_workers == 1:
            serve(options, listener)
            return 0
        return serve_with_workers(options, listener)


def _bind(options: GatewayOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of every connection: the kernel ends one whose peer has taken nothing of what waits for so long, so that an answer
    # that nobody reads does not pile up in tritonserver for longer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * options.stall_s))
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise OSError(f"{options.host} port {options.port}: {error}") from error
    listener.listen(BACKLOG)
    listener.set_inheritable(True)
    return listener


if __name__ == "__main__":
    sys.exit(main())
