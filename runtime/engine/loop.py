"""The engine's loop: one thread that owns the core, takes commands between steps and hands out each step's events.

Invariant: only this thread touches the core. A command is applied before the next step, so a cancelled request frees
its blocks within one step. Must not know sockets or frames.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gptoss_trt.runtime.engine.core import EngineCore, RequestKey
from gptoss_trt.runtime.engine.messages import Error, Event, Submit

log = logging.getLogger(__name__)

Deliver = Callable[[list[tuple[RequestKey, Event]]], None]
INBOX_LIMIT = 8192  # commands that may wait for one step to end (or for the model to load)


class Rest(Protocol):
    """What the loop's thread does while there is no work."""

    def take(self) -> None:
        """Returns when there may be some: in the loop's thread."""

    def disturb(self) -> None:
        """Ends a `take` that goes on, or the next one at once: in any thread."""

    def end(self) -> None:
        """Work is under way: in the loop's thread, behind the launch of each step."""


class Sleep:
    """A Rest that does nothing."""

    def __init__(self) -> None:
        self._disturbed = threading.Event()

    def take(self) -> None:
        self._disturbed.wait()
        self._disturbed.clear()

    def disturb(self) -> None:
        self._disturbed.set()

    def end(self) -> None:
        """Nothing was begun."""


class EngineLoop:
    """Runs `load()` and then the core's steps in a thread. `deliver` and `failed` are called from that thread."""

    def __init__(
        self,
        load: Callable[[], EngineCore],
        deliver: Deliver,
        failed: Callable[[str], None],
        rest: Rest | None = None,
    ) -> None:
        self._load = load
        self._deliver = deliver
        self._failed = failed
        self._rest = rest or Sleep()
        self._inbox: deque[Callable[[EngineCore], None]] = deque()
        self._resting = False
        self._stopping = False
        self._step_began: float | None = None
        self.loaded = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Asks the loop to end after the step in progress and waits for at most `timeout_s`."""
        self._stopping = True
        self._rest.disturb()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def submit(self, key: RequestKey, submit: Submit) -> None:
        """Queues a request. When the inbox is full it is refused at once."""
        arrival_ns = time.time_ns()
        if len(self._inbox) >= INBOX_LIMIT:
            message = f"{len(self._inbox)} commands wait for the engine; the limit is {INBOX_LIMIT}"
            self._deliver([(key, Error(submit.request_id, "RESOURCE_EXHAUSTED", message))])
            return
        self._post(lambda core: core.submit(key, submit, arrival_ns))

    def cancel(self, key: RequestKey) -> None:
        self._post(lambda core: core.cancel(key))

    def ask_stats(self, answer: Callable[[dict[str, Any]], None]) -> None:
        """Calls `answer` with the core's statistics from the loop's thread, between two steps."""
        self._post(lambda core: answer(core.stats()))

    @property
    def rests(self) -> bool:
        """Whether there is no work."""
        return self._resting

    @property
    def step_age_s(self) -> float:
        """Seconds since the step in progress began, 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _post(self, command: Callable[[EngineCore], None]) -> None:
        self._inbox.append(command)
        if self._resting and threading.get_ident() != self._thread.ident:
            self._rest.disturb()

    def _run(self) -> None:
        try:
            core = self._load()
            self.loaded = True
            while not self._stopping:
                self._take_commands(core)
                if core.has_work():
                    self._step(core)
        except BaseException as error:
            log.exception("the engine's loop ended")
            self._failed(f"{type(error).__name__}: {error}")

    def _take_commands(self, core: EngineCore) -> None:
        if not core.has_work():
            self._resting = True  # ahead of the look: who posts behind it sees that
            while not self._inbox and not self._stopping:
                self._rest.take()
            self._resting = False
        for _ in range(len(self._inbox)):
            self._inbox.popleft()(core)

    def _step(self, core: EngineCore) -> None:
        self._step_began = time.monotonic()
        core.begin()
        self._rest.end()
        events = core.step()
        self._step_began = None
        if events:
            self._deliver(events)
        core.settle()
