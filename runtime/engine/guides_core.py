"""Compiles guides beside the engine's loop: a core around the core that only lets requests in whose guides are ready.

Invariant: the loop's thread never compiles a grammar and never waits for one longer than WAIT_S; a grammar that cannot
be compiled, or not in time, ends its request as INVALID_ARGUMENT. Must not know grammars or scheduling.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from gptoss_trt.runtime.engine.core import EngineCore, RequestKey
from gptoss_trt.runtime.engine.guides import GuideError
from gptoss_trt.runtime.engine.guides_llguidance import LlguidanceCompiler
from gptoss_trt.runtime.engine.messages import Error, ErrorCode, Event, Finished, Submit, Usage

THREADS = 2
WAIT_S = 0.005
COMPILE_TIMEOUT_S = 10.0
MAX_PENDING = 256


@dataclass
class _Pending:
    submit: Submit
    arrival_ns: int
    ready: Future[None]
    since: float


class GuidedCore:
    """An EngineCore. The inner core's compiler must be the same `compiler`, so that it finds everything compiled."""

    def __init__(self, core: EngineCore, compiler: LlguidanceCompiler) -> None:
        self._core = core
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(THREADS, "guides")
        self._table: Future[Any] | None = None  # made when the first guide comes: who guides nothing pays nothing
        self._pending: dict[RequestKey, _Pending] = {}
        self._events: list[tuple[RequestKey, Event]] = []

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
        if not submit.guides:
            self._core.submit(key, submit, arrival_ns)
        elif len(self._pending) >= MAX_PENDING:
            reason = f"{len(self._pending)} requests wait for their guides; the limit is {MAX_PENDING}"
            self._refuse(key, submit, "RESOURCE_EXHAUSTED", reason)
        else:
            self._table = self._table or self._pool.submit(self._compiler.warm)
            ready = self._pool.submit(self._compile, submit)
            self._pending[key] = _Pending(submit, arrival_ns, ready, time.monotonic())

    def cancel(self, key: RequestKey) -> None:
        waiting = self._pending.pop(key, None)
        if waiting is None:
            self._core.cancel(key)
            return
        waiting.ready.cancel()
        submit = waiting.submit
        usage = Usage(len(submit.token_ids), 0, arrival_ns=waiting.arrival_ns)
        for index in range(submit.n):
            end = Finished(submit.request_id, index, "cancelled", usage, submit.n - index - 1)
            self._events.append((key, end))

    def has_work(self) -> bool:
        return bool(self._pending or self._events) or self._core.has_work()

    def begin(self) -> None:
        self._admit()
        if self._core.has_work():
            self._core.begin()

    def step(self) -> list[tuple[RequestKey, Event]]:
        self._admit()
        if self._pending and not self._events and not self._core.has_work():
            wait([waiting.ready for waiting in self._pending.values()], WAIT_S, "FIRST_COMPLETED")
            self._admit()
        events, self._events = self._events, []
        return events + self._core.step() if self._core.has_work() else events

    def settle(self) -> None:
        self._core.settle()

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def _compile(self, submit: Submit) -> None:
        self._compiler.compile(submit.guides)

    def _admit(self) -> None:
        """Hands on what is compiled, in the order of arrival among the ready ones."""
        now = time.monotonic()
        for key, waiting in list(self._pending.items()):
            if waiting.ready.done():
                del self._pending[key]
                self._hand_on(key, waiting)
            elif self._table is not None and not self._table.done():
                waiting.since = now
            elif now - waiting.since > COMPILE_TIMEOUT_S:
                del self._pending[key]
                waiting.ready.cancel()
                reason = f"the guide was not compiled within {COMPILE_TIMEOUT_S:.0f} s"
                self._refuse(key, waiting.submit, "INVALID_ARGUMENT", reason)

    def _hand_on(self, key: RequestKey, waiting: _Pending) -> None:
        error = waiting.ready.exception()
        if error is None:
            self._core.submit(key, waiting.submit, waiting.arrival_ns)
        elif isinstance(error, GuideError):
            self._refuse(key, waiting.submit, "INVALID_ARGUMENT", str(error))
        else:
            self._refuse(key, waiting.submit, "INTERNAL", f"the guide's compiler failed: {error}")

    def _refuse(self, key: RequestKey, submit: Submit, code: ErrorCode, reason: str) -> None:
        self._events.append((key, Error(submit.request_id, code, reason)))
