"""The output items of a response and the events of their lives.

Owns the items' objects. Invariant: an item's events come in the order added, (part added, deltas, done, part done,)
done, and its object holds what its deltas said. Must not know the response around it.
"""

from __future__ import annotations

import copy
import uuid
from abc import ABC, abstractmethod
from typing import Any

Json = dict[str, Any]


class Item(ABC):
    """One output item: its growing text, and whether it is closed."""

    prefix = ""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.closed = False
        self._status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def object(self) -> Json:
        """The item as the response holds it."""

    def begin(self) -> list[Json]:
        return [{"type": "response.output_item.added", "item": self.object()}]

    @abstractmethod
    def push(self, text: str, logprobs: list[Json]) -> list[Json]: ...

    def end(self, status: str) -> list[Json]:
        """Closes the item."""
        self.closed, self._status = True, status
        return [{"type": "response.output_item.done", "item": self.object()}]

    @abstractmethod
    def add_to(self, turn: Json) -> None:
        """Puts what the item says into a chat message."""


class _TextItem(Item):
    """An item whose text is its one content part."""

    event = ""  # the events' stem

    @abstractmethod
    def part(self) -> Json: ...

    def begin(self) -> list[Json]:
        added = super().begin()
        return [*added, self._event("response.content_part.added", part=self.part())]

    def push(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._texts.append(text)
        return [self._event(f"{self.event}.delta", delta=text)]

    def end(self, status: str) -> list[Json]:
        done = [
            self._event(f"{self.event}.done", text=self.text),
            self._event("response.content_part.done", part=self.part()),
        ]
        return [*done, *super().end(status)]

    def _event(self, name: str, **fields: Any) -> Json:
        return {"type": name, "item_id": self.id, "content_index": 0, **fields}


class Reasoning(_TextItem):
    """What the model thinks, in full: `summary` stays empty, because nothing is summarised."""

    prefix, event = "rs", "response.reasoning_text"

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def object(self) -> Json:
        content = [self.part()] if self._texts else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": self._status}

    def add_to(self, turn: Json) -> None:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + self.text


class Message(_TextItem):
    """What the user sees."""

    prefix, event = "msg", "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Json] = []

    def part(self) -> Json:
        logprobs = copy.copy(self._logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def object(self) -> Json:
        content = [self.part()] if self._texts else []
        return {"id": self.id, "type": "message", "role": "assistant", "content": content, "status": self._status}

    def push(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._logprobs += logprobs
        (delta,) = super().push(text, logprobs)
        return [{**delta, "logprobs": logprobs}]

    def end(self, status: str) -> list[Json]:
        first, *rest = super().end(status)
        return [{**first, "logprobs": self._logprobs}, *rest]

    def add_to(self, turn: Json) -> None:
        turn["content"] = (turn["content"] or "") + self.text


class FunctionCall(Item):
    """A call of a function that the client declared."""

    prefix = "fc"

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    def object(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": self._status,
        }

    def push(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._texts.append(text)
        return [{"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": text}]

    def end(self, status: str) -> list[Json]:
        name = "response.function_call_arguments.done"
        done = {"type": name, "item_id": self.id, "name": self._name, "arguments": self.text}
        return [done, *super().end(status)]

    def add_to(self, turn: Json) -> None:
        function = {"name": self._name, "arguments": self.text}
        turn.setdefault("tool_calls", []).append({"id": self._call_id, "type": "function", "function": function})
