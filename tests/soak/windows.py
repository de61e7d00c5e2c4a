"""When the server was disturbed on purpose, and which errors a request may get for it.

Invariant: an error is excused only if the request overlapped a disturbance of its own model and says that something
was not available. Must not know what is asked.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

# The engine is away; the model is not loaded, being unloaded or loaded.
UNAVAILABLE = re.compile(
    r"not available|unavailable|not ready|unknown model|not found|unload|no available version", re.I
)
MARGIN_S = 2.0  # the models' own connections to the engine return a little after the first answer


@dataclass
class Window:
    """One disturbance. `model` empty: all models. Times of time.monotonic()."""

    model: str
    start: float = field(default_factory=time.monotonic)
    end: float = math.inf

    def close(self) -> None:
        self.end = time.monotonic() + MARGIN_S


@dataclass
class Windows:
    """All disturbances of a run."""

    all: list[Window] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def describe(self, sent: float, ended: float) -> str:
        """A request's span and the disturbances it met, in seconds since the start, for a report."""
        met = [
            f"{w.model or 'engine'} {w.start - self.start:.1f}..{w.end - self.start:.1f}"
            for w in self.all
            if sent <= w.end and w.start <= ended
        ]
        return f"{sent - self.start:.1f}..{ended - self.start:.1f} s, met {met or 'nothing'}"

    def open(self, model: str = "") -> Window:
        window = Window(model)
        self.all.append(window)
        return window

    def excuse(self, model: str, sent: float, ended: float, message: str) -> bool:
        """Whether a request to `model` that lived from `sent` to `ended` may have failed with `message`."""
        if not UNAVAILABLE.search(message):
            return False
        return any(w.model in ("", model) and sent <= w.end and w.start <= ended for w in self.all)
