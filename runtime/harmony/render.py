"""A chat request as the prompt's token ids.

Owns the layout of a Harmony prompt. Invariant: special ids come from this module's layout only; whatever a client wrote
(messages, results, names, descriptions, schemas) is encoded as ordinary text. Must not know HTTP or the engine.

The system message comes from openai-harmony, which holds OpenAI's own wording of the built-in tools. The rest is laid
out here, because the library keeps the analysis of earlier turns while a tool loop is open, and loses parts of schemas
(tools.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gptoss_trt.runtime.harmony.conversation import ConversationError, Message, read_conversation
from gptoss_trt.runtime.harmony.library import harmony_encoding
from gptoss_trt.runtime.harmony.tokenizer import Tokenizer
from gptoss_trt.runtime.harmony.tools import Tools, declare_functions, read_tools

START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL = 200006, 200007, 200008, 200005, 200003, 200012

EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high"}
"""Accepted reasoning efforts and the level that the model knows. "minimal" is its lowest; "none" does not exist."""
DEFAULT_EFFORT = "medium"


def render_chat(request: Mapping[str, Any], *, current_date: str) -> list[int]:
    """The prompt of a chat request (`messages`) or a Responses request (`input`), up to `<|start|>assistant`.

    `current_date`: what the system message says, as YYYY-MM-DD; injected, so a prompt depends on its arguments only.
    Leading system and developer messages become one developer message with the tools and the response format; later
    ones stay where they are. Analysis that a final answer followed is dropped. Raises ConversationError.
    """
    tools = read_tools(request)
    messages = read_conversation(request, tools.names)
    ids = list(_system_message(reasoning_effort(request), current_date, tools.builtins, bool(tools.functions)))
    leading = next((i for i, message in enumerate(messages) if message.kind != "instructions"), len(messages))
    developer = _developer_text([message.text for message in messages[:leading]], tools, request)
    if developer:
        ids += _message(["developer"], developer)
    for message in _without_past_analysis(messages[leading:]):
        ids += _LAYOUTS[message.kind](message)
    return [*ids, START, *_ordinary("assistant")]


def reasoning_effort(request: Mapping[str, Any]) -> str:
    """low, medium or high, from `reasoning_effort` or `reasoning.effort`. Raises ConversationError for another word."""
    param, effort = "reasoning_effort", request.get("reasoning_effort")
    reasoning = request.get("reasoning")
    if effort is None and isinstance(reasoning, Mapping):
        param, effort = "reasoning.effort", reasoning.get("effort")
    if effort is None:
        return DEFAULT_EFFORT
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise ConversationError(param, f"is {effort!r}; allowed: {', '.join(EFFORTS)}")
    return EFFORTS[effort]


def response_schema(request: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]] | None:
    """(name, description, schema) of `response_format` or the Responses API's `text.format`; None for plain text.

    Raises ConversationError.
    """
    param, chosen = "response_format", request.get("response_format")
    text = request.get("text")
    if chosen is None and isinstance(text, Mapping):
        param, chosen = "text.format", text.get("format")
    if chosen is None:
        return None
    kind = chosen.get("type") if isinstance(chosen, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object", "", {"type": "object"}
    if kind != "json_schema":
        raise ConversationError(f"{param}.type", f"is {kind!r}; allowed: text, json_object, json_schema")
    body = chosen.get("json_schema", chosen)
    name = body.get("name") if isinstance(body, Mapping) else None
    schema = body.get("schema") if isinstance(body, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ConversationError(f"{param}.json_schema.name", f"is {name!r}; a name is needed")
    if not isinstance(schema, Mapping):
        raise ConversationError(f"{param}.json_schema.schema", "is missing; a JSON Schema object is needed")
    description = body.get("description")
    return name, description if isinstance(description, str) else "", schema


def _developer_text(instructions: Sequence[str], tools: Tools, request: Mapping[str, Any]) -> str:
    sections = []
    written = [text for text in instructions if text]
    if written:
        sections.append("# Instructions\n\n" + "\n\n".join(written))
    if tools.functions:
        sections.append("# Tools\n\n" + declare_functions(tools.functions))
    wanted = response_schema(request)
    if wanted:
        name, description, schema = wanted
        comment = "".join(f"// {line}\n" for line in description.splitlines())
        body = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        sections.append(f"# Response Formats\n\n## {' '.join(name.split())}\n\n{comment}{body}")
    return "\n\n".join(sections)


def _without_past_analysis(messages: Sequence[Message]) -> Iterable[Message]:
    """Analysis stays only where no final answer follows it: in a tool loop that is not finished."""
    last_final = max((i for i, message in enumerate(messages) if message.kind == "final"), default=-1)
    return (message for i, message in enumerate(messages) if message.kind != "reasoning" or i > last_final)


@functools.lru_cache(maxsize=64)
def _system_message(effort: str, current_date: str, builtins: tuple[str, ...], has_functions: bool) -> tuple[int, ...]:
    import openai_harmony as library

    content = library.SystemContent.new().with_conversation_start_date(current_date)
    content = content.with_reasoning_effort(library.ReasoningEffort(effort.capitalize()))
    for name in builtins:
        content = content.with_browser_tool() if name == "browser" else content.with_python_tool()
    message = library.Message.from_role_and_content(library.Role.SYSTEM, content)
    options = library.RenderOptions(conversation_has_function_tools=has_functions)
    return tuple(harmony_encoding().render(message, options))


def _ordinary(text: str) -> list[int]:
    return Tokenizer.load().encode_ordinary(text)


def _message(header: Sequence[str | int], text: str, end: int = END) -> list[int]:
    """`<|start|>`, the header (text, and special ids as numbers), `<|message|>`, the text, and the closing id."""
    ids = [START]
    for part in header:
        ids += [part] if isinstance(part, int) else _ordinary(part)
    return [*ids, MESSAGE, *_ordinary(text), end]


def _call(message: Message) -> list[int]:
    role = f"assistant to={message.name}"
    if message.name.startswith("functions."):
        return _message([role, CHANNEL, "commentary ", CONSTRAIN, "json"], message.text, CALL)
    return _message([role, CHANNEL, "analysis code"], message.text, CALL)


def _result(message: Message) -> list[int]:
    channel = "commentary" if message.name.startswith("functions.") else "analysis"
    return _message([f"{message.name} to=assistant", CHANNEL, channel], message.text)


_LAYOUTS = {
    "instructions": lambda message: _message(["developer"], f"# Instructions\n\n{message.text}"),
    "user": lambda message: _message(["user"], message.text),
    "reasoning": lambda message: _message(["assistant", CHANNEL, "analysis"], message.text),
    "preamble": lambda message: _message(["assistant", CHANNEL, "commentary"], message.text),
    "final": lambda message: _message(["assistant", CHANNEL, "final"], message.text),
    "call": _call,
    "result": _result,
}
