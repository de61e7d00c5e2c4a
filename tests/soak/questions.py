"""Questions whose right answers are known beforehand, for the scripted engine and for the demo model.

Invariant: no two open questions have the same answer unless they are the same question, so an answer that reached the
wrong asker never looks right. Must not know transports or what is done to the server.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gptoss_trt.client.requests import Call, chat_values, text_values, token_values
from gptoss_trt.runtime.harmony import Tokenizer, render_chat

Kind = Literal["tokens", "text", "chat", "completions"]
Answer = str | tuple[int, ...]

ENDLESS = (901, 902, 903, 904)  # a prompt with these ids is answered with CYCLE until max_tokens
ENDLESS_TEXT = "Say the cycle for ever"
CYCLE = tuple(range(1011, 1019))
SCRIPTED_CONTEXT = 4096
CHATS = range(100, 356)  # numbers of three digits are one token each, so that no question is the start of another one
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "joust", "knoll", "linen")
END_OF_ANSWER = 200002
RENDER_DATE = "2026-01-01"


@dataclass(frozen=True)
class Question:
    """One request and its answer: text, or token ids for `tokens`; reasoning and content of a chat are joined by |."""

    kind: Kind
    values: dict[str, Any]
    answer: Answer

    def call(self, timeout_s: float) -> Call:
        models = {"tokens": "tensorrt_llm", "text": "ensemble"}
        return Call(models.get(self.kind, self.kind), self.values, timeout_s=timeout_s)

    @property
    def streams(self) -> bool:
        return bool(self.values.get("stream", self.values.get("streaming")))

    @property
    def model(self) -> str:
        return self.call(1.0).model


class Source(Protocol):
    """Where a load takes its questions from."""

    def ask(self) -> Question:
        """A question to be answered in full."""

    def long(self) -> Question:
        """A question whose answer takes long enough to be cancelled; `answer` may be longer than what is seen."""

    def oversized(self) -> Call:
        """A request beyond the context."""


def scripted_engine(folder: Path, step_ms: float) -> Path:
    """Writes a scripted engine that echoes prompts and answers the chats of CHATS; returns its folder."""
    encode = Tokenizer.load().encode
    scripts: list[dict[str, Any]] = [
        {"match": ENDLESS, "tokens": CYCLE, "cycle": True},
        {"match": encode(ENDLESS_TEXT), "tokens": CYCLE, "cycle": True},
    ]
    for number in CHATS:
        reasoning, content = _chat_answer(number)
        text = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant<|channel|>final<|message|>{content}"
        scripts.append({"match": encode(_chat_question(number)), "tokens": encode(text), "chunk": [1, 2, 5]})
    engine = {
        "step_ms": step_ms,
        "max_context": SCRIPTED_CONTEXT,
        "full_blocks": 16384,
        "block_tokens": 64,
        "default": {"echo": True},
        "scripts": scripts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scripted.json").write_text(json.dumps(engine), encoding="utf-8")
    return folder


def _chat_question(number: int) -> str:
    return f"Question {number} please"


def _chat_answer(number: int) -> tuple[str, str]:
    word = WORDS[number % len(WORDS)]
    return f"They ask for {number}.", f"The answer to {number} is {word} {number * 7919} 🙂, {word} again."


class ScriptedQuestions:
    """Echoes of tokens and texts that occur once, and the scripted chats."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._serial = itertools.count(1)

    def ask(self) -> Question:
        kind = self._random.choice(("tokens", "text", "chat", "completions"))
        stream = self._random.random() < 0.8
        if kind == "tokens":
            ids = tuple(self._random.sample(range(2000, 150_000), self._random.randrange(8, 64)))
            return Question(kind, token_values(ids, len(ids) + 8, stream=stream), (*ids, END_OF_ANSWER))
        if kind == "chat":
            number = self._random.choice(CHATS)
            return Question(kind, chat_values(self._body(number), stream=stream), "|".join(_chat_answer(number)))
        text = self._text()
        if kind == "text":
            return Question(kind, text_values(text, 256, stream=stream), text)
        return Question(kind, chat_values({"model": "x", "prompt": text, "max_tokens": 256}, stream=stream), text)

    def long(self) -> Question:
        cycle = CYCLE * (SCRIPTED_CONTEXT // len(CYCLE))
        if self._random.random() < 0.5:
            return Question("tokens", token_values(ENDLESS, 2000, stream=True), cycle)
        text = Tokenizer.load().decode(cycle)
        return Question("text", text_values(ENDLESS_TEXT, 2000, stream=True), text)

    def oversized(self) -> Call:
        return Call("tensorrt_llm", token_values([7] * (SCRIPTED_CONTEXT + 1), 1, stream=True), timeout_s=60.0)

    def _text(self) -> str:
        words = self._random.choices(WORDS, k=self._random.randrange(4, 40))
        return f"{next(self._serial)}: {' '.join(words)} é🙂 {self._random.getrandbits(64):x}"

    @staticmethod
    def _body(number: int) -> dict[str, Any]:
        return {"model": "x", "messages": [{"role": "user", "content": _chat_question(number)}]}


def demo_candidates(seed: int, count: int) -> Iterator[tuple[Question, str]]:
    """Sums for the demo model as questions without an answer yet, each with the number that a right answer holds.

    All sums differ. The load keeps those that the model gets right when asked at leisure, with the whole answer.
    """
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(11, 90) for b in range(11, 90)]
    generator.shuffle(pairs)
    seen: set[int] = set()
    for a, b in pairs:
        if a + b in seen:
            continue
        seen.add(a + b)
        body = {"model": "x", "messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "max_tokens": 96}
        body["temperature"] = 0
        if len(seen) % 2:
            yield Question("chat", chat_values(body, stream=True), ""), str(a + b)
        else:
            ids = render_chat(body, current_date=RENDER_DATE)
            yield Question("tokens", token_values(ids, 96, stream=True), ()), str(a + b)
        if len(seen) == count:
            return


class DemoQuestions:
    """Sums with the answers that the model gave at leisure."""

    def __init__(self, seed: int, known: list[Question], context: int) -> None:
        self._random = random.Random(seed)
        self._known = known
        self._context = context

    def ask(self) -> Question:
        return self._random.choice(self._known)

    def long(self) -> Question:
        return self._random.choice(self._known)

    def oversized(self) -> Call:
        return Call("tensorrt_llm", token_values([7] * (self._context + 1), 1, stream=True), timeout_s=60.0)
