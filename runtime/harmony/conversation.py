"""A request's messages (chat messages or Responses items) as one flat list of Harmony messages.

Owns the reading of roles, content parts, reasoning, tool calls and tool results. Invariant: nothing that a client wrote
is dropped in silence; what cannot be said in Harmony is refused by its place in the request. Must not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["instructions", "user", "reasoning", "preamble", "final", "call", "result"]

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"})
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ConversationError(ValueError):
    """A request that no conversation can be made of. `param` is the place in the request, as `messages[1].content`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


@dataclass(frozen=True)
class Message:
    """One Harmony message. `name` is a call's recipient or a result's author (`functions.f`, `python`)."""

    kind: Kind
    text: str
    name: str = ""


def read_conversation(request: Mapping[str, Any], functions: Collection[str] = ()) -> list[Message]:
    """The messages of `request`: its `messages`, or the Responses API's `instructions` and `input`.

    `functions`: the names that the client declares; one of them is a function even if a built-in tool has that name.
    Raises ConversationError.
    """
    reader = _Reader(functions)
    if "messages" not in request and "input" in request:
        instructions = request.get("instructions")
        if instructions:
            reader.add("instructions", _text(instructions, "instructions"))
        items = request["input"]
        reader.read_items([{"role": "user", "content": items}] if isinstance(items, str) else items, "input")
    else:
        reader.read_items(request.get("messages"), "messages")
    return reader.messages


class _Reader:
    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions
        self.messages: list[Message] = []
        self._recipients: dict[str, str] = {}  # call id -> recipient
        self._open_calls: list[str] = []  # recipients without a result, for results that carry no id

    def add(self, kind: Kind, text: str, name: str = "") -> None:
        self.messages.append(Message(kind, text, name))

    def read_items(self, items: Any, param: str) -> None:
        if not isinstance(items, Sequence) or isinstance(items, str | bytes):
            raise ConversationError(param, f"is {_kind_of(items)}, not a list of messages")
        if not items:
            raise ConversationError(param, "is empty; at least one message is needed")
        for index, item in enumerate(items):
            place = f"{param}[{index}]"
            if not isinstance(item, Mapping):
                raise ConversationError(place, f"is {_kind_of(item)}, not an object")
            following = items[index + 1] if index + 1 < len(items) else None
            self._item(item, place, following)

    def _item(self, item: Mapping[str, Any], place: str, following: Any) -> None:
        item_type = item.get("type", "message")
        if item_type == "message" or "role" in item:
            self._message(item, place, following)
        elif item_type == "reasoning":
            parts = [*_parts(item.get("content"), f"{place}.content"), *_parts(item.get("summary"), f"{place}.summary")]
            text = _text(item.get("content"), f"{place}.content") or "".join(parts)
            if text:
                self.add("reasoning", text)
        elif item_type == "function_call":
            self._call(item, item.get("call_id"), place)
        elif item_type == "function_call_output":
            self._result(item.get("call_id"), None, _text(item.get("output"), f"{place}.output"), f"{place}.call_id")
        else:
            raise ConversationError(f"{place}.type", f"{item_type!r} is not supported")

    def _message(self, item: Mapping[str, Any], place: str, following: Any) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise ConversationError(f"{place}.role", f"is {role!r}; allowed: {', '.join(_ROLES)}")
        if role == "assistant":
            self._assistant(item, place, following)
            return
        for name in ("tool_calls", "function_call"):
            if item.get(name):
                raise ConversationError(f"{place}.{name}", f"is for assistant messages; this one's role is {role}")
        text = _text(item.get("content"), f"{place}.content", required=True)
        if role == "user":
            self.add("user", text)
        elif role in ("system", "developer"):
            self.add("instructions", text)
        elif role == "tool":
            self._result(item.get("tool_call_id"), item.get("name"), text, f"{place}.tool_call_id")
        else:
            self._result(None, item.get("name"), text, f"{place}.name")

    def _assistant(self, item: Mapping[str, Any], place: str, following: Any) -> None:
        reasoning_key = "reasoning" if item.get("reasoning") else "reasoning_content"
        reasoning = _text(item.get(reasoning_key), f"{place}.{reasoning_key}")
        content = item.get("content")
        if content is None:
            content = item.get("refusal")
        calls = item.get("tool_calls") or []
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ConversationError(f"{place}.tool_calls", f"is {_kind_of(calls)}, not a list")
        if item.get("function_call"):
            raise ConversationError(f"{place}.function_call", "is not supported; use tool_calls")
        if content is None and not calls and not reasoning:
            raise ConversationError(f"{place}.content", "is null and there are no tool_calls")
        if reasoning:
            self.add("reasoning", reasoning)
        text = _text(content, f"{place}.content")
        calls_follow = isinstance(following, Mapping) and following.get("type") == "function_call"
        if calls or calls_follow:
            if text:
                self.add("preamble", text)
        elif content is not None:
            self.add("final", text)
        for index, call in enumerate(calls):
            self._chat_call(call, f"{place}.tool_calls[{index}]")

    def _chat_call(self, call: Any, place: str) -> None:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise ConversationError(place, "has no function; only function calls are supported")
        self._call(call["function"], call.get("id"), f"{place}.function")

    def _call(self, function: Mapping[str, Any], call_id: Any, place: str) -> None:
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise ConversationError(f"{place}.name", f"is {name!r}; a function's name is needed")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise ConversationError(f"{place}.arguments", f"is {_kind_of(arguments)}, not a string")
        recipient = self._recipient(name)
        if isinstance(call_id, str) and call_id:
            self._recipients[call_id] = recipient
        self._open_calls.append(recipient)
        self.add("call", arguments, recipient)

    def _recipient(self, name: str) -> str:
        builtin = name == "python" or name.startswith("browser.")
        return (
            name if name.startswith("functions.") or (builtin and name not in self._functions) else f"functions.{name}"
        )

    def _result(self, call_id: Any, name: Any, text: str, param: str) -> None:
        author = self._recipients.get(call_id) if isinstance(call_id, str) else None
        if author is None and isinstance(name, str) and name:
            author = self._recipient(name)
        if author is None and call_id is None and len(self._open_calls) == 1:
            author = self._open_calls[0]
        if author is None:
            raise ConversationError(param, f"{call_id!r} names no tool call before it, and the message has no name")
        if author in self._open_calls:
            self._open_calls.remove(author)
        self.add("result", text, author)


def _text(content: Any, param: str, *, required: bool = False) -> str:
    if content is None and required:
        raise ConversationError(param, "is null; text is needed")
    return "".join(_parts(content, param))


def _parts(content: Any, param: str) -> list[str]:
    """The texts of a string or of a list of content parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ConversationError(param, f"is {_kind_of(content)}, not a string or a list of parts")
    return [_part(part, f"{param}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ConversationError(place, f"is {_kind_of(part)}, not an object")
    part_type = part.get("type")
    if not isinstance(part_type, str) or part_type not in _TEXT_PARTS:
        raise ConversationError(f"{place}.type", f"{part_type!r} is not supported: gpt-oss takes text only")
    text = part.get("refusal" if part_type == "refusal" else "text")
    if not isinstance(text, str):
        raise ConversationError(f"{place}.text", f"is {_kind_of(text)}, not a string")
    return text


def _kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__
