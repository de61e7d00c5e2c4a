"""Harmony parser: token ids of one completion in, reasoning, content and tool calls out.

Owns the state of one stream. Invariant: the events, joined by channel, are the same for any chunking of the same ids;
no special token's text is ever part of one; nothing that the model writes raises. Must not know requests, HTTP or the
engine.

The machine has three states. In HEADER it gathers sections (header.py reads them), in CONTENT it decodes text into the
message's channel, in DONE it ignores everything. `_TRANSITIONS` says what each special token does in each state; a pair
that is not in it (a marker that makes no sense there, a reserved token) does nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Literal

from gptoss_trt.runtime.harmony.header import Heading, Kind, Mark, Section, read_heading, whole_characters
from gptoss_trt.runtime.harmony.tokenizer import Tokenizer

TextEvent = tuple[Literal["reasoning", "content"], str]
ToolEvent = tuple[Literal["tool_name", "tool_args"], int, str]
FinishEvent = tuple[Literal["finish"], Literal["stop", "tool_calls", "length"], "str | None"]
HarmonyEvent = TextEvent | ToolEvent | FinishEvent

START, END, MESSAGE, CHANNEL, CONSTRAIN = 200006, 200007, 200008, 200005, 200003
RETURN, CALL, END_OF_TEXT = 200002, 200012, 199999

# Bytes of a header without <|message|> after which its text is taken for the message: with a channel the text's place
# is known, so it can flow early; bare text waits longer, because what follows decides whether it was reasoning.
_HEADER_LIMIT = 160
_BARE_LIMIT = 1024

_REASONS = ("stop", "length", "cancelled")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _State(Enum):
    HEADER = auto()
    CONTENT = auto()
    DONE = auto()


class HarmonyStream:
    """Parses one completion, whose prompt ended in `<|start|>assistant`.

    Events are tuples: ("reasoning" | "content", text), ("tool_name", index, name), ("tool_args", index, text) and, at
    the end, one ("finish", "stop" | "tool_calls" | "length", None). Its last place is for an error text; everything
    that a model can write is recovered, so it stays None.

    `declared_tools`: names, with or without `functions.`. `parallel_tool_calls=False`: all after the first tool call is
    dropped. `engine_finish`: what `finish()` takes for its reason when it gets none.
    """

    def __init__(
        self,
        declared_tools: Collection[str] = (),
        *,
        parallel_tool_calls: bool = True,
        engine_finish: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer or Tokenizer.load()
        self._tools = frozenset(name.removeprefix("functions.") for name in declared_tools)
        self._parallel = parallel_tool_calls
        self._engine_finish = _checked_reason(engine_finish or "stop")
        self._decoder = _utf8_decoder("replace")
        self._events: list[HarmonyEvent] = []
        self._kind = Kind.DROP
        self._calls = 0  # tool calls begun
        self._answered = False  # something of the answer has come out: content or a call
        self._pending = ""  # bare text, closed, whose place the next message decides
        self.reasoning_tokens = 0  # ordinary tokens of analysis messages
        self._finished = False
        self._state = _State.HEADER
        self._sections: list[Section] = []
        self._started = self._between = False
        self._header_bytes, self._header_limit = 0, _BARE_LIMIT
        self._begin_header()

    @property
    def done(self) -> bool:
        """Whether a terminal token (or the end of the only tool call) was seen: all later ids are ignored."""
        return self._state is _State.DONE

    @property
    def in_content(self) -> bool:
        """Whether an ordinary token would go to the content now."""
        return self._state is _State.CONTENT and self._kind is Kind.CONTENT

    def push(self, token_ids: Iterable[int]) -> list[HarmonyEvent]:
        """Events that `token_ids` complete. Raises ValueError for an id outside the vocabulary, RuntimeError after
        `finish`."""
        if self._finished:
            raise RuntimeError("push after finish")
        pieces = self._tokenizer.pieces
        run: list[bytes] = []  # pieces of the open message
        for token_id in token_ids:
            if not 0 <= token_id < len(pieces):
                self._tokenizer.check_id(token_id)
            piece = pieces[token_id]
            if piece is None:
                self._run(run)
                self._special(token_id)
            elif self._state is _State.CONTENT:
                run.append(piece)
            elif self._state is _State.HEADER:
                self._header_text(piece)
        self._run(run)
        return self._take_events()

    def finish(self, reason: str | None = None) -> list[HarmonyEvent]:
        """The events that were still held back, and the one "finish". `reason` is the engine's: a completion that it
        cut ("length", "cancelled") ends in "length", unless a terminal token had come."""
        if self._finished:
            raise RuntimeError("finish after finish")
        cut = _checked_reason(reason or self._engine_finish) != "stop"
        terminated = self.done
        if self._state is _State.CONTENT:
            self._text(b"", final=True)
        elif self._state is _State.HEADER:
            self._close_header(last=True, cut=cut)
        self._release_pending("content")
        self._finished = True
        self._state = _State.DONE
        if cut and not terminated:
            self._events.append(("finish", "length", None))
        else:
            self._events.append(("finish", "tool_calls" if self._calls else "stop", None))
        return self._take_events()

    # Text

    def _run(self, run: list[bytes]) -> None:
        if run:
            self.reasoning_tokens += len(run) if self._kind is Kind.REASONING else 0
            self._text(b"".join(run))
            run.clear()

    def _text(self, data: bytes, *, final: bool = False) -> None:
        """Decodes bytes of the open message into its channel."""
        if not data and not final:
            return
        text = self._decoder.decode(data, final)
        if not text or self._kind is Kind.DROP:
            return
        if self._kind is Kind.TOOL:
            self._events.append(("tool_args", self._calls - 1, text))
        elif self._kind is Kind.REASONING:
            self._events.append(("reasoning", text))
        else:
            self._answered = True
            self._events.append(("content", text))

    def _header_text(self, piece: bytes) -> None:
        self._sections[-1].text += piece
        self._header_bytes += len(piece)
        if self._header_bytes > self._header_limit:
            self._header_limit = 2 * self._header_bytes  # read again when it has doubled: linear time in all
            self._open_without_message()

    def _take_events(self) -> list[HarmonyEvent]:
        events, self._events = self._events, []
        return events

    def _release_pending(self, name: Literal["reasoning", "content"]) -> None:
        if self._pending:
            self._events.append((name, self._pending))
            self._answered |= name == "content"
            self._pending = ""

    # Headers

    def _begin_header(self, *, started: bool = False, between: bool = False) -> None:
        """`started`: after `<|start|>`. `between`: after a message's end, where text before a marker is debris."""
        self._state = _State.HEADER
        self._sections = [Section(Mark.ROLE, bytearray())]
        self._started, self._between = started, between
        self._header_bytes, self._header_limit = 0, _BARE_LIMIT

    def _heading(self, *, complete: bool) -> Heading:
        return read_heading(self._sections, started=self._started, complete=complete, tools=self._tools)

    def _open(self, heading: Heading) -> None:
        if heading.kind is Kind.FOREIGN:
            self._state = _State.DONE
            return
        self._release_pending("reasoning")
        self._state = _State.CONTENT
        self._kind = heading.kind
        if heading.kind is Kind.TOOL:
            self._events.append(("tool_name", self._calls, heading.tool))
            self._calls += 1
            self._answered = True
        self._text(heading.rest)

    def _open_without_message(self) -> None:
        heading = self._heading(complete=False)
        if heading.kind is Kind.FOREIGN or not heading.rest.strip():
            return
        if self._between and self._answered and not heading.has_channel:
            heading = Heading(Kind.DROP, has_channel=False)
        self._open(heading)

    def _close_header(self, *, last: bool, cut: bool = False) -> None:
        """Ends a header that no `<|message|>` ended. `last`: nothing follows. `cut`: the engine stopped it midway."""
        heading = self._heading(complete=False)
        if heading.kind is Kind.FOREIGN:
            self._state = _State.DONE
        elif heading.kind is Kind.TOOL:
            if not cut or heading.rest_is_prose:
                self._whole_message(heading)
        elif not heading.rest.strip():
            return
        elif heading.has_channel:
            if not cut or heading.rest_is_prose:
                self._whole_message(heading)
        elif not (self._between and self._answered) and not (cut and heading.rest_is_recipient):
            # Without any header: the answer (a refusal, mostly) when nothing follows, else reasoning.
            self._pending += heading.rest.decode("utf-8", "replace")
            if last:
                self._release_pending("content")

    def _whole_message(self, heading: Heading) -> None:
        self._open(heading)
        self._text(b"", final=True)

    def _cut_in_header(self) -> bool:
        """A new message begins inside a header: what reads as text was a message without `<|message|>` and end, except
        between messages, where it is debris. Returns whether there was one."""
        heading = self._heading(complete=False)
        if heading.kind is Kind.TOOL or not heading.rest_is_prose or (self._between and not heading.has_channel):
            return False
        self._close_header(last=False)
        return True

    # Special tokens

    def _special(self, token_id: int) -> None:
        """A special token: what the table says, and in any case the end of a character that is still open."""
        action = _TRANSITIONS.get((self._state, token_id))
        if self._state is _State.CONTENT:
            self._text(b"", final=True)
        elif action is None and self._state is _State.HEADER:
            self._sections[-1].text = bytearray(whole_characters(bytes(self._sections[-1].text)))
        if action is not None:
            action(self)

    def _header_start(self) -> None:
        self._cut_in_header()
        if not self.done:
            self._begin_header(started=True)

    def _header_channel(self) -> None:
        role_only = self._started and len(self._sections) == 1  # stray words behind a role, confirmed by the marker
        if not role_only and self._cut_in_header():
            self._restart(started=False)
        if not self.done:
            self._begin_section(Mark.CHANNEL)

    def _header_constrain(self) -> None:
        self._begin_section(Mark.CONSTRAIN)

    def _begin_section(self, mark: Mark) -> None:
        self._sections.append(Section(mark, bytearray()))
        self._header_limit = max(_HEADER_LIMIT, 2 * self._header_bytes)

    def _header_message(self) -> None:
        self._open(self._heading(complete=True))

    def _header_end(self) -> None:
        self._close_header(last=False)
        self._after_message()

    def _header_terminal(self) -> None:
        self._close_header(last=True)
        self._terminal()

    def _content_start(self) -> None:
        self._after_message()
        self._restart(started=True)

    def _content_channel(self) -> None:
        self._after_message()
        self._restart(started=False)
        if not self.done:
            self._begin_section(Mark.CHANNEL)

    def _restart(self, *, started: bool) -> None:
        if not self.done:
            self._begin_header(started=started)

    def _after_message(self) -> None:
        if self.done:
            return
        if self._calls and not self._parallel:
            self._state = _State.DONE
        else:
            self._begin_header(between=True)

    def _terminal(self) -> None:
        self._release_pending("content")
        self._state = _State.DONE


def _checked_reason(reason: str) -> str:
    if reason not in _REASONS:
        raise ValueError(f"finish reason is {reason!r}; allowed: {', '.join(_REASONS)}")
    return reason


_TRANSITIONS: dict[tuple[_State, int], Callable[[HarmonyStream], None]] = {
    (_State.HEADER, START): HarmonyStream._header_start,
    (_State.HEADER, CHANNEL): HarmonyStream._header_channel,
    (_State.HEADER, CONSTRAIN): HarmonyStream._header_constrain,
    (_State.HEADER, MESSAGE): HarmonyStream._header_message,
    (_State.HEADER, END): HarmonyStream._header_end,
    (_State.HEADER, CALL): HarmonyStream._header_terminal,
    (_State.HEADER, RETURN): HarmonyStream._header_terminal,
    (_State.HEADER, END_OF_TEXT): HarmonyStream._header_terminal,
    (_State.CONTENT, START): HarmonyStream._content_start,
    (_State.CONTENT, CHANNEL): HarmonyStream._content_channel,
    (_State.CONTENT, END): HarmonyStream._after_message,
    (_State.CONTENT, CALL): HarmonyStream._terminal,
    (_State.CONTENT, RETURN): HarmonyStream._terminal,
    (_State.CONTENT, END_OF_TEXT): HarmonyStream._terminal,
}
