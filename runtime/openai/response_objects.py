"""A chat stream as the Responses API's objects and events.

Owns items, their order, ids and sequence numbers. Invariant: what the events say, put together, is the response of the
last event. Must not know HTTP, the store or the engine.

    answer = ResponseAnswer(request, model="gpt-oss")
    events = answer.begin(); events += answer.push(chunk) ...; events += answer.finish()      # or answer.fail(error)
    answer.response()                                                                         # the response object
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.response_items import FunctionCall, Item, Message, Reasoning
from gptoss_trt.runtime.openai.response_request import ResponseRequest

Json = dict[str, Any]


class ResponseAnswer:
    """One response, built from chat.completion.chunk objects."""

    def __init__(self, request: ResponseRequest, *, model: str) -> None:
        self._request = request
        self._model = model
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[Item] = []
        self._usage: Json | None = None
        self._finish_reason: str | None = None
        self._status = "in_progress"
        self._error: Json | None = None
        self._sequence = 0

    def begin(self) -> list[Json]:
        """The events before the first token."""
        return [self._event(f"response.{name}", response=self.response()) for name in ("created", "in_progress")]

    def push(self, chunk: Json) -> list[Json]:
        """The events that a chunk makes."""
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        events: list[Json] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                events += self._text(Reasoning, delta["reasoning_content"], None)
            if delta.get("content"):
                events += self._text(Message, delta["content"], choice.get("logprobs"))
            for call in delta.get("tool_calls") or ():
                events += self._call(call["function"])
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        return events

    def finish(self) -> list[Json]:
        """The events of the end."""
        cut = self._finish_reason == "length"
        self._status = "incomplete" if cut else "completed"
        events = self._close_item(self._status)
        return [*events, self._event(f"response.{self._status}", response=self.response())]

    def fail(self, error: RequestError) -> list[Json]:
        """The events of an answer that ends in an error."""
        self._status = "failed"
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self._error = {"code": code, "message": error.message}
        return [*self._close_item("incomplete"), self._event("response.failed", response=self.response())]

    def response(self) -> Json:
        """The response object as it is now."""
        request = self._request
        cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": [item.object() for item in self._items],
            "parallel_tool_calls": request.extra.get("parallel_tool_calls", True),
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": request.store,
            "temperature": request.extra.get("temperature", 1.0),
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "top_p": request.extra.get("top_p", 1.0),
            "truncation": request.truncation,
            "usage": None if self._usage is None else _usage(self._usage),
            "user": None,
            "metadata": request.metadata,
        }

    def messages(self) -> list[Json]:
        """The answer as one chat message (none for an empty answer), for the response that builds on it."""
        turn: Json = {"role": "assistant", "content": None}
        for item in self._items:
            item.add_to(turn)
        return [turn] if len(turn) > 2 or turn["content"] is not None else []

    # -- items --------------------------------------------------------------------------------------------------------

    def _text(self, kind: type[Reasoning] | type[Message], text: str, logprobs: Json | None) -> list[Json]:
        events = []
        if not self._items or self._items[-1].closed or not isinstance(self._items[-1], kind):
            events += self._open_item(kind())
        item = self._items[-1]
        return [*events, *self._numbered(item.push(text, (logprobs or {}).get("content") or []))]

    def _call(self, function: Json) -> list[Json]:
        events = self._open_item(FunctionCall(function["name"])) if function.get("name") else []
        if function.get("arguments"):
            events += self._numbered(self._items[-1].push(function["arguments"], []))
        return events

    def _open_item(self, item: Item) -> list[Json]:
        events = self._close_item("completed")
        self._items.append(item)
        return [*events, *self._numbered(item.begin())]

    def _close_item(self, status: str) -> list[Json]:
        if not self._items or self._items[-1].closed:
            return []
        return self._numbered(self._items[-1].end(status))

    def _numbered(self, events: list[Json]) -> list[Json]:
        """Events of the newest item with its place and their own numbers."""
        place = len(self._items) - 1
        return [self._event(event.pop("type"), output_index=place, **event) for event in events]

    def _event(self, name: str, /, **fields: Any) -> Json:
        event = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
