"""The loop alone: what it does with its core, in which order."""

from __future__ import annotations

import time
from typing import Any

from gptoss_trt.runtime.engine.loop import EngineLoop
from gptoss_trt.runtime.engine.messages import Submit, Tokens


class Core:
    """Takes one step a request and keeps what it was asked to do."""

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.waiting: list[Any] = []

    def submit(self, key: Any, submit: Submit, arrival_ns: int) -> None:
        self.waiting.append(key)

    def cancel(self, key: Any) -> None: ...

    def has_work(self) -> bool:
        return bool(self.waiting)

    def begin(self) -> None:
        self.done.append("begin")

    def step(self) -> list[Any]:
        self.done.append("step")
        key = self.waiting.pop(0)
        return [(key, Tokens("r", 0, (1,)))] if key[1] == "told" else []

    def settle(self) -> None:
        self.done.append("settle")

    def stats(self) -> dict[str, Any]:
        return {}


def test_a_core_settles_behind_the_events_of_each_step() -> None:
    done: list[str] = []
    loop = EngineLoop(lambda: Core(done), lambda events: done.append("events"), done.append)
    loop.submit((1, "told"), Submit("told", (1,), 1))
    loop.submit((1, "silent"), Submit("silent", (1,), 1))
    loop.ask_stats(lambda stats: None)
    loop.start()
    while done.count("settle") < 2:
        time.sleep(0.001)
    loop.stop(5)
    assert done == ["begin", "step", "events", "settle", "begin", "step", "settle"]
