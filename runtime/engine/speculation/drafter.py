"""What speculation asks of something that guesses tokens.

Invariant: a draft changes how fast tokens come, never which: a wrong one costs time only. Must not know how drafts are
verified, schedulers or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from gptoss_trt.runtime.engine.sequence import Sequence

Wanted = Items[tuple[Sequence, int]]
"""Sequences, and the most tokens wanted for each (at least 1)."""


class Drafter(Protocol):
    """Guesses how sequences go on. It learns from a sequence's tokens what came of its drafts."""

    def draft(self, wanted: Wanted) -> list[list[int]]:
        """For each sequence the tokens that may follow its last one: as many as wanted, fewer, or none."""
