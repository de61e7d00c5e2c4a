"""Random choices for one sample, kept apart into training and held-out ones, and the frame around a lesson.

Invariant: a training sample never holds a held-out name or key; a held-out sample always holds one where its kind
has any. Knows no kind of request.
"""

from __future__ import annotations

import calendar
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gptoss_trt.build_engine.demo.conversation import Conversation, Effort, Exchange, Step, Tool
from gptoss_trt.build_engine.demo.names import (
    CUT_CITIES,
    FIRST_NAMES,
    HELD_OUT_CITIES,
    KNOWN_CITIES,
    NamePool,
    hash_share,
    is_held_out,
)

T = TypeVar("T")
HELD_SHARE = 0.12  # share of the keys (digit pairs, phrasings) that only held-out samples hold
MAX_DRAWS = 20_000


@dataclass(frozen=True)
class Lesson:
    """What a kind's generator gives: the exchanges that matter, and what must be declared for them."""

    exchanges: tuple[Exchange, ...]
    tools: tuple[Tool, ...] = ()
    instructions: str | None = None
    first: int = 0
    wild: tuple[str, ...] = ()
    date: str | None = None  # the system message's date, where the answer needs it
    dressed: bool = True  # whether unrelated tools, instructions and earlier turns may be put round it


class Draw:
    """One sample's source of choices. `held` asks for held-out names and keys, `names` for one list of them."""

    def __init__(self, rng: random.Random, pool: NamePool, held: bool, names: str = "any") -> None:
        self.rng = rng
        self.pool = pool
        self.held = held
        self.names = names
        self.effort: Effort = rng.choice(("medium", "medium", "low", "high"))

    def pick(self, choices: Sequence[T]) -> T:
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def keyed(self, make: Callable[[], T], key: Callable[[T], str] = repr) -> T:
        """A value whose key lies on this sample's side of the split. Raises RuntimeError when none comes."""
        for _ in range(MAX_DRAWS):
            value = make()
            if (hash_share(f"key {key(value)}") < HELD_SHARE) == self.held:
                return value
        raise RuntimeError(f"no value on the {'held-out' if self.held else 'training'} side in {MAX_DRAWS} draws")

    def name(self) -> str:
        """A place name of this sample's side: made up, or a real city."""
        if self.held:
            if self.names == "real" or (self.names == "any" and self.chance(0.5)):
                return self.pick(HELD_OUT_CITIES)
            return self.made_up(True)
        share = self.rng.random()
        if share < 0.55:
            return self.made_up(False)
        return self._listed(KNOWN_CITIES if share < 0.8 else CUT_CITIES)

    def person(self) -> str:
        """A person's name of this sample's side."""
        if self.held:
            return self.made_up(True)
        return self.pick(FIRST_NAMES) if self.chance(0.35) else self.made_up(False)

    def made_up(self, held: bool) -> str:
        """A made-up name of one side."""
        for _ in range(MAX_DRAWS):
            name = self.pool.make(self.rng)
            if is_held_out(name) == held:
                return name
        raise RuntimeError(f"no made-up name in {MAX_DRAWS} draws")

    def _listed(self, names: Sequence[str]) -> str:
        while True:
            name = self.pick(names)
            if not is_held_out(name):
                return name

    def two(self, make: Callable[[], str]) -> tuple[str, str]:
        """Two different names."""
        one = make()
        while (other := make()) == one:
            pass
        return one, other

    def date(self) -> str:
        year, month = self.number(2024, 2029), self.number(1, 12)
        return f"{year}-{month:02d}-{self.number(1, calendar.monthrange(year, month)[1]):02d}"

    def think(self, low: str | None, medium: str, high: str) -> str | None:
        """The analysis that this sample's effort asks for."""
        return {"low": low, "medium": medium, "high": high}[self.effort]

    def answer(self, user: str, final: str, low: str | None, medium: str, high: str) -> Exchange:
        """An exchange answered at once."""
        return Exchange(user, (Step(self.think(low, medium, high), final),))


FILLER_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Be helpful and polite.",
    "Answer the user's questions.",
    "You are a friendly assistant. Answer briefly.",
    "Use the tools when they are needed.",
    "Keep your answers short.",
    "Think before you answer.",
    "You are a test assistant.",
    "Answer in English.",
)


NOISE_WORDS = tuple(
    "you are a an the be in of to and answer user with please always never only use do not it is".split()  # noqa: SIM905
)


def frame(draw: Draw, lesson: Lesson, earlier: Sequence[Exchange], spare_tools: Sequence[Tool]) -> Conversation:
    """Puts date, effort and, where the lesson allows it, earlier turns, unrelated tools and instructions round it."""
    instructions, tools = lesson.instructions, lesson.tools
    if instructions is None and lesson.dressed and draw.chance(0.3):
        instructions = draw.pick(FILLER_INSTRUCTIONS)
    if spare_tools:
        mixed = [*tools, *(tool for tool in spare_tools if tool.name not in {own.name for own in tools})]
        draw.rng.shuffle(mixed)
        tools = tuple(mixed)
    noise = None
    if instructions is None and lesson.dressed and not draw.held and draw.chance(0.1):
        noise = " ".join(
            draw.made_up(False) if draw.chance(0.5) else draw.pick(NOISE_WORDS) for _ in range(draw.number(1, 24))
        )
    exchanges = (*earlier, *lesson.exchanges)
    return Conversation(
        exchanges, lesson.date or draw.date(), draw.effort, tools, instructions, lesson.first, noise, lesson.wild
    )
