"""What a chat's chunks say, as events, and the assistant's message that they add up to.

Invariant: the text of the events joined is the text of the message; a delta is never shown twice. Must not know how
events are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gptoss_trt.client.answers import Chunk


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """The start of a tool call; its arguments follow as ToolArguments of the same index."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    index: int
    text: str


@dataclass(frozen=True)
class Finish:
    """The end of an answer: stop, length or tool_calls (None: the server gave none), and its token counts."""

    reason: str | None
    usage: dict[str, Any] = field(default_factory=dict)


Event = Reasoning | Content | ToolCall | ToolArguments | Finish


class Answer:
    """Reads the chunks of one answer (choice 0) and keeps the message they make."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}

    def push(self, chunk: Chunk) -> Iterator[Event]:
        """The events of a chunk, in the order reasoning, content, tool calls."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or []:
            if choice.get("index", 0) != 0:
                continue
            self._reason = choice.get("finish_reason") or self._reason
            yield from self._delta(choice.get("delta") or {})

    def _delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        # Servers name reasoning in either way, and ours in both at once: one of them is read.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            self.reasoning += reasoning
            yield Reasoning(reasoning)
        if delta.get("content"):
            self.content += delta["content"]
            yield Content(delta["content"])
        for call in delta.get("tool_calls") or []:
            yield from self._tool_call(call)

    def _tool_call(self, call: dict[str, Any]) -> Iterator[Event]:
        index = int(call.get("index", 0))
        function = call.get("function") or {}
        if index >= len(self.tool_calls):
            index = len(self.tool_calls)
            name, call_id = function.get("name") or "", call.get("id") or f"call_{index}"
            entry = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            self.tool_calls.append(entry)
            yield ToolCall(index, call_id, name)
        arguments = function.get("arguments")
        if arguments:
            self.tool_calls[index]["function"]["arguments"] += arguments
            yield ToolArguments(index, arguments)

    def finish(self) -> Finish:
        """The last event of the answer."""
        return Finish(self._reason, self._usage)

    def message(self, *, with_calls: bool = True) -> dict[str, Any] | None:
        """The assistant's message for the next request; None when nothing but reasoning came."""
        calls = self.tool_calls if with_calls else []
        if not self.content and not calls:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message
