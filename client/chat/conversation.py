"""A conversation's state: settings, messages, and the request that continues it.

Invariant: `messages` is always one that a server accepts: every tool call in it has its result before the next user
turn. Must not know a client nor a terminal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EFFORTS = ("low", "medium", "high")


@dataclass
class Settings:
    """What every request of the conversation carries; None leaves the choice to the server."""

    model: str = "gpt-oss"
    system: str | None = None
    effort: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


class Conversation:
    """Messages so far; `settings` may be changed between turns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.messages: list[dict[str, Any]] = []
        self._open_calls: list[dict[str, Any]] = []
        self._turn_start = 0

    @property
    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the last answer that have no result yet."""
        return list(self._open_calls)

    def reset(self) -> None:
        """Forgets every message; settings stay."""
        self.messages, self._open_calls, self._turn_start = [], [], 0

    def add_user(self, text: str) -> None:
        """Begins a turn. A turn whose tool calls were never answered is taken back first: nothing could follow it."""
        if self._open_calls:
            self.take_back()
        self._turn_start = len(self.messages)
        self.messages.append({"role": "user", "content": text})

    def add_answer(self, message: dict[str, Any] | None) -> None:
        """Appends the assistant's message; None takes the turn back, as if it had not been asked."""
        if message is None:
            self.take_back()
            return
        self.messages.append(message)
        self._open_calls = list(message.get("tool_calls", []))

    def add_tool_result(self, result: str) -> None:
        """The result of the first open call. Raises IndexError when there is none."""
        call = self._open_calls.pop(0)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def take_back(self) -> None:
        """Removes the turn in progress: its user message and what followed."""
        del self.messages[self._turn_start :]
        self._open_calls = []

    def body(self) -> dict[str, Any]:
        """The /v1/chat/completions body that asks for the next answer."""
        settings = self.settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {
            "reasoning_effort": settings.effort,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "max_completion_tokens": settings.max_tokens,
            "tools": settings.tools or None,
        }
        body.update({name: value for name, value in optional.items() if value is not None})
        return body


def load_tools(path: Path) -> list[dict[str, Any]]:
    """Tools from a JSON file: a list (or {"tools": list}) of OpenAI tools or bare functions.

    Raises ValueError that names the file and the entry.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds no list of tools")
    tools = []
    for number, entry in enumerate(entries):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{path}: tool {number} has no function with a name")
        tools.append({"type": "function", "function": function})
    return tools
