"""What a request wants its answer to look like, and the grammar that makes it so.

Owns `response_format`, vLLM's `guided_*` and `structured_outputs`, strict functions and forced calls. Invariant: what
is accepted here is enforced by the engine: the grammar describes the whole turn, headers included, so no other spelling
of a header leads around it. Analysis and preambles are any ordinary tokens. Must not know the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptoss_trt.runtime.engine.messages import Guide, GuideKind
from gptoss_trt.runtime.harmony.render import response_schema
from gptoss_trt.runtime.openai.errors import RequestError, did_you_mean
from gptoss_trt.runtime.openai.fields import GenerationFields

MAX_SCHEMA_BYTES = 1 << 16
MAX_SCHEMA_DEPTH = 32
MAX_PATTERN_CHARACTERS = 4096
MAX_CHOICES = 1024
# Blanks between the parts of a JSON text: bounded, or a model can go on with them for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

_RETURN, _CALL, _CONSTRAIN, _CHANNEL, _START, _END, _MESSAGE = (
    f"<[{number}]>" for number in (200002, 200012, 200003, 200005, 200006, 200007, 200008)
)
_TEXT = "text: <[0-199997]>*"  # every ordinary token, none of the special ones
_JSON_HEADER = f'(" "? {_CONSTRAIN} "json")?'
_BUILTIN_CALLS = {"python": ("python",), "browser": ("browser.search", "browser.open", "browser.find")}


@dataclass(frozen=True)
class AnswerFormat:
    """What the final text must be. `grammar`: as in Guide. `param`: where the request says so."""

    kind: GuideKind
    grammar: str
    param: str


@dataclass(frozen=True)
class CallRule:
    """One function: its arguments' schema, None for any object; `strict`: no part of the schema is left out."""

    name: str
    schema: Mapping[str, Any] | None
    strict: bool


def answer_format(fields: GenerationFields, body: Mapping[str, Any]) -> AnswerFormat | None:
    """The format that a request asks for. Raises RequestError for two at once and for one beyond the limits."""
    found = [*_of_response_format(body), *_of_guided(fields), *_of_structured_outputs(fields)]
    if len(found) > 1:
        raise RequestError(400, found[1].param, f"{found[0].param} and {found[1].param} exclude each other")
    if found and fields.min_tokens:
        reason = (
            f"min_tokens is {fields.min_tokens}; with {found[0].param} the grammar alone decides where the text ends"
        )
        raise RequestError(400, "min_tokens", reason, "invalid_value")
    return found[0] if found else None


def call_rules(tools: Sequence[Any]) -> list[CallRule]:
    """The rules of checked `tools`, in their order."""
    rules = []
    for tool in tools:
        if tool.get("type", "function") == "function":
            function = tool.get("function", tool)
            rules.append(CallRule(function["name"], function.get("parameters"), function.get("strict") is True))
    return rules


def turn_guide(wanted: AnswerFormat | None, calls: Sequence[CallRule], builtins: Sequence[str]) -> tuple[Guide, ...]:
    """The guide of a turn that may think, call and answer; none where nothing is to be enforced."""
    if wanted is None and not any(rule.strict for rule in calls):
        return ()
    ways = ["final", *(f"call{index}" for index in range(len(calls))), *(["builtin"] if builtins else [])]
    before = ["thought"] if wanted else ["thought", "preamble"]
    rules = [
        f"start: ({' | '.join(before)})* ({' | '.join(ways)})",
        f'thought: {_CHANNEL} "analysis" {_MESSAGE} text {_END} {_START} "assistant"',
        _TEXT,
    ]
    if wanted is None:
        rules.append(f'preamble: {_CHANNEL} "commentary" {_MESSAGE} text {_END} {_START} "assistant"')
        rules.append(f'final: {_CHANNEL} "final" {_MESSAGE} text {_RETURN}')
    else:
        header = _JSON_HEADER if wanted.kind in ("json_object", "json_schema") else ""
        rules += [f'final: {_CHANNEL} "final" {header} {_MESSAGE} answer {_RETURN}', f"answer: {_body(wanted)}"]
    for index, rule in enumerate(calls):
        to = f"to=functions.{rule.name}"
        header = f'({_CHANNEL} "commentary {to}" | " {to}" {_CHANNEL} "commentary") {_JSON_HEADER} {_MESSAGE}'
        rules += [f"call{index}: {header} arguments{index} {_CALL}", f"arguments{index}: {_arguments(rule)}"]
    if builtins:
        names = " | ".join(f'"{name}"' for builtin in builtins for name in _BUILTIN_CALLS[builtin])
        kind = f'((" "? {_CONSTRAIN})? "json" | " code" | " "? {_CONSTRAIN} "code")?'
        where = f'{_CHANNEL} ("analysis" | "commentary")'
        rules.append(f'builtin: ({where} " to=" ({names}) | " to=" ({names}) {where}) {kind} {_MESSAGE} text {_CALL}')
    return (Guide("ebnf", "\n".join(rules) + "\n"),)


def forced_guide(calls: Sequence[CallRule]) -> tuple[Guide, ...]:
    """The guide behind the prefix that a forced call has in the prompt: of one function the arguments, of several the
    name, too."""
    if len(calls) == 1:
        return (Guide("ebnf", f"start: arguments {_CALL}\narguments: {_arguments(calls[0], forced=True)}\n"),)
    rules = ["start: " + " | ".join(f"call{index}" for index in range(len(calls)))]
    for index, rule in enumerate(calls):
        rules.append(f'call{index}: "{rule.name}" {_JSON_HEADER} {_MESSAGE} arguments{index} {_CALL}')
        rules.append(f"arguments{index}: {_arguments(rule, forced=True)}")
    return (Guide("ebnf", "\n".join(rules) + "\n"),)


def plain_guide(wanted: AnswerFormat | None, end_ids: tuple[int, ...]) -> tuple[Guide, ...]:
    """The guide of a raw completion: it holds from the first token on."""
    return () if wanted is None else (Guide(wanted.kind, wanted.grammar, (), end_ids),)


def check_schema(schema: Any, param: str, what: str) -> None:
    """Raises RequestError 400 for a schema over the limits of size or depth."""
    size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(400, param, f"{param}: {what} has {size} bytes; the limit is {MAX_SCHEMA_BYTES}")
    depth, level = 0, [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(400, param, f"{param}: {what} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        level = [child for value in level for child in _children(value)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


# -- where a request says it ------------------------------------------------------------------------------------------


def _of_response_format(body: Mapping[str, Any]) -> list[AnswerFormat]:
    wanted = response_schema(body)
    if wanted is None:
        return []
    if wanted[0] == "json_object" and wanted[2] == {"type": "object"}:
        return [AnswerFormat("json_object", "", "response_format")]
    return [AnswerFormat("json_schema", json.dumps(wanted[2]), "response_format")]


def _of_guided(fields: GenerationFields) -> list[AnswerFormat]:
    given = {"json": fields.guided_json, "regex": fields.guided_regex, "choice": fields.guided_choice}
    return [_READERS[name](value, f"guided_{name}") for name, value in given.items() if value is not None]


def _of_structured_outputs(fields: GenerationFields) -> list[AnswerFormat]:
    found = []
    for name, value in (fields.structured_outputs or {}).items():
        param = f"structured_outputs.{name}"
        if name not in _READERS:
            near = did_you_mean(name, _READERS)
            reason = f"{param} is not supported; allowed: {', '.join(_READERS)}{near}"
            raise RequestError(400, param, reason, "unsupported_parameter")
        if value not in (None, False):
            found.append(_READERS[name](value, param))
    return found


def _read_json(value: Any, param: str) -> AnswerFormat:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RequestError(400, param, f"{param} is not JSON: {error}", "invalid_value") from error
    if not isinstance(schema, dict):
        raise RequestError(400, param, f"{param} is {type(schema).__name__}, not a JSON Schema object", "invalid_type")
    check_schema(schema, param, "the schema")
    return AnswerFormat("json_schema", json.dumps(schema), param)


def _read_json_object(_value: Any, param: str) -> AnswerFormat:
    return AnswerFormat("json_object", "", param)


def _read_regex(value: Any, param: str) -> AnswerFormat:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_PATTERN_CHARACTERS:
        raise RequestError(400, param, f"{param} must be a pattern of 1 to {MAX_PATTERN_CHARACTERS} characters")
    _regex_literal(value, param)
    return AnswerFormat("regex", value, param)


def _read_choice(value: Any, param: str) -> AnswerFormat:
    choices = value if isinstance(value, list) else []
    if not 1 <= len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(400, param, f"{param} must be a list of 1 to {MAX_CHOICES} non-empty strings")
    return AnswerFormat("choice", json.dumps(choices), param)


_READERS = {"json": _read_json, "json_object": _read_json_object, "regex": _read_regex, "choice": _read_choice}


# -- Lark -------------------------------------------------------------------------------------------------------------


def _body(wanted: AnswerFormat) -> str:
    if wanted.kind == "regex":
        return _regex_literal(wanted.grammar, wanted.param)
    if wanted.kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(wanted.grammar))
    schema = {"type": "object"} if wanted.kind == "json_object" else json.loads(wanted.grammar)
    return _schema_literal(schema, lenient=False)


def _arguments(rule: CallRule, *, forced: bool = False) -> str:
    """Arguments are guided where the request says strict or forces the call; elsewhere they are the model's text."""
    if not rule.strict and not forced:
        return "text"
    schema = rule.schema or {"type": "object"}
    return _schema_literal({"type": "object", **schema}, lenient=not rule.strict)


def _schema_literal(schema: Mapping[str, Any], *, lenient: bool) -> str:
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _regex_literal(pattern: str, param: str) -> str:
    """A pattern between slashes: its own slashes and line breaks escaped, so that it stays one literal."""
    parts, escaped = [], False
    for character in pattern:
        plain = {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(character, character)
        parts.append(plain.removeprefix("\\") if escaped and plain != character else plain)
        escaped = character == "\\" and not escaped
    if escaped:
        raise RequestError(400, param, f"{param} ends in a backslash", "invalid_value")
    return f"/{''.join(parts)}/"
