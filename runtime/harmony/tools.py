"""Tool definitions of a request, and the TypeScript-like declarations that Harmony gives them.

Owns the reading of `tools` and the translation of JSON Schema. Invariant: no schema raises or grows without bound, and
no line of a description leaves its comment. Must not know tokens or messages.

openai-harmony's translation is used as the model of the format, not called: it prints `any` for anyOf, $ref and const,
loses integer enums and objects without `type`, and lets the second line of a description out of its comment.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptoss_trt.runtime.harmony.conversation import ConversationError

Schema = Mapping[str, Any]

_MAX_DEPTH = 24
_MAX_NODES = 20_000  # of all functions of a request: schemas may multiply themselves through $ref
_INDENT = "    "
_BUILTIN_TYPES = {
    "python": "python",
    "code_interpreter": "python",
    "browser": "browser",
    "web_search": "browser",
    "web_search_preview": "browser",
}
_PRIMITIVES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_identifier = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)


@dataclass(frozen=True)
class Function:
    """A function that the client declares."""

    name: str
    description: str = ""
    parameters: Schema | None = None


@dataclass(frozen=True)
class Tools:
    """What a request offers the model: functions, and built-in tools (`python`, `browser`) by name, sorted."""

    functions: tuple[Function, ...] = ()
    builtins: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]


def read_tools(request: Mapping[str, Any]) -> Tools:
    """The tools that `request` offers; none when its tool_choice is "none".

    Takes the chat API's nested and the Responses API's flat form. Raises ConversationError.
    """
    entries = request.get("tools") or []
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConversationError("tools", f"is {type(entries).__name__}, not a list")
    functions: list[Function] = []
    builtins: set[str] = set()
    for index, entry in enumerate(entries):
        place = f"tools[{index}]"
        kind = entry.get("type", "function") if isinstance(entry, Mapping) else None
        if kind == "function":
            functions.append(_read_function(entry, place))
        elif isinstance(kind, str) and kind in _BUILTIN_TYPES:
            builtins.add(_BUILTIN_TYPES[kind])
        else:
            raise ConversationError(
                f"{place}.type", f"{kind!r} is not supported; use 'function', 'python' or 'browser'"
            )
    if request.get("tool_choice") == "none":
        return Tools()
    return Tools(tuple(functions), tuple(sorted(builtins)))


def _read_function(entry: Mapping[str, Any], place: str) -> Function:
    if "function" in entry:
        place += ".function"
        entry = entry["function"]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ConversationError(f"{place}.name", "is missing; a function needs a name")
    parameters, description = entry.get("parameters"), entry.get("description")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ConversationError(f"{place}.parameters", f"is {type(parameters).__name__}, not a JSON Schema object")
    if description is not None and not isinstance(description, str):
        raise ConversationError(f"{place}.description", f"is {type(description).__name__}, not a string")
    return Function(entry["name"], description or "", parameters)


def declare_functions(functions: Sequence[Function]) -> str:
    """The `functions` namespace as the developer message shows it."""
    lines = ["## functions", "", "namespace functions {", ""]
    nodes = itertools.count(1)
    for function in functions:
        lines += _comment(function.description, "")
        lines += [f"type {_one_line(function.name)} = ({_arguments(function.parameters, nodes)}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _arguments(parameters: Schema | None, nodes: Iterator[int]) -> str:
    if not parameters:
        return ""
    writer = _Writer(parameters, nodes)
    body = writer.type_of(parameters, 0)
    return "_: " + "\n".join([*_comment(_described(parameters), ""), body])


@dataclass
class _Writer:
    """Translates one schema; `$ref` is looked up in `root` and written out in place.

    `nodes` counts the schemas that were written, for all functions of a request together."""

    root: Schema
    nodes: Iterator[int]
    _open_refs: list[str] = field(default_factory=list)

    def type_of(self, schema: Any, depth: int) -> str:
        """The type of `schema` on as many lines as it needs, the later ones indented for `depth`."""
        if next(self.nodes) > _MAX_NODES or depth > _MAX_DEPTH or not isinstance(schema, Mapping):
            return "any"
        text = self._type_of(schema, depth)
        if schema.get("nullable") is True and "null" not in text.split(" | "):
            text += " | null"
        return text

    def _type_of(self, schema: Schema, depth: int) -> str:
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], depth)
        if "const" in schema:
            return _literal(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return " | ".join(map(_literal, schema["enum"]))
        for key, sign in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
            if isinstance(schema.get(key), list) and schema[key]:
                return self._combined(schema, key, sign, depth)
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return (
                " | ".join(dict.fromkeys(self._plain({**schema, "type": kind}, kind, depth) for kind in kinds)) or "any"
            )
        return self._plain(schema, kinds, depth)

    def _combined(self, schema: Schema, key: str, sign: str, depth: int) -> str:
        parts = [self.type_of(part, depth) for part in schema[key]]
        if schema.get("properties"):
            sign_own = " & "
            own = self._object(schema, depth)
            joined = sign.join(dict.fromkeys(parts))
            return own + sign_own + (f"({joined})" if " | " in joined else joined)
        return sign.join(dict.fromkeys(parts))

    def _reference(self, reference: str, depth: int) -> str:
        target: Any = self.root
        if not reference.startswith("#") or reference in self._open_refs:
            return "any"  # another document, or a type inside itself
        for step in reference[1:].strip("/").split("/") if reference.strip("#/") else ():
            step = step.replace("~1", "/").replace("~0", "~")  # noqa: PLW2901 -- the pointer's own escapes
            target = target.get(step) if isinstance(target, Mapping) else None
        self._open_refs.append(reference)
        try:
            return self.type_of(target, depth)
        finally:
            self._open_refs.pop()

    def _plain(self, schema: Schema, kind: Any, depth: int) -> str:
        if kind is not None and not isinstance(kind, str):
            return "any"
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema, depth)
        if kind == "object" or (kind is None and ("properties" in schema or "additionalProperties" in schema)):
            return self._object(schema, depth)
        return "any"

    def _array(self, schema: Schema, depth: int) -> str:
        if isinstance(schema.get("prefixItems"), list):
            return "[" + ", ".join(self.type_of(item, depth) for item in schema["prefixItems"]) + "]"
        if not schema.get("items"):
            return "Array<any>"
        item = self.type_of(schema["items"], depth)
        return f"({item})[]" if " | " in item or " & " in item else f"{item}[]"

    def _object(self, schema: Schema, depth: int) -> str:
        properties = schema.get("properties")
        extra = schema.get("additionalProperties")
        if not isinstance(properties, Mapping) or not properties:
            if isinstance(extra, Mapping) and extra:
                return f"{{ [key: string]: {self.type_of(extra, depth)} }}"
            return "{\n}" if depth == 0 else "object"
        required = schema.get("required")
        needed = set(filter(lambda name: isinstance(name, str), required)) if isinstance(required, list) else set()
        indent = _INDENT * depth
        lines = ["{"]
        for name, value in properties.items():
            lines += _comment(_described(value), indent)
            mark = "" if name in needed else "?"
            default = f" // default: {_json(value['default'])}" if _has_default(value) else ""
            lines.append(f"{indent}{_property_name(name)}{mark}: {self.type_of(value, depth + 1)},{default}")
        closing = _INDENT * max(0, depth - 1)
        return "\n".join([*lines, f"{closing}}}"])


def _has_default(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "default" in schema


def _described(schema: Any) -> str:
    """Description and examples. A title is left out: generators fill it with the property's own name."""
    if not isinstance(schema, Mapping):
        return ""
    lines = [schema["description"]] if isinstance(schema.get("description"), str) and schema["description"] else []
    if isinstance(schema.get("examples"), list) and schema["examples"]:
        lines += ["Examples:", *(f"- {_json(example)}" for example in schema["examples"])]
    return "\n".join(lines)


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}// {line}".rstrip() for line in text.splitlines()]


def _literal(value: Any) -> str:
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _property_name(name: str) -> str:
    return name if _identifier.fullmatch(name) else _json(name)


def _one_line(name: str) -> str:
    return "_".join(name.split())
