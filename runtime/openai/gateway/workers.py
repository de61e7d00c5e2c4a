"""The processes that serve: one event loop each, all on the same listening socket.

Invariant: a worker that dies is replaced, at most once a second; workers end when their parent does. Must not know
routes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.context import SpawnProcess

import uvicorn

from gptoss_trt.runtime.launch.json_log import log_as_json
from gptoss_trt.runtime.launch.parent_watch import ParentWatch
from gptoss_trt.runtime.openai.gateway.app import create_app
from gptoss_trt.runtime.openai.gateway.options import LOST_SIGNALS, GatewayOptions

log = logging.getLogger(__name__)

WATCH_S = 0.5
KILL_GRACE_S = 5.0


def serve(options: GatewayOptions, listener: socket.socket) -> None:
    """Serves in this process until SIGTERM or SIGINT, and then for at most `drain_s`. Raises SystemExit(0)."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # before uvicorn takes signals, and when it hands them back
    config = uvicorn.Config(
        create_app(options),
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
    )
    uvicorn.Server(config).run(sockets=[listener])


def serve_with_workers(options: GatewayOptions, listener: socket.socket) -> int:
    """Serves in `api_workers` processes until SIGTERM or SIGINT; returns the exit status."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    workers = [_start(options, listener) for _ in range(options.api_workers)]
    for number in LOST_SIGNALS.values():
        signal.signal(number, lambda received, _: _pass_on(workers, received))
    while not stop.wait(WATCH_S):
        for index, worker in enumerate(workers):
            if not worker.is_alive():
                log.error("worker %s ended with status %s; a new one takes its place", worker.pid, worker.exitcode)
                time.sleep(1.0)
                workers[index] = _start(options, listener)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + options.drain_s + KILL_GRACE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    return 0


def _pass_on(workers: list[SpawnProcess], number: int) -> None:
    for worker in workers:
        if worker.pid is not None and worker.is_alive():
            os.kill(worker.pid, number)


def _start(options: GatewayOptions, listener: socket.socket) -> SpawnProcess:
    # spawn: gRPC's threads do not survive a fork
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=(options, listener, os.getpid()))
    worker.start()
    return worker


def _work(options: GatewayOptions, listener: socket.socket, parent: int) -> None:
    for number in LOST_SIGNALS.values():
        signal.signal(number, signal.SIG_IGN)  # the application takes them when it starts
    log_as_json()  # a spawned process has no logging of its parent's
    watch = ParentWatch(parent, options.drain_s + KILL_GRACE_S)
    try:
        serve(options, listener)
    finally:
        watch.close()
