"""What a soak does to its server: kills the engine process, unloads and loads models; and what it watches: memory.

Invariant: a disturbance's window is open before the deed and closes after the server has answered again. Must not know
the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import statistics
import time
import urllib.request
from dataclasses import dataclass, field

import psutil
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException
from windows import Windows

from gptoss_trt.runtime.launch.server_binary import LaunchError
from gptoss_trt.runtime.launch.stub_watch import living_stubs, serving
from gptoss_trt.runtime.launch.tritonserver import ADMIN_HEADER, ENGINE_MODULE, TritonServer

MEMORY_PERIOD_S = 2.0
KILL_GAP_S = 130.0  # the engine's back-off forgets starts that are 120 s old
CONTROL_TIMEOUT_S = 60.0
GRPC_HEADER_PREFIX = "triton-grpc-protocol-"  # what --grpc-restricted-protocol puts before the header's name
RECOVERY_S = 240.0  # with 200 streams of the demo on two cores an answer takes a minute
MIB = 1 << 20
MEMORY_COLUMNS = ("second", "server", "stubs", "engine", "draining")


def engine_processes(server: TritonServer) -> list[psutil.Process]:
    """The living engine processes of this server's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended between the listing and the look
            words = process.cmdline()
            if ENGINE_MODULE in words and any(word.startswith(str(server.folder)) for word in words):
                found.append(process)
    return found


def stub_processes(server: TritonServer) -> tuple[list[int], list[int]]:
    """Pids of the stubs under this server: the newest of each instance, and older ones, which serve the streams of an
    unloaded model to their end."""
    assert server.process is not None
    stubs = living_stubs(server.process.pid)
    newest = {stub.pid for stub in serving(stubs).values()}
    return sorted(newest), [stub.pid for stub in stubs if stub.pid not in newest]


class Disturber:
    """Kills engines and reloads models at given moments of a run."""

    def __init__(self, server: TritonServer, windows: Windows, models: tuple[str, ...]) -> None:
        self._server = server
        self._windows = windows
        self._models = models
        self.kills = self.reloads = 0
        self.problems: list[str] = []
        self.recoveries_s: list[float] = []

    async def run(self, seconds: float) -> None:
        """A kill each KILL_GAP_S (one at least), and between them a reload each 20 s or third of the run."""
        start = time.monotonic()
        gap = min(KILL_GAP_S, seconds * 0.8)
        moments = [(gap * (k + 0.4), self._kill) for k in range(max(1, round(seconds / gap)))]
        quiet = min(20.0, seconds / 3)
        moments += [(quiet * (k + 0.6), self._reload) for k in range(int(seconds / quiet))]
        for moment, deed in sorted(moments, key=lambda entry: entry[0]):
            if moment > seconds - 5.0:
                return  # its window must close within the run
            await asyncio.sleep(max(0.0, start + moment - time.monotonic()))
            await deed()

    async def _kill(self) -> None:
        window = self._windows.open()
        for process in engine_processes(self._server):
            process.kill()
            self.kills += 1
        await self._recovered("engine kill")
        self.recoveries_s.append(time.monotonic() - window.start)
        window.close()

    async def _reload(self) -> None:
        model = self._models[self.reloads % len(self._models)]
        window = self._windows.open(model)
        try:
            await asyncio.to_thread(self._unload_and_load, model)
        except InferenceServerException as error:
            self.problems.append(str(error))
        await self._recovered(f"reload of {model}")
        self.reloads += 1
        window.close()

    def _unload_and_load(self, model: str) -> None:
        """Over gRPC: tritonserver 2.51 loads a model that HTTP asked for in one of the 8 threads that write HTTP
        streams, and the responses of that thread's streams which do not fit into its pipe meanwhile are dropped."""
        headers = {GRPC_HEADER_PREFIX + ADMIN_HEADER: self._server.admin_key}
        with grpcclient.InferenceServerClient(self._server.grpc_url) as client:
            client.unload_model(model, headers=headers, client_timeout=CONTROL_TIMEOUT_S)
            client.load_model(model, headers=headers, client_timeout=CONTROL_TIMEOUT_S)

    async def _recovered(self, what: str, timeout_s: float = RECOVERY_S) -> None:
        until = time.monotonic() + timeout_s
        last = "no try"
        while time.monotonic() < until:
            try:
                await asyncio.to_thread(self._server.first_answer, timeout_s / 2)
                return
            except LaunchError as error:
                last = str(error)
            await asyncio.sleep(0.1)
        self.problems.append(f"no answer {timeout_s:.0f} s after {what}: {last[:300]}")


@dataclass
class Memory:
    """Resident MiB of the server, its stubs and its engine over time, and how late the metrics page is.

    A stub that drains is counted apart: it is the old process of a reloaded model and ends with its last stream.
    """

    server: TritonServer
    samples: list[tuple[float, float, float, float, float]] = field(default_factory=list)  # as in MEMORY_COLUMNS
    page_ages_s: list[float] = field(default_factory=list)
    engines: set[int] = field(default_factory=set)

    async def watch(self) -> None:
        """Samples until it is cancelled."""
        start = time.monotonic()
        while True:
            self.samples.append((round(time.monotonic() - start, 1), *await asyncio.to_thread(self._sample)))
            self.page_ages_s.append(await asyncio.to_thread(self._page_age_s))
            await asyncio.sleep(MEMORY_PERIOD_S)

    def _sample(self) -> tuple[float, float, float, float]:
        assert self.server.process is not None
        engines = engine_processes(self.server)
        self.engines |= {process.pid for process in engines}
        stubs, draining = stub_processes(self.server)
        pids = ([self.server.process.pid], stubs, [process.pid for process in engines], draining)
        return _resident(pids[0]), _resident(pids[1]), _resident(pids[2]), _resident(pids[3])

    def _page_age_s(self) -> float:
        """How old the engine's numbers on the metrics page are."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=20.0) as answer:
            page = answer.read().decode()
        stamps = re.findall(r'^nv_trt_llm_general_metrics\{.*"timestamp".*\} (\S+)$', page, re.MULTILINE)
        return round(time.time() - float(stamps[0]), 1) if stamps else math.inf

    def growth_mib(self) -> float:
        """The median of server, stubs and engine together over the last fifth of the samples, less that over the second
        fifth."""
        totals = [sum(sample[1:4]) for sample in self.samples]
        fifth = max(1, len(totals) // 5)
        return statistics.median(totals[-fifth:]) - statistics.median(totals[fifth : 2 * fifth] or totals)


def _resident(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it ended between the listing and the look
            total += psutil.Process(pid).memory_info().rss / MIB
    return round(total, 1)
