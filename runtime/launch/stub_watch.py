"""Heals models whose python stub died: Triton neither restarts a stub nor reports its death, unload and load does.

Invariant: a model is reloaded only when the stub that serves it vanished while the server calls it ready; one that an
administrator unloads or reloads is left alone. One reload at a time. Must not know what a model does.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from gptoss_trt.runtime.launch.server_binary import LaunchError
from gptoss_trt.runtime.launch.tritonserver import TritonServer
from gptoss_trt.runtime.triton_models.succession import FOLDER, holders

POLL_S = 0.5
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
STUB_NAME = "triton_python_backend_stub"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stub:
    """A living stub: the model whose model.py it runs, as which instance, and when it began (time.time())."""

    model: str
    instance: str
    pid: int
    started: float


def living_stubs(server_pid: int) -> list[Stub]:
    """The stub processes under `server_pid`, the oldest first."""
    found: list[Stub] = []
    try:
        children = psutil.Process(server_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            words, started = child.cmdline(), child.create_time()
            alive = child.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue  # it ended between the listing and the look
        if alive and words and words[0].endswith(STUB_NAME):
            model_file = next((word for word in words if word.endswith("model.py")), None)
            if model_file is not None:
                model = Path(model_file).parent.parent.name
                instance = next((word for word in words if re.fullmatch(rf"{re.escape(model)}(_\d+)+", word)), model)
                found.append(Stub(model, instance, child.pid, started))
    return sorted(found, key=lambda stub: stub.started)


def stubs_by_model(server_pid: int) -> dict[str, set[int]]:
    """The pids of the stubs under `server_pid`, by model."""
    found: dict[str, set[int]] = {}
    for stub in living_stubs(server_pid):
        found.setdefault(stub.model, set()).add(stub.pid)
    return found


def serving(stubs: list[Stub]) -> dict[str, Stub]:
    """The newest stub of each instance. An older one is what a reload left: it ends with its last stream."""
    return {stub.instance: stub for stub in stubs}


def _replaced(stub: Stub, newest: dict[str, Stub]) -> bool:
    """Whether a younger stub serves the instance of `stub`."""
    return stub.instance in newest and newest[stub.instance].started > stub.started


class StubWatch:
    """A thread that reloads models whose stubs died, with back-off for each model. `on_death` hears of each first."""

    def __init__(self, server: TritonServer, on_death: Callable[[str], None]) -> None:
        self._server = server
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stub-watch", daemon=True)
        self._known: dict[str, Stub] = {}  # by instance
        self._backoff_s: dict[str, float] = {}
        self._healed_at: dict[str, float] = {}
        self.reloads = 0

    def start(self) -> None:
        assert self._server.process is not None
        self._known = serving(living_stubs(self._server.process.pid))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        process = self._server.process
        assert process is not None
        while not self._stop.wait(POLL_S) and process.poll() is None:
            for model in self.dead_models(living_stubs(process.pid)):
                if self._server.claims_ready(model):  # else it was unloaded
                    self._on_death(model)
                    self._heal(model)
                    self._known = serving(living_stubs(process.pid))

    def dead_models(self, living: list[Stub]) -> list[str]:
        """Models of which an instance lost its stub since the last look, or one that came and died between two looks
        while an older one still ends its streams: the instance's file names it."""
        pids, newest = {stub.pid for stub in living}, serving(living)
        dead = [stub.model for stub in self._known.values() if stub.pid not in pids and not _replaced(stub, newest)]
        self._known = newest
        assert self._server.process is not None
        for instance, (pid, since) in holders(self._server.folder / FOLDER, self._server.process.pid).items():
            young = instance in newest and newest[instance].started > since  # it is being loaded
            if pid not in pids and not young:
                dead.append(re.sub(r"(_\d+){2}$", "", instance))
        return list(dict.fromkeys(dead))

    def _heal(self, model: str) -> None:
        """Unloads and loads `model`; a model that keeps dying waits twice as long each time, up to LAST_BACKOFF_S."""
        quiet_s = time.monotonic() - self._healed_at.get(model, 0.0)
        backoff_s = self._backoff_s.get(model, 0.0) if quiet_s < 2 * LAST_BACKOFF_S else 0.0
        if self._stop.wait(backoff_s):
            return
        self._backoff_s[model] = min(max(FIRST_BACKOFF_S, 2 * backoff_s), LAST_BACKOFF_S)
        log.warning("the stub of model %s died: reloading it", model)
        try:
            self._server.control(model, "unload")
            self._server.control(model, "load")
        except LaunchError as error:
            log.error("could not reload model %s: %s", model, error)
        else:
            self.reloads += 1
        self._healed_at[model] = time.monotonic()
