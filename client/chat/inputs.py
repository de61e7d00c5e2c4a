"""Where user turns come from: a terminal with history and completion, or the lines of a pipe.

Invariant: `read` gives None once at the end and raises KeyboardInterrupt only from a terminal's Ctrl-C. Must not know
what a line means.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Inputs(Protocol):
    interactive: bool

    def read(self, prompt: str) -> str | None: ...


class TerminalInputs:
    """prompt_toolkit: history, slash completion, Alt-Enter for a new line."""

    interactive = True

    def __init__(self, commands: Iterable[str]) -> None:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=keys,
        )

    def read(self, prompt: str) -> str | None:
        try:
            return self._session.prompt(prompt)
        except EOFError:
            return None


class LineInputs:
    """Every line of stdin that is not blank. Bytes that are no UTF-8 are read as U+FFFD."""

    interactive = False

    def read(self, prompt: str) -> str | None:
        for data in sys.stdin.buffer:
            line = data.decode("utf-8", "replace")
            if line.strip():
                return line.rstrip("\r\n")
        return None
