"""/v1/chat/completions bodies: what is accepted, and what is refused with which parameter.

Owns the rules between parameters. Invariant: a body that `read_chat` returns can be rendered and generated; what is
left for the engine to refuse is what depends on it (context, guides, capacity). Must not know HTTP.

    chat = read_chat(body)                         # RequestError(.status, .param, .message, .code)
    ids = prompt_ids(chat, current_date="2025-06-28")
    submit = chat_submit(chat, request_id, ids, max_context=131072)        # submission.py
    answer = ChatAnswer(chat, ...)                                          # chat_objects.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from gptoss_trt.runtime.harmony import ConversationError, Tokenizer, render_chat
from gptoss_trt.runtime.harmony.conversation import read_conversation
from gptoss_trt.runtime.harmony.render import reasoning_effort, response_schema
from gptoss_trt.runtime.harmony.tools import Tools, read_tools
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.fields import MAX_LOGPROBS, GenerationFields, read_fields
from gptoss_trt.runtime.openai.guided import AnswerFormat, answer_format, check_schema

MAX_TOOLS = 128

_function_name = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_format_name = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class ChatRequest(GenerationFields):
    """A checked body. `tools_offered` and `forced_tools` say what the model may and must call."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    modalities: list[str] = Field(default_factory=lambda: ["text"])
    verbosity: str = "medium"

    _tools: Tools = PrivateAttr(default_factory=Tools)
    _format: AnswerFormat | None = PrivateAttr(default=None)

    @property
    def tools_offered(self) -> Tools:
        """Functions and built-in tools of the request; none with tool_choice "none"."""
        return self._tools

    @property
    def wanted_format(self) -> AnswerFormat | None:
        """What the content must be, if the request says so."""
        return self._format

    @property
    def forced_tools(self) -> list[str]:
        """Names one of which must be called: all for "required", one for a named choice, else none."""
        if isinstance(self.tool_choice, dict):
            return [_named_tool(self.tool_choice)]
        return self._tools.names if self.tool_choice == "required" else []

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def body(self) -> dict[str, Any]:
        """The parameters that the prompt depends on, as `render_chat` takes them."""
        names = ("messages", "tools", "tool_choice", "response_format", "reasoning_effort", "reasoning")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def check_request(request: dict[str, Any]) -> None:
    """Raises RequestError when a chat request cannot be served; returns nothing otherwise."""
    read_chat(request)


def read_chat(request: Any) -> ChatRequest:
    """The checked form of a chat request. Raises RequestError."""
    chat = read_fields(ChatRequest, request)
    try:
        chat._tools = read_tools(chat.body())
        reasoning_effort(chat.body())
        _check_tools(read_tools({"tools": chat.tools}), chat)
        _check_format(chat)
        chat._format = answer_format(chat, chat.body())
        read_conversation(chat.body(), chat._tools.names)
    except ConversationError as error:
        raise RequestError(400, error.param, str(error), "invalid_value") from error
    _check_messages(chat)
    _check_limits(chat)
    return chat


def prompt_ids(chat: ChatRequest, *, current_date: str) -> list[int]:
    """The prompt's token ids, with the beginning of the answer that a forced tool call fixes."""
    return [*render_chat(chat.body(), current_date=current_date), *forced_prefix(chat)]


def forced_prefix(chat: ChatRequest) -> list[int]:
    """How the answer must begin when the request forces a tool call; empty otherwise.

    One possible function: its whole header, so it is called whatever the model would have liked. Several: the header
    up to the name, which a guide then constrains (submission.py). The stream that parses the answer takes these ids
    first.
    """
    names = chat.forced_tools
    if not names:
        return []
    encode = Tokenizer.load().encode
    if len(names) == 1:
        return encode(f"<|channel|>commentary to=functions.{names[0]} <|constrain|>json<|message|>")
    return encode("<|channel|>commentary to=functions.")


def _named_tool(choice: Mapping[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            400,
            "tool_choice",
            f"tool_choice is {json.dumps(choice)[:80]}; allowed: 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
            "invalid_value",
        )
    return name


def _check_tools(declared: Tools, chat: ChatRequest) -> None:
    if len(declared.functions) > MAX_TOOLS:
        raise RequestError(400, "tools", f"tools has {len(declared.functions)} functions; the limit is {MAX_TOOLS}")
    seen: set[str] = set()
    for function in declared.functions:
        if not _function_name.fullmatch(function.name):
            reason = "1 to 64 letters, digits, '_', '-' and '.' are allowed"
            raise RequestError(400, "tools", f"tools: the function name {function.name!r} is not valid; {reason}")
        if function.name in seen:
            raise RequestError(400, "tools", f"tools: the function name {function.name!r} is given twice")
        seen.add(function.name)
        if function.parameters is not None:
            check_schema(function.parameters, "tools", f"the parameters of {function.name!r}")
    _check_tool_choice(declared, chat)


def _check_tool_choice(declared: Tools, chat: ChatRequest) -> None:
    choice = chat.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            400, "tool_choice", f"tool_choice is {choice!r}; allowed: none, auto, required", "invalid_value"
        )
    if isinstance(choice, dict) and (name := _named_tool(choice)) not in declared.names:
        known = ", ".join(declared.names) or "none"
        raise RequestError(400, "tool_choice", f"tool_choice names {name!r}; declared functions: {known}")
    if choice == "required" and not declared.functions:
        raise RequestError(400, "tool_choice", "tool_choice is 'required' and no function is declared in tools")


def _check_format(chat: ChatRequest) -> None:
    wanted = response_schema(chat.body())
    if wanted is None:
        return
    name, _, schema = wanted
    if not _format_name.fullmatch(name):
        reason = "1 to 64 letters, digits, '_' and '-' are allowed"
        raise RequestError(400, "response_format.json_schema.name", f"the name {name!r} is not valid; {reason}")
    check_schema(schema, "response_format.json_schema.schema", "the schema")


def _check_messages(chat: ChatRequest) -> None:
    for index, message in enumerate(chat.messages):
        for place, call in enumerate(message.get("tool_calls") or ()):
            name = call["function"]["name"]
            if not _function_name.fullmatch(name.removeprefix("functions.")):
                param = f"messages[{index}].tool_calls[{place}].function.name"
                raise RequestError(400, param, f"{param}: {name!r} is not a valid function name")
        name = message.get("name")
        if message.get("role") in ("tool", "function") and name is not None and not _function_name.fullmatch(str(name)):
            raise RequestError(400, f"messages[{index}].name", f"messages[{index}].name: {name!r} is not a valid name")


def _check_limits(chat: ChatRequest) -> None:
    if chat.ignore_eos:
        raise RequestError(
            400, "ignore_eos", "ignore_eos is not supported on chat: a Harmony turn ends at its stop token"
        )
    if not chat.skip_special_tokens:
        raise RequestError(400, "skip_special_tokens", "skip_special_tokens must be true on chat: markup is parsed")
    if chat.modalities != ["text"]:
        raise RequestError(400, "modalities", f"modalities is {chat.modalities!r}; allowed: ['text']")
    if chat.verbosity != "medium":
        raise RequestError(400, "verbosity", f"verbosity is {chat.verbosity!r}; allowed: 'medium'")
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError(400, "top_logprobs", "top_logprobs needs logprobs to be true")
    if chat.forced_tools and chat.wanted_format is not None:
        param = chat.wanted_format.param
        raise RequestError(400, param, f"{param} has no effect when tool_choice forces a call")
    limit = chat.token_limit
    if limit is not None and limit < 1:
        param = "max_completion_tokens" if chat.max_completion_tokens is not None else "max_tokens"
        raise RequestError(400, param, f"{param} is {limit}; at least 1 is needed", "invalid_value")
    if limit is not None and chat.min_tokens > limit:
        raise RequestError(
            400, "min_tokens", f"min_tokens is {chat.min_tokens}; max_tokens is {limit}", "invalid_value"
        )
