"""What the engine process asks of an engine: the interface that the scripted and the real engine share.

Invariant: a core is used by one thread only, and each submitted request ends with exactly one Finished a sequence or
one Error, returned from `step`. Must not know sockets, frames or threads.
"""

from __future__ import annotations

from typing import Any, Protocol

from gptoss_trt.runtime.engine.messages import Event, Submit

RequestKey = tuple[int, str]
"""Connection number and the client's request id: ids of two clients never meet."""


class EngineCore(Protocol):
    """Takes requests and works in steps."""

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
        """Takes a request; a refusal comes out of the next `step` as an Error. `arrival_ns`: time.time_ns()."""

    def cancel(self, key: RequestKey) -> None:
        """Ends a request at the next step with what it has; an unknown key is ignored."""

    def begin(self) -> None:
        """Starts what the next `step` waits for, as far as it can be started; `step` does without."""

    def step(self) -> list[tuple[RequestKey, Event]]:
        """One step: the new tokens and ends of all requests, a request's tokens before its end."""

    def settle(self) -> None:
        """What `step` left to be done when its events are on their way; to be called behind each."""

    def has_work(self) -> bool:
        """Whether `step` would do something."""

    def stats(self) -> dict[str, Any]:
        """Counters and levels (metrics.py lists them)."""


class EngineLoadError(RuntimeError):
    """An engine directory that cannot be loaded."""
