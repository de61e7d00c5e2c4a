"""The engine's events of one completion request as text_completion objects.

Owns the numbering of choices, echo and the log-probability lists. Invariant: the chunks of a stream, put together, are
the choices of the whole answer. Must not know sockets, Triton or HTTP.

    answer = CompletionAnswer(completion, prompts)          # prompts: completion_request.prompt_lists(completion)
    answer.push(prompt_index, event)                        # list of text_completion dicts (chunks), maybe empty
    answer.complete_prompt(prompt_index)                    # stop strings ended all its sequences: cancel its request
    answer.ended; answer.completion()

The choices of prompt p are numbered p * n to p * n + n - 1. Special tokens are left out of the text unless the request
sets `skip_special_tokens` to false; a stop id that ended the generation is left out always.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.runtime.engine.messages import Finished, TokenLogprobs, Tokens, Usage
from gptoss_trt.runtime.harmony import StopMatcher, TextStream, Tokenizer
from gptoss_trt.runtime.openai.chat_objects import finish_word, usage_object
from gptoss_trt.runtime.openai.completion_request import CompletionRequest

Json = dict[str, Any]


class CompletionAnswer:
    """All choices of one completion request."""

    def __init__(
        self,
        completion: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        *,
        model: str = "",
        response_id: str | None = None,
        created: int | None = None,
        usage: Literal["asked", "last"] = "asked",
    ) -> None:
        self._completion = completion
        self._prompts = prompts
        self._head = {
            "id": response_id or f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()) if created is None else created,
            "model": model or completion.model,
            "system_fingerprint": None,
        }
        self._usage_in_last = usage == "last"
        self._usage_asked = completion.stream_options.include_usage
        self._choices = [
            _Choice(completion, prompt, place * completion.n + sequence)
            for place, prompt in enumerate(prompts)
            for sequence in range(completion.n)
        ]

    @property
    def ended(self) -> bool:
        """Whether the engine has finished every choice."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def complete_prompt(self, prompt: int) -> bool:
        """Whether nothing more can come of any sequence of this prompt."""
        first = prompt * self._completion.n
        return all(choice.complete for choice in self._choices[first : first + self._completion.n])

    def push(self, prompt: int, event: Tokens | Finished) -> list[Json]:
        """The chunks that an event of prompt number `prompt` makes."""
        choice = self._choices[prompt * self._completion.n + event.sequence]
        if isinstance(event, Tokens):
            choice.push(event)
            taken = choice.take()
            return [self._chunk(taken)] if taken["text"] or taken["logprobs"] else []
        choice.finish(event)
        last = self._chunk(choice.take())
        chunks = [last]
        if self.ended:
            if self._usage_asked:
                chunks.append({**self._head, "choices": [], "usage": self.usage()})
            elif self._usage_in_last:
                last["usage"] = self.usage()
        return chunks

    def completion(self) -> Json:
        """The whole answer. Raises RuntimeError before the end."""
        if not self.ended:
            raise RuntimeError("the answer has not ended")
        return {**self._head, "choices": [choice.whole() for choice in self._choices], "usage": self.usage()}

    def usage(self) -> Json:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        return usage_object(sum(map(len, self._prompts)), usages, 0)

    def _chunk(self, entry: Json) -> Json:
        chunk = {**self._head, "choices": [entry]}
        if self._usage_asked:
            chunk["usage"] = None
        return chunk


class _Choice:
    """One sequence of one prompt."""

    def __init__(self, completion: CompletionRequest, prompt: Sequence[int], index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._completion = completion
        self._prompt = prompt
        self._empty = completion.token_limit == 0  # echo alone: the one token that the engine made is left out
        self._stop_ids = frozenset((*HARMONY_STOP_IDS, *completion.stop_token_ids))
        self._decoder = TextStream(completion.skip_special_tokens)
        self._stop = StopMatcher(completion.stop, include_stop=completion.include_stop_str_in_output)
        self._logprobs = _Logprobs()
        self._texts: list[str] = []
        self._taken = 0
        self._logprobs_taken = 0
        if completion.echo:
            text = Tokenizer.load().decode(prompt, skip_special_tokens=completion.skip_special_tokens)
            self._texts.append(text)

    @property
    def complete(self) -> bool:
        return self._stop.matched is not None

    def push(self, tokens: Tokens) -> None:
        if self._empty or self.complete:
            return
        ids = list(tokens.token_ids)
        ends = not self._completion.ignore_eos and ids and ids[-1] in self._stop_ids
        kept = ids[:-1] if ends else ids
        if tokens.logprobs is None:
            self._show(self._decoder.push(kept))
            return
        for token_id, logprob in zip(kept, tokens.logprobs, strict=False):
            if self._stop.matched is not None:  # the entries end with the token that completed the stop string
                break
            self._logprobs.add(token_id, logprob)
            self._show(self._decoder.push([token_id]))

    def finish(self, end: Finished) -> None:
        if end.prompt_logprobs is not None and self._completion.echo:
            prompt = _Logprobs()
            for token_id, entry in zip(self._prompt, end.prompt_logprobs, strict=True):
                prompt.add(token_id, entry)
            self._logprobs = prompt.followed_by(self._logprobs)
        if not self.complete and not self._empty:
            self._show(self._decoder.finish())
            self._texts.append("" if self.complete else self._stop.finish())
        self.usage = replace(end.usage, completion_tokens=0) if self._empty else end.usage
        self.finish_reason = "length" if self._empty else finish_word(end.reason, stopped=self.complete)

    def take(self) -> Json:
        """What is new since the last call, as a chunk's choice."""
        text = "".join(self._texts[self._taken :])
        self._taken = len(self._texts)
        logprobs = None
        if self._completion.logprobs is not None and not self._completion.echo:
            logprobs, self._logprobs_taken = self._logprobs.since(self._logprobs_taken), len(self._logprobs)
        elif self._completion.logprobs is not None and self.finish_reason is not None:
            logprobs = self._logprobs.since(0)  # with echo they begin with the prompt's, which come at the end
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def whole(self) -> Json:
        logprobs = self._logprobs.since(0) if self._completion.logprobs is not None else None
        text = "".join(self._texts)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def _show(self, text: str) -> None:
        visible, _ = self._stop.push(text)
        if visible:
            self._texts.append(visible)


class _Logprobs:
    """The four parallel lists of a completion's `logprobs`; offsets count characters from the first token on."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, TokenLogprobs | None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, token_id: int, logprob: TokenLogprobs | None) -> None:
        """One token; `logprob` is None for a prompt's first token, which has none."""
        self._entries.append((_token_text(token_id), logprob))

    def followed_by(self, other: _Logprobs) -> _Logprobs:
        joined = _Logprobs()
        joined._entries = self._entries + other._entries
        return joined

    def since(self, start: int) -> Json | None:
        entries = self._entries[start:]
        if not entries:
            return None
        offset = sum(len(text) for text, _ in self._entries[:start])
        offsets = []
        for text, _ in entries:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [text for text, _ in entries],
            "token_logprobs": [None if entry is None else entry.logprob for _, entry in entries],
            "top_logprobs": [
                None if entry is None else {_token_text(number): value for number, value in entry.top}
                for _, entry in entries
            ],
            "text_offset": offsets,
        }


def _token_text(token_id: int) -> str:
    """A token alone: text, or `bytes:\\xf0...` where its bytes are no whole characters."""
    data = Tokenizer.load().token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
