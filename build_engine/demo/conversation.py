"""Conversations of the demo as data, and their Harmony text as pieces: what the server sends and what the model
should say.

Invariant: the pieces of a conversation up to a step are byte for byte the prompt that the server renders for the
same chat request (a test compares them), followed by what the model is to write. Knows no token ids and no random
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Effort = Literal["low", "medium", "high"]
SYSTEM_HEAD = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: "
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
CALLS_LINE = "\nCalls to these tools must go to the commentary channel: 'functions'."


@dataclass(frozen=True)
class Param:
    """One parameter of a tool; `choices` makes it an enumeration of strings."""

    name: str
    kind: Literal["string", "number"] = "string"
    description: str | None = None
    required: bool = True
    choices: tuple[str, ...] = ()

    def render(self) -> str:
        words = " | ".join(f'"{choice}"' for choice in self.choices) or self.kind
        note = f"// {self.description}\n" if self.description else ""
        return f"{note}{self.name}{'' if self.required else '?'}: {words},\n"

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": self.kind}
        if self.description:
            out["description"] = self.description
        if self.choices:
            out["enum"] = list(self.choices)
        return out


@dataclass(frozen=True)
class Tool:
    """A declared function."""

    name: str
    description: str
    params: tuple[Param, ...] = ()

    def render(self) -> str:
        body = f"(_: {{\n{''.join(param.render() for param in self.params)}}})" if self.params else "()"
        return f"// {self.description}\ntype {self.name} = {body} => any;\n\n"

    def request(self) -> dict[str, Any]:
        """The tool as an OpenAI chat request declares it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.params:
            function["parameters"] = {
                "type": "object",
                "properties": {param.name: param.schema() for param in self.params},
                "required": [param.name for param in self.params if param.required],
            }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Call:
    """A function call as the model writes it; `arguments` is JSON text without spaces."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Step:
    """One turn of the model: optional analysis, then a final answer or a call with the tool's result."""

    analysis: str | None = None
    final: str | None = None
    call: Call | None = None
    result: str | None = None

    def __post_init__(self) -> None:
        if (self.final is None) == (self.call is None):
            raise ValueError(f"a step holds one of final and call, not {self.final!r} and {self.call!r}")


@dataclass(frozen=True)
class Exchange:
    """A user's message and the model's steps up to its final answer."""

    user: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Conversation:
    """A chat whose last exchange is the one to learn or to check, from step `first` on."""

    exchanges: tuple[Exchange, ...]
    date: str
    effort: Effort = "medium"
    tools: tuple[Tool, ...] = ()
    instructions: str | None = None
    first: int = 0
    noise: str | None = None  # idle instructions of words that training mostly replaces by random vectors
    wild: tuple[str, ...] = field(default=())  # words whose tokens become random vectors in training

    @property
    def target(self) -> Step:
        """The first step that the model is to write."""
        return self.exchanges[-1].steps[self.first]


@dataclass(frozen=True)
class Piece:
    """Text or one special token; `learn` marks what the model writes.

    `noise` text is mostly replaced by random vectors. A `quiet` token never enters the loss: the end of an earlier
    answer stands where an answer of this turn has `<|return|>`, after the same text.
    """

    text: str
    special: bool = False
    learn: bool = False
    noise: bool = False
    quiet: bool = False


def _special(name: str, learn: bool = False) -> Piece:
    return Piece(name, True, learn)


def _message(role: str, text: str) -> Iterator[Piece]:
    yield from (_special("start"), Piece(role), _special("message"), Piece(text), _special("end"))


def _tools_section(tools: tuple[Tool, ...]) -> str:
    body = "".join(tool.render() for tool in tools)
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{body}}} // namespace functions"


def _head(chat: Conversation) -> Iterator[Piece]:
    system = f"{SYSTEM_HEAD}{chat.date}\n\nReasoning: {chat.effort}\n\n{CHANNELS}{CALLS_LINE if chat.tools else ''}"
    yield from _message("system", system)
    if chat.noise is not None:
        yield from (_special("start"), Piece("developer"), _special("message"), Piece("# Instructions\n\n"))
        yield Piece(chat.noise, noise=True)
        yield from ((Piece("\n\n" + _tools_section(chat.tools)),) if chat.tools else ())
        yield _special("end")
        return
    sections = []
    if chat.instructions is not None:
        sections.append(f"# Instructions\n\n{chat.instructions}")
    if chat.tools:
        sections.append(_tools_section(chat.tools))
    if sections:
        yield from _message("developer", "\n\n".join(sections))


def _step(step: Step, analysis: bool, learn: bool, last: bool) -> Iterator[Piece]:
    """A step's pieces; `<|start|>assistant` before its first message belongs to the prompt."""
    yield _special("start")
    yield Piece("assistant")
    if analysis and step.analysis is not None:
        yield from (_special("channel", learn), Piece("analysis", learn=learn), _special("message", learn))
        yield from (Piece(step.analysis, learn=learn), _special("end", learn))
        yield from (_special("start", learn), Piece("assistant", learn=learn))
    if step.call is None:
        yield from (_special("channel", learn), Piece("final", learn=learn), _special("message", learn))
        yield Piece(step.final or "", learn=learn)
        yield Piece("return" if last else "end", special=True, learn=learn, quiet=not learn)
        return
    yield from (Piece(f" to=functions.{step.call.name}", learn=learn), _special("channel", learn))
    yield from (Piece("commentary ", learn=learn), _special("constrain", learn), Piece("json", learn=learn))
    yield from (_special("message", learn), Piece(step.call.arguments, learn=learn), _special("call", learn))
    if step.result is not None:
        yield from (_special("start"), Piece(f"functions.{step.call.name} to=assistant"), _special("channel"))
        yield from (Piece("commentary"), _special("message"), Piece(step.result), _special("end"))


def pieces(chat: Conversation) -> Iterator[Piece]:
    """The whole conversation, the model's turns of the last exchange from step `first` on marked to be learnt."""
    yield from _head(chat)
    for exchange in chat.exchanges[:-1]:
        yield from _message("user", exchange.user)
        for step in exchange.steps:
            yield from _step(step, analysis=False, learn=False, last=False)
    last = chat.exchanges[-1]
    yield from _message("user", last.user)
    for index, step in enumerate(last.steps):
        learn = index >= chat.first
        yield from _step(step, analysis=learn, learn=learn, last=True)


def request(chat: Conversation) -> dict[str, Any]:
    """The chat request whose answer is `chat.target` (OpenAI's form)."""
    messages: list[dict[str, Any]] = []
    if (chat.noise or chat.instructions) is not None:
        messages.append({"role": "system", "content": chat.noise or chat.instructions})
    count = 0
    for number, exchange in enumerate(chat.exchanges):
        messages.append({"role": "user", "content": exchange.user})
        done = exchange.steps if number < len(chat.exchanges) - 1 else exchange.steps[: chat.first]
        for step in done:
            if step.call is None:
                messages.append({"role": "assistant", "content": step.final})
                continue
            count += 1
            function = {"name": step.call.name, "arguments": step.call.arguments}
            call = {"id": f"call_{count}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"call_{count}", "content": step.result or ""})
    out: dict[str, Any] = {"messages": messages, "reasoning_effort": chat.effort}
    if chat.tools:
        out["tools"] = [tool.request() for tool in chat.tools]
    return out
