"""The engine's events of one chat request as chat.completion.chunk and chat.completion objects.

Owns ids, roles, tool call ids, finish reasons and usage. Invariant: the chunks of a stream, put together, are the
message of the whole answer. Must not know sockets, Triton or HTTP.

    answer = ChatAnswer(chat, prompt_tokens=len(ids))      # chat: chat_request.ChatRequest
    for event in events:                                    # engine Tokens and Finished, in order
        chunks = answer.push(event)                         # list of chat.completion.chunk dicts, maybe empty
        if answer.complete and not answer.ended: cancel the engine's request (every choice met a stop string)
        if answer.ended: break                              # every choice has finished; the last chunks are out
    answer.completion()                                     # the chat.completion dict, for a request without stream

Stop strings apply to the content (what a user sees), not to reasoning or tool arguments. `usage="last"` puts the usage
into the last chunk too, as the Triton model `chat` does; "asked" follows `stream_options.include_usage` alone.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from gptoss_trt.runtime.engine.messages import Finished, FinishReason, TokenLogprobs, Tokens, Usage
from gptoss_trt.runtime.harmony import HarmonyEvent, HarmonyStream, StopMatcher, Tokenizer
from gptoss_trt.runtime.openai.chat_request import ChatRequest, forced_prefix

Json = dict[str, Any]


class ChatAnswer:
    """All choices of one chat request."""

    def __init__(
        self,
        chat: ChatRequest,
        *,
        prompt_tokens: int,
        model: str = "",
        response_id: str | None = None,
        created: int | None = None,
        usage: Literal["asked", "last"] = "asked",
    ) -> None:
        self._chat = chat
        self._head = {
            "id": response_id or f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()) if created is None else created,
            "model": model or chat.model,
        }
        self._usage_in_last = usage == "last"
        self._usage_asked = chat.stream_options.include_usage
        self._prompt_tokens = prompt_tokens
        self._choices = [_Choice(chat, index) for index in range(chat.n)]

    @property
    def complete(self) -> bool:
        """Whether nothing more can come of any choice, so that the engine need not go on."""
        return all(choice.complete for choice in self._choices)

    @property
    def ended(self) -> bool:
        """Whether the engine has finished every choice."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def push(self, event: Tokens | Finished) -> list[Json]:
        """The chunks that an event makes; the usage chunk, if asked for, follows the last choice's last one."""
        choice = self._choices[event.sequence]
        if isinstance(event, Tokens):
            deltas = choice.push(event)
            return [self._chunk(choice, delta, logprobs) for delta, logprobs in deltas]
        deltas = choice.finish(event)
        chunks = [self._chunk(choice, delta, logprobs) for delta, logprobs in deltas]
        last = self._chunk(choice, choice.with_role({}), None, finish_reason=choice.finish_reason)
        chunks.append(last)
        if self.ended:
            if self._usage_asked:
                chunks.append({**self._object("chat.completion.chunk"), "choices": [], "usage": self.usage()})
            elif self._usage_in_last:
                last["usage"] = self.usage()
        return chunks

    def completion(self) -> Json:
        """The whole answer. Raises RuntimeError before the end."""
        if not self.ended:
            raise RuntimeError("the answer has not ended")
        choices = [choice.whole() for choice in self._choices]
        return {**self._object("chat.completion"), "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens of the prompt once and of all choices; cached and reasoning tokens apart."""
        return usage_object(
            self._prompt_tokens,
            [choice.usage for choice in self._choices if choice.usage is not None],
            sum(choice.reasoning_tokens for choice in self._choices),
        )

    def _object(self, name: str) -> Json:
        return {
            "id": self._head["id"],
            "object": name,
            "created": self._head["created"],
            "model": self._head["model"],
            "system_fingerprint": None,
        }

    def _chunk(self, choice: _Choice, delta: Json, logprobs: Json | None, finish_reason: str | None = None) -> Json:
        entry = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._object("chat.completion.chunk"), "choices": [entry]}
        if self._usage_asked:
            chunk["usage"] = None
        return chunk


class _Choice:
    """One sequence: its parser, its stop strings, and the message so far."""

    def __init__(self, chat: ChatRequest, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._chat = chat
        self._stream = HarmonyStream(chat.tools_offered.names, parallel_tool_calls=chat.parallel_tool_calls)
        self._stop = StopMatcher(chat.stop, include_stop=chat.include_stop_str_in_output)
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._role_sent = False
        self._primed = self._stream.push(forced_prefix(chat))

    @property
    def complete(self) -> bool:
        return self._stop.matched is not None or self._stream.done

    @property
    def reasoning_tokens(self) -> int:
        return self._stream.reasoning_tokens

    def push(self, tokens: Tokens) -> list[tuple[Json, Json | None]]:
        """(delta, logprobs) of new tokens."""
        events, self._primed = self._primed, []
        if tokens.logprobs is None:
            events += self._stream.push(tokens.token_ids)
            return [(delta, None) for delta in self._deltas(events)]
        entries: list[Json] = []
        deltas = self._deltas(events)
        for token_id, logprob in zip(tokens.token_ids, tokens.logprobs, strict=True):
            if self._stop.matched is not None:  # the entries end with the token that completed the stop string
                break
            visible = self._stream.in_content
            events = self._stream.push([token_id])
            if visible and self._stream.in_content:
                entries.append(_token_logprobs(token_id, logprob))
            deltas += self._deltas(events)
        self._logprobs += entries
        if entries and not deltas:
            deltas = [self.with_role({})]
        last = len(deltas) - 1
        return [
            (d, {"content": entries, "refusal": None} if entries and i == last else None) for i, d in enumerate(deltas)
        ]

    def finish(self, end: Finished) -> list[tuple[Json, Json | None]]:
        events, self._primed = [*self._primed, *self._stream.finish(end.reason)], []
        self.usage = end.usage
        deltas = self._deltas(events)
        held = self._stop.finish()
        if held:
            deltas.append(self._text_delta("content", held))
        self.finish_reason = "stop" if self._stop.matched is not None else str(events[-1][1])
        return [(delta, None) for delta in deltas]

    def with_role(self, delta: Json) -> Json:
        """`delta`, with the role in front when it is the choice's first one."""
        if self._role_sent:
            return delta
        self._role_sent = True
        return {"role": "assistant", "content": None, **delta}

    def _deltas(self, events: list[HarmonyEvent]) -> list[Json]:
        deltas = []
        for event in events:
            if self._stop.matched is not None or event[0] == "finish":
                break
            delta = self._delta(event)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _delta(self, event: HarmonyEvent) -> Json | None:
        if event[0] == "reasoning":
            return self._text_delta("reasoning", event[1]) if self._chat.include_reasoning else None
        if event[0] == "content":
            text, _ = self._stop.push(event[1])
            return self._text_delta("content", text) if text else None
        if event[0] == "tool_name":
            call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            self._calls.append({**call, "function": {"name": event[2], "arguments": ""}})
            head = {"index": event[1], **call, "function": {"name": event[2], "arguments": ""}}
            return self.with_role({"tool_calls": [head]})
        if event[0] == "tool_args":
            self._calls[event[1]]["function"]["arguments"] += event[2]
            return self.with_role({"tool_calls": [{"index": event[1], "function": {"arguments": event[2]}}]})
        return None

    def _text_delta(self, name: str, text: str) -> Json:
        self._texts[name].append(text)
        if name == "reasoning":
            return self.with_role({"reasoning": text, "reasoning_content": text})
        return self.with_role({"content": text})

    def whole(self) -> Json:
        """The choice of a chat.completion. Content is null when there is none, as reasoning is."""
        content, reasoning = ("".join(self._texts[name]) or None for name in ("content", "reasoning"))
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs, "refusal": None} if self._chat.logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}


def _token_logprobs(token_id: int, logprob: TokenLogprobs) -> Json:
    top = [_token_entry(number, value) for number, value in logprob.top]
    return {**_token_entry(token_id, logprob.logprob), "top_logprobs": top}


def _token_entry(token_id: int, logprob: float) -> Json:
    data = Tokenizer.load().token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def usage_object(prompt_tokens: int, usages: list[Usage], reasoning_tokens: int) -> Json:
    """The `usage` of a response. Cached tokens are those of the first sequence: the others share its prompt."""
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens if usages else 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def finish_word(reason: FinishReason, *, stopped: bool) -> str:
    """The finish_reason of a completion: a generation that a stop string ended was cancelled, not cut."""
    if stopped or reason == "stop":
        return "stop"
    return "length"
