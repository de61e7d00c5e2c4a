"""Stop strings on a stream of text.

Owns the tail of the text that may still become a stop string. Invariant: no character of a matched stop string, and
none that could begin one, has come out; the text that has is the same for any chunking. Must not know tokens or
channels.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches the stop string that is complete first (among those, the one that began first).

    `include_stop` lets the matched string itself come out, as `include_stop_str_in_output` asks.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that matched or None). Text after a match is dropped."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        buffer = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return buffer[: end if self._include_stop else start], self.matched
        keep = len(buffer) - max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def finish(self) -> str:
        """The text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is shorter than it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
