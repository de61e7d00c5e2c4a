"""What a message header says: whose message it is, where its text goes, and what of the header is really text.

Owns the header grammar and its repairs. Invariant: a pure function of the header's sections and the declared tools, and
no byte of a header that a `<|message|>` confirms is ever taken for text. Must not know streams, tokens or events.

A header is a list of sections. The first holds what stands before any marker (role, recipient); each `<|channel|>` and
`<|constrain|>` begins another one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Mark(Enum):
    """What a section begins with."""

    ROLE = auto()  # nothing, or <|start|>
    CHANNEL = auto()
    CONSTRAIN = auto()


class Kind(Enum):
    """Where a message's text goes; the value is the event's name."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool_args"
    DROP = ""  # an unknown channel: never shown
    FOREIGN = "foreign"  # not the assistant's message: the model has begun to write somebody else's turn


@dataclass
class Section:
    """One part of a header: its marker and the bytes that follow it."""

    mark: Mark
    text: bytearray


@dataclass(frozen=True)
class Heading:
    """A header, read. `rest` is what the grammar did not take: the message itself when `<|message|>` is missing."""

    kind: Kind
    has_channel: bool
    tool: str = ""  # name without `functions.`, for Kind.TOOL
    rest: bytes = b""

    @property
    def rest_is_prose(self) -> bool:
        """Whether `rest` reads as text rather than as one stray word of a header."""
        text = self.rest.strip()
        return b"to=" not in text and (len(text.split()) > 1 or not text.isascii() or text[-1:] in (b".", b"!", b"?"))

    @property
    def rest_is_recipient(self) -> bool:
        """Whether `rest` begins a recipient (` to=functions.`), as a header cut short does."""
        return self.rest.lstrip()[:3] in (b"to", b"to=")


_CHANNELS = {b"analysis": Kind.REASONING, b"commentary": Kind.CONTENT, b"final": Kind.CONTENT}
_GLUED = (b"json", b"code", b"text", b"response", b"to", b"assistant", *_CHANNELS)  # words seen stuck to the one before
_NOT_TOOLS = frozenset({"assistant", "user", "all", "system", "developer", *(name.decode() for name in _CHANNELS)})
_FOREIGN_ROLES = frozenset({"user", "system", "developer", "tool", "function", "human"})
_FOREIGN_PREFIXES = ("functions.", "browser.", "python")

_NAME = rb"[\"']?([^\s{}\[\]()\"'<>,;=]+)[\"']?"
_recipient = re.compile(rb"\s*to=\s*" + _NAME)
_recipient_anywhere = re.compile(rb"to=\s*" + _NAME)
_first_word = re.compile(rb"\s*([A-Za-z][\w.\-]*)")
_channel_word = re.compile(rb"\s*([A-Za-z]*)")
_content_type = re.compile(rb"\s*(?:json|code|text|response)(?=[\s{\[]|$)", re.IGNORECASE)
_namespace = re.compile(r"\Afunctions[.:/]", re.IGNORECASE)
_roles = re.compile(rb"\s*(?:assistant)*")
_roles_apart = re.compile(rb"(?:\s*assistant(?=assistant|to=|\s|$))*")  # where plain text may begin with such a word


def read_heading(sections: Sequence[Section], *, started: bool, complete: bool, tools: Collection[str]) -> Heading:
    """Reads a header.

    `started`: it begins with `<|start|>`, so a role must follow. `complete`: `<|message|>` ends it, so what the grammar
    does not take is debris; otherwise it is returned as `rest`.
    """
    role_word = _role_word(sections, started=started, complete=complete)
    constrained = any(section.mark is Mark.CONSTRAIN for section in sections)
    if _is_foreign(role_word, tools) and not (constrained and _is_tool_word(role_word, tools)):
        return Heading(Kind.FOREIGN, has_channel=False)
    channel, recipient, rests = b"", b"", []
    for section in sections:
        text = bytes(section.text)
        position, word = _take_leading_words(section.mark, text, started=started, complete=complete)
        channel = word or channel
        found = _recipient.match(text, position) or (_recipient_anywhere.search(text) if complete else None)
        if found:
            position = max(position, found.end())
            if recipient.decode("utf-8", "replace") in (_NOT_TOOLS | {""}):
                recipient = found[1]
        if section.mark is not Mark.ROLE and (typed := _content_type.match(text, position)):
            position = typed.end()
        rests.append(text[position:])
    if not recipient and _is_foreign(role_word, tools):
        recipient = role_word.encode()
    tool = tool_name(recipient.decode("utf-8", "replace"), tools)
    has_channel = any(section.mark is Mark.CHANNEL for section in sections)
    kind = Kind.TOOL if tool else _CHANNELS.get(channel, Kind.DROP) if channel else Kind.CONTENT
    if kind is Kind.CONTENT and channel != b"final" and complete and _is_unknown(role_word, sections):
        kind = Kind.FOREIGN
    rest = b"" if complete else _joined(rests)
    return Heading(kind, has_channel, tool or "", rest)


def _joined(rests: Sequence[bytes]) -> bytes:
    """The leftovers of all sections. A character never spans the marker between two; the last may be incomplete."""
    return b"".join([*map(whole_characters, rests[:-1]), rests[-1]]).lstrip()


def whole_characters(data: bytes) -> bytes:
    """`data` with U+FFFD for what is no character: the form of text that a special token has ended."""
    return data.decode("utf-8", "replace").encode()


def tool_name(recipient: str, tools: Collection[str]) -> str | None:
    """The tool that a recipient means, without `functions.`; None when the recipient is no tool.

    An undeclared name is repaired only when the repair gives a declared one: a content type or channel glued to its
    end, a doubled namespace, punctuation. Otherwise it passes through as the model wrote it, and the client decides.
    """
    if not recipient or recipient in _NOT_TOOLS:
        return None
    name = _namespace.sub("", recipient).rstrip(".:") or "functions"
    if name in tools:
        return name
    candidates = [name.removeprefix("functions.")]
    candidates += [name.removesuffix(word.decode()) for word in _GLUED]
    return next((candidate for candidate in candidates if candidate in tools), name)


def _take_leading_words(mark: Mark, text: bytes, *, started: bool, complete: bool) -> tuple[int, bytes]:
    """(position behind the words that open a section of this kind, the channel among them or b"")."""
    if mark is Mark.CONSTRAIN:
        return 0, b""
    if mark is Mark.CHANNEL:
        return _take_channel(text, 0)
    roles = (_roles if started or complete else _roles_apart).match(text)
    position = roles.end() if roles else 0
    if complete:  # "assistantfinal" and "assistant final": the channel's marker is missing, its name is not
        behind, word = _take_channel(text, position)
        if word in _CHANNELS:
            return behind, word
    return position, b""


def _take_channel(text: bytes, position: int) -> tuple[int, bytes]:
    found = _channel_word.match(text, position)
    assert found is not None  # the pattern matches the empty string
    word = found[1].lower()
    for channel in _CHANNELS:
        if word.startswith(channel) and word.removeprefix(channel) in _GLUED:
            return found.start(1) + len(channel), channel
    return found.end(), word


def _role_word(sections: Sequence[Section], *, started: bool, complete: bool) -> str:
    """The word in the role's place, where one is certain to be a role: "" in a header that may be plain text."""
    text = bytes(sections[0].text)
    found = _first_word.match(text)
    if not found or not (started or (complete and text.strip() == found[1])):
        return ""
    return found[1].decode()


def _is_unknown(role: str, sections: Sequence[Section]) -> bool:
    """Whether the role's place holds a word that is no known role: the name of some other author."""
    return bool(role) and role.encode() not in _CHANNELS and b"assist" not in sections[0].text.lower()


def _is_tool_word(role: str, tools: Collection[str]) -> bool:
    return role.startswith(_FOREIGN_PREFIXES) or role in tools


def _is_foreign(role: str, tools: Collection[str]) -> bool:
    return role.lower() in _FOREIGN_ROLES or _is_tool_word(role, tools)
