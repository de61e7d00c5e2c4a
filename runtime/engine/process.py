"""The engine process: `python -m gptoss_trt.runtime.engine.process ENGINE_DIR --home FOLDER`.

Invariant: at most one process lives for a home (a lock held for life), and it leaves by itself when no client is
connected, so killing every client leaves no orphan. It logs request ids and never prompts. Imports torch only after its
socket listens, so that clients connect at once. Must not know who starts it.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gptoss_trt.runtime.engine.core import EngineCore, EngineLoadError
from gptoss_trt.runtime.engine.location import EngineHome
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.script import SCRIPT_NAME, ScriptedEngine
from gptoss_trt.runtime.engine.server import EngineServer
from gptoss_trt.runtime.launch import settings
from gptoss_trt.runtime.launch.json_log import log_as_json

log = logging.getLogger("gptoss_trt.engine")

EXIT_FAILED = 1
EXIT_ALREADY_RUNNING = 3
IDLE_TIMEOUT_S = 5.0
STEP_TIMEOUT_S = 120.0
# The loop and the server share one interpreter lock: a thread that wants it waits this long at most, less than a step.
SWITCH_INTERVAL_S = 0.0005


def core_loader(engine_dir: Path, options: Path) -> Callable[[], EngineCore]:
    """A function that loads the engine in `engine_dir`: the scripted one if scripted.json stands there."""
    if (engine_dir / SCRIPT_NAME).is_file():
        return lambda: _traced(_load_scripted(engine_dir))

    def load() -> EngineCore:
        from gptoss_trt.runtime.engine.model_core import load_core

        core = _traced(load_core(engine_dir, EngineOptions.read(options)))
        gc.collect()
        gc.freeze()  # libraries and model stay: collections between steps need not walk them
        return core

    return load


def _traced(core: EngineCore) -> EngineCore:
    """The core with its spans sent where GPTOSS_TRT_OTLP_URL says."""
    url = settings.read("GPTOSS_TRT_OTLP_URL")
    if not url:
        return core
    from gptoss_trt.runtime.engine.tracing import traced

    return traced(core, url)


def _load_scripted(engine_dir: Path) -> EngineCore:
    from gptoss_trt.runtime.engine.scripted import ScriptedCore

    plan = ScriptedEngine.read(engine_dir)
    time.sleep(plan.load_ms / 1000)
    if plan.load_error:
        raise EngineLoadError(plan.load_error)
    return ScriptedCore(plan)


def _step_timeout_s(options: Path) -> float:
    """Of the options; the default where they cannot be read, which loading the engine then says."""
    try:
        return EngineOptions.read(options).step_timeout_s or STEP_TIMEOUT_S
    except EngineLoadError:
        return STEP_TIMEOUT_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engine process to its end; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gptoss_trt.runtime.engine.process", description=__doc__.splitlines()[0])
    parser.add_argument("engine_dir", type=Path, help="a built engine directory, or one with scripted.json")
    parser.add_argument("--home", type=Path, required=True, help="private folder of socket, locks and log")
    parser.add_argument("--idle-timeout-s", type=float, default=IDLE_TIMEOUT_S, help="life after the last client")
    chosen = parser.parse_args(arguments)
    # OpenMP threads that spin while a sibling is preempted made steps 25 times slower on a busy machine of 2 cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log_as_json()
    home = EngineHome(chosen.home)
    life = os.open(home.life_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(life, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another engine process owns %s", home.folder)
        return EXIT_ALREADY_RUNNING
    return _serve(chosen, home)


def _serve(chosen: argparse.Namespace, home: EngineHome) -> int:
    server = EngineServer(
        home.socket,
        core_loader(chosen.engine_dir, home.options),
        idle_timeout_s=chosen.idle_timeout_s,
        step_timeout_s=_step_timeout_s(home.options),
        describe=lambda: {"engine_dir": str(chosen.engine_dir)},
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info("engine process for %s listens", chosen.engine_dir)
    failure = server.serve()
    if failure is None:
        home.starts.unlink(missing_ok=True)  # a clean end clears the back-off
        log.info("engine process ends")
        return 0
    log.error("engine process ends: %s", failure)
    return EXIT_FAILED


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a step or a load that still runs in its thread must not keep the process alive
