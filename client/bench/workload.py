"""What a benchmark asks: prompts of drawn lengths, or those of a file.

Invariant: the same options and seed give the same requests. Must not know a client nor a clock.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Each is one token of o200k_harmony after a space, and at the start of a text (a test encodes them).
# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week",
    "company", "system", "program", "question", "work", "government", "number", "night", "point", "home",
    "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book",
    "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father",
    "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name", "president",
    "team", "minute", "idea", "body", "information",
)
# fmt: on
FIRST_PLAIN_ID, LAST_PLAIN_ID = 1_000, 199_997  # ordinary tokens; bytes and special tokens lie outside


@dataclass(frozen=True)
class Lengths:
    """How many tokens: `512`, `uniform:64,1024` or `normal:512,128` (mean, deviation; at least 1)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError that names the text and the forms."""
        kind, colon, numbers = text.rpartition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        fixed = not colon and len(values) == 1 and values[0] >= 1 and values[0].is_integer()
        uniform = kind == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]
        normal = kind == "normal" and len(values) == 2 and values[0] >= 1 and values[1] >= 0
        if not (fixed or uniform or normal):
            raise ValueError(f"length {text!r}; forms: 512, uniform:64,1024, normal:512,128")
        return cls(kind or "fixed", *values)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        return f"{self.kind}:{self.first:g},{self.second:g}"

    def draw(self, source: random.Random) -> int:
        """One length in tokens."""
        if self.kind == "uniform":
            return source.randint(int(self.first), int(self.second))
        return max(1, round(source.gauss(self.first, self.second))) if self.kind == "normal" else int(self.first)


@dataclass(frozen=True)
class Request:
    """One request: exactly one of a text, token ids or chat messages, and the most tokens of its answer."""

    max_tokens: int
    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


def synthetic(model: str, inputs: Lengths, outputs: Lengths, seed: int, *, shared_prefix: int = 0) -> Iterator[Request]:
    """Endless random requests of a model's form, after a common prefix of `shared_prefix` tokens.

    Prompts differ from each other, so that a prefix cache finds only that prefix.
    """
    source = random.Random(seed)
    prefix = _body(source, shared_prefix, ids=model == "tensorrt_llm")
    while True:
        body = prefix + _body(source, inputs.draw(source), ids=model == "tensorrt_llm")
        max_tokens = outputs.draw(source)
        if model == "tensorrt_llm":
            yield Request(max_tokens, input_ids=tuple(int(token) for token in body))
        elif model == "chat":
            yield Request(max_tokens, messages=({"role": "user", "content": " ".join(map(str, body))},))
        else:
            yield Request(max_tokens, prompt=" ".join(map(str, body)))


def _body(source: random.Random, length: int, *, ids: bool) -> list[int | str]:
    if ids:
        return [source.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(length)]
    return [source.choice(WORDS) for _ in range(length)]


FORMS = {"ensemble": "prompt", "tensorrt_llm_bls": "prompt", "tensorrt_llm": "input_ids", "chat": "messages"}


def load_dataset(path: Path, model: str, outputs: Lengths, seed: int) -> list[Request]:
    """The requests of a JSON Lines file: `prompt`, `input_ids` or `messages` as the model takes, `max_tokens` optional.

    Raises ValueError that names the line.
    """
    source, form = random.Random(seed), FORMS[model]
    requests = []
    lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut strings with a U+2028
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        kind = {"prompt": str}.get(form, list)
        if not isinstance(entry, dict) or not isinstance(entry.get(form), kind) or not entry[form]:
            raise ValueError(f"{path}:{number}: no {form!r}, which model {model} takes")
        value: Any = entry[form] if form == "prompt" else tuple(entry[form])
        fields: dict[str, Any] = {form: value}
        wanted = entry.get("max_tokens", outputs.draw(source))
        if not isinstance(wanted, int | float) or not 1 <= wanted < 1 << 31:
            raise ValueError(f"{path}:{number}: max_tokens is {wanted!r}, not a positive number")
        requests.append(Request(int(wanted), **fields))
    if not requests:
        raise ValueError(f"{path} holds no request")
    return requests


def cycled(requests: list[Request]) -> Iterator[Request]:
    """The requests of a file, over and over."""
    return itertools.cycle(requests)
