"""/v1/responses bodies as chat bodies.

Owns what the Responses API can ask for and how its items read as chat messages. Invariant: a parameter is served,
ignored because it cannot change the answer, or refused; the chat body that comes out is checked by chat_request like
any other. Must not know HTTP or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gptoss_trt.runtime.openai.errors import RequestError, did_you_mean
from gptoss_trt.runtime.openai.fields import MAX_LOGPROBS, refusal_of

Json = dict[str, Any]

# Refused unless they ask for nothing.
REFUSED: Mapping[str, str] = {
    "background": "is not supported; requests are answered while the client waits",
    "context_management": "is not supported",
    "conversation": "is not supported; use previous_response_id",
    "max_tool_calls": "is not supported: tools are run by the client",
    "prompt": "templates are not supported; send input",
    "stream_options": "is not supported",
}
IGNORED = frozenset(
    {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user", "client_metadata"}
)
# Passed on to the chat request as they are.
_SAME = ("temperature", "top_p", "parallel_tool_calls", "seed", "presence_penalty", "frequency_penalty",
         "repetition_penalty", "top_k", "min_p", "logit_bias", "stop", "priority", "cache_salt")  # fmt: skip
_INCLUDABLE = ("reasoning.encrypted_content", "message.output_text.logprobs")


class ResponseRequest(BaseModel):
    """A body whose own parameters are checked; those of `extra` are the chat request's."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = ""
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    store: bool = True
    metadata: dict[str, str] = Field(default_factory=dict)
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    include: list[str] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    truncation: str = "disabled"
    extra: dict[str, Any] = Field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or self.top_logprobs > 0


def read_response(body: Mapping[str, Any]) -> ResponseRequest:
    """The checked form of a body. Raises RequestError 400."""
    known = {name: value for name, value in body.items() if value is not None}
    extra = {name: known.pop(name) for name in _SAME if name in known}
    names = ResponseRequest.model_fields.keys() - {"extra"}
    for name in sorted(known.keys() - names, key=str):
        value = known.pop(name)
        if name in REFUSED and value not in (False, {}, [], "", {"include_obfuscation": False}):
            raise RequestError(400, name, f"{name} {REFUSED[name]}", "unsupported_parameter")
        if name not in IGNORED and name not in REFUSED:
            near = did_you_mean(name, [*names, *_SAME, *IGNORED])
            raise RequestError(400, name, f"unknown parameter {name!r}{near}", "unknown_parameter")
    try:
        request = ResponseRequest.model_validate({**known, "extra": extra})
    except ValidationError as error:
        raise refusal_of(error) from error
    _check(request)
    return request


def _check(request: ResponseRequest) -> None:
    if request.truncation != "disabled":
        reason = f"truncation is {request.truncation!r}; allowed: 'disabled': a long input is refused, never cut"
        raise RequestError(400, "truncation", reason, "invalid_value")
    for name in request.include:
        if name not in _INCLUDABLE:
            raise RequestError(400, "include", f"include holds {name!r}; allowed: {', '.join(_INCLUDABLE)}")
    if len(request.metadata) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in request.metadata.items()):
        raise RequestError(400, "metadata", "metadata holds at most 16 pairs, of 64 and 512 characters")
    for name in set(request.text or {}) - {"format", "verbosity"}:
        raise RequestError(400, f"text.{name}", f"unknown parameter 'text.{name}'", "unknown_parameter")
    for name in set(request.reasoning or {}) - {"effort", "summary", "generate_summary"}:
        raise RequestError(400, f"reasoning.{name}", f"unknown parameter 'reasoning.{name}'", "unknown_parameter")


def chat_body(request: ResponseRequest, earlier: list[Json]) -> Json:
    """The chat request that answers `request`. `earlier`: the messages of the previous response and its answer."""
    instructions = [{"role": "developer", "content": request.instructions}] if request.instructions else []
    body: Json = {
        **request.extra,
        "messages": [*instructions, *earlier, *input_messages(request.input)],
        "tools": [_chat_tool(tool) for tool in request.tools],
        "tool_choice": _chat_choice(request.tool_choice),
        "stream_options": {"include_usage": True},
    }
    if request.model:
        body["model"] = request.model
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if (effort := (request.reasoning or {}).get("effort")) is not None:
        body["reasoning_effort"] = effort
    text = request.text or {}
    if (chosen := text.get("format")) is not None:
        body["response_format"] = _chat_format(chosen)
    if text.get("verbosity") is not None:
        body["verbosity"] = text["verbosity"]
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return body


def message_places(request: ResponseRequest, earlier: list[Json]) -> list[str]:
    """Where each message of `chat_body` came from in the request, for its errors. `input[i]` is an item that is a
    message of its own; what several items may have made is `input`."""
    instructions = ["instructions"] if request.instructions else []
    own = ["input"]
    if not isinstance(request.input, str):
        own = ["input" if message.get("role") == "assistant" else place for place, message in _placed(request.input)]
    return [*instructions, *["previous_response_id"] * len(earlier), *own]


def input_messages(items: str | list[Any]) -> list[Json]:
    """Input items as chat messages. What belongs to one assistant turn (reasoning, text, calls) becomes one message.

    Raises RequestError with the item's place.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return [message for _, message in _placed(items)]


def _placed(items: list[Any]) -> list[tuple[str, Json]]:
    """The messages of the items, each with the place of the item that it begins with."""
    messages: list[tuple[str, Json]] = []
    open_turn: Json | None = None  # an assistant message that later items may still belong to
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise RequestError(400, place, f"{place} is {type(item).__name__}, not an object", "invalid_type")
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if open_turn is None or (kind != "function_call" and _has_ended(open_turn)):
                open_turn = {"role": "assistant", "content": None}
                messages.append((place, open_turn))
            _ASSISTANT[kind](open_turn, item)
            continue
        open_turn = None
        if kind == "message":
            messages.append((place, {"role": item.get("role"), "content": item.get("content")}))
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append((place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}))
        else:
            raise RequestError(400, f"{place}.type", f"{place}.type {kind!r} is not supported", "invalid_value")
    return messages


def _has_ended(turn: Json) -> bool:
    return turn["content"] is not None or "tool_calls" in turn


def _add_reasoning(turn: Json, item: Mapping[str, Any]) -> None:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    text = "".join(text for text in texts if isinstance(text, str))
    if text:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def _add_text(turn: Json, item: Mapping[str, Any]) -> None:
    turn["content"] = item.get("content")


def _add_call(turn: Json, item: Mapping[str, Any]) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = turn.setdefault("tool_calls", [])
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


_ASSISTANT = {"reasoning": _add_reasoning, "message": _add_text, "function_call": _add_call}


def _chat_tool(tool: Any) -> Any:
    """The flat form of a function as chat's nested one; other tools stay, for the chat request to judge."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_choice(choice: str | Json) -> str | Json:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _chat_format(chosen: Any) -> Any:
    if not isinstance(chosen, Mapping) or chosen.get("type") != "json_schema" or "json_schema" in chosen:
        return chosen
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: chosen[name] for name in names if name in chosen}}
