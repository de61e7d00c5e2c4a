"""How a conversation is shown: in a terminal, as plain text, or as JSON lines.

Invariant: control characters of a model never reach a terminal, and plain text on stdout is the conversation only. Must
not know where events come from.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol, TextIO

from rich.console import Console

from gptoss_trt.client.chat.events import Content, Event, Finish, Reasoning, ToolArguments, ToolCall
from gptoss_trt.client.errors import ServerError

CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
STYLES: dict[type, str] = {Reasoning: "dim italic", Content: "", ToolCall: "cyan", ToolArguments: "cyan"}
JSON_NAMES: dict[type, str] = {
    Reasoning: "reasoning",
    Content: "content",
    ToolCall: "tool_call",
    ToolArguments: "tool_arguments",
    Finish: "finish",
}


def printable(text: str) -> str:
    """Text without what a terminal would obey: control characters but newline and tab become U+FFFD."""
    return text.translate(CONTROLS)


class Display(Protocol):
    """Takes what happens, in order."""

    def asked(self, text: str) -> None:
        """A user turn (or a tool's result) was sent."""

    def event(self, event: Event) -> None: ...

    def cancelled(self) -> None: ...

    def failed(self, error: ServerError) -> None: ...

    def notice(self, text: str) -> None:
        """Something about the session, not part of the conversation."""


class TerminalDisplay:
    """Colours: reasoning dimmed, tool calls cyan, notices and counts dimmed. Text appears as it arrives."""

    def __init__(self, console: Console | None = None, *, show_reasoning: bool = True) -> None:
        self._console = console or Console(highlight=False)
        self._show_reasoning = show_reasoning
        self._part: type | None = None
        self._column_zero = True
        self._started = self._first = 0.0

    def asked(self, text: str) -> None:
        self._started, self._first, self._part = time.monotonic(), 0.0, None

    def event(self, event: Event) -> None:
        self._first = self._first or time.monotonic()
        if isinstance(event, Finish):
            self._fresh_line()
            self._write(self._summary(event) + "\n\n", "dim")
            return
        if isinstance(event, Reasoning) and not self._show_reasoning:
            return
        if type(event) is not self._part and not isinstance(event, ToolArguments):
            self._fresh_line()
        self._part = type(event)
        text = f"call {event.name} " if isinstance(event, ToolCall) else event.text
        self._write(text, STYLES[type(event)])

    def cancelled(self) -> None:
        self._fresh_line()
        self._write("cancelled\n\n", "yellow")

    def failed(self, error: ServerError) -> None:
        self._fresh_line()
        self._write(f"{error}\n\n", "red")

    def notice(self, text: str) -> None:
        self._fresh_line()
        self._write(text + "\n", "dim")

    def _summary(self, finish: Finish) -> str:
        first_ms, total_s = 1000 * (self._first - self._started), time.monotonic() - self._started
        parts = [f"first text after {first_ms:.0f} ms, all in {total_s:.1f} s"]
        if "completion_tokens" in finish.usage:
            prompt, completion = finish.usage.get("prompt_tokens", 0), finish.usage["completion_tokens"]
            parts.insert(0, f"{prompt} tokens in, {completion} out")
        if finish.reason == "length":
            parts.append("cut at the token limit")
        return "; ".join(parts)

    def _fresh_line(self) -> None:
        if not self._column_zero:
            self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        self._console.print(printable(text), style=style, end="", markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
        self._column_zero = text.endswith("\n")


class PlainDisplay:
    """Answers on stdout, one after another; everything else on stderr.

    Reasoning, when shown, stands in lines of its own. Tool calls are part of the conversation: `call NAME ARGUMENTS`.
    """

    def __init__(
        self, out: TextIO | None = None, errors: TextIO | None = None, *, show_reasoning: bool = False
    ) -> None:
        self._out, self._errors = out or sys.stdout, errors or sys.stderr
        self._show_reasoning = show_reasoning
        self._part: type | None = None
        self._column_zero = True

    def asked(self, text: str) -> None:
        self._part = None

    def event(self, event: Event) -> None:
        if isinstance(event, Finish):
            self._fresh_line()
            return
        if isinstance(event, Reasoning) and not self._show_reasoning:
            return
        if type(event) is not self._part and not isinstance(event, ToolArguments):
            self._fresh_line()
            self._write("reasoning: " if isinstance(event, Reasoning) else "")
        self._part = type(event)
        self._write(f"call {event.name} " if isinstance(event, ToolCall) else event.text)

    def cancelled(self) -> None:
        self._fresh_line()
        self.notice("cancelled")

    def failed(self, error: ServerError) -> None:
        self._fresh_line()
        self.notice(str(error))

    def notice(self, text: str) -> None:
        print(text, file=self._errors, flush=True)

    def _fresh_line(self) -> None:
        if not self._column_zero:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._column_zero = text.endswith("\n")


class JsonDisplay:
    """One JSON object a line on stdout: {"event": user | reasoning | content | tool_call | tool_arguments | finish |
    cancelled | error, ...}. Notices go to stderr."""

    def __init__(self, out: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._out, self._errors = out or sys.stdout, errors or sys.stderr

    def asked(self, text: str) -> None:
        self._line("user", text=text)

    def event(self, event: Event) -> None:
        self._line(JSON_NAMES[type(event)], **vars(event))

    def cancelled(self) -> None:
        self._line("cancelled")

    def failed(self, error: ServerError) -> None:
        self._line("error", status=error.status, message=error.message, request_id=error.request_id)

    def notice(self, text: str) -> None:
        print(text, file=self._errors, flush=True)

    def _line(self, kind: str, **values: Any) -> None:
        print(json.dumps({"event": kind, **values}, ensure_ascii=False), file=self._out, flush=True)
