"""The final channel of a Harmony answer as one stream of text: what chat mode shows.

Invariant: no reasoning, no tool call and no markup comes out. Must not know requests or Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptoss_trt.runtime.harmony import HarmonyEvent, HarmonyStream


class FinalChannel:
    """A decoder of one answer's ids into the text of its final channel."""

    def __init__(self) -> None:
        self._stream = HarmonyStream(declared_tools=[])

    def push(self, token_ids: tuple[int, ...]) -> str:
        return _content(self._stream.push(list(token_ids)))

    def finish(self) -> str:
        return _content(self._stream.finish("stop"))


def _content(events: Sequence[HarmonyEvent]) -> str:
    return "".join(str(event[1]) for event in events if event[0] == "content")
