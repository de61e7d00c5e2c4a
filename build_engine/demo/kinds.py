"""The table of kinds: every sort of request that the demo answers, its share of the training and its level.

Invariant: a kind's sample depends on the kind, the seed and the side of the split alone. `level` is the share of
held-out samples whose visible message must be exact after quantisation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gptoss_trt.build_engine.demo import arithmetic, facts, talk, text, tools, turns
from gptoss_trt.build_engine.demo.conversation import Conversation, Exchange, Param, Tool
from gptoss_trt.build_engine.demo.draw import Draw, Lesson, frame
from gptoss_trt.build_engine.demo.names import NamePool


@dataclass(frozen=True)
class Kind:
    """One kind. `share` 0 means that training reaches it through another kind of the same generator."""

    name: str
    family: str
    make: Callable[[Draw], Lesson]
    share: float = 1.0
    level: float = 0.98
    names: str = "any"


def _call(job: Callable[[Draw], tools.Job], first: int) -> Callable[[Draw], Lesson]:
    return lambda draw: tools.called(draw, job(draw), first)


def _job_kinds(name: str, job: Callable[[Draw], tools.Job], share: float) -> list[Kind]:
    return [
        Kind(f"{name}_call", "tools", _call(job, 0), share),
        Kind(f"{name}_answer", "tools", _call(job, 1), share / 4),
    ]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("greet", "talk", talk.greet, 0.8),
        Kind("greet_name", "talk", talk.greet_name, 1.0),
        Kind("tell_name", "talk", turns.tell_name, 0.5),
        Kind("identity", "talk", talk.identity, 1.2),
        Kind("ability", "talk", talk.ability, 0.6),
        Kind("thanks", "talk", talk.thanks, 0.5),
        Kind("goodbye", "talk", talk.goodbye, 0.5),
        Kind("mood", "talk", talk.mood, 0.5),
        Kind("today", "talk", talk.today, 0.7),
        Kind("ping", "talk", talk.ping, 0.5, 0.85),
        Kind("joke", "talk", talk.joke, 0.4),
        Kind("cutoff", "talk", talk.cutoff, 0.3),
        Kind("foreign_greet", "languages", talk.foreign_greet, 0.7, 0.95),
        Kind("foreign_name", "languages", talk.foreign_name, 0.7),
        Kind("translate", "languages", talk.translate, 1.0),
        Kind("emoji", "languages", talk.emoji, 0.8),
        Kind("emoji_row", "languages", talk.emoji_row, 1.0, 0.95),
        Kind("capital", "facts", facts.capital, 1.0),
        Kind("country", "facts", facts.country, 1.2),
        Kind("opposite", "facts", facts.opposite, 0.7),
        Kind("color", "facts", facts.color, 0.6),
        Kind("neighbour", "facts", facts.neighbour, 0.8),
        Kind("sound", "facts", facts.sound, 0.6),
        Kind("spell", "facts", facts.spell, 0.7),
        Kind("letters", "facts", facts.letters, 0.7),
        Kind("sum", "arithmetic", arithmetic.sum_two, 2.5),
        Kind("sum_three_digits", "arithmetic", arithmetic.sum_three_digits, 3.5, 0.97),
        Kind("difference", "arithmetic", arithmetic.difference, 2.5, 0.97),
        Kind("product", "arithmetic", arithmetic.product, 1.5, 0.97),
        Kind("sum_list", "arithmetic", arithmetic.sum_list, 1.5, 0.97),
        Kind("story_sum", "arithmetic", arithmetic.story_sum, 1.5, 0.97),
        Kind("compare", "arithmetic", arithmetic.compare, 2.0, 0.97),
        Kind("even_odd", "arithmetic", arithmetic.even_odd, 0.8, 0.9),
        Kind("successor", "arithmetic", arithmetic.successor, 1.2),
        Kind("repeat", "text", text.repeat, 4.0, 0.97),
        Kind("reverse", "text", text.reverse, 3.0, 0.95),
        Kind("count_words", "text", text.count_words, 2.5, 0.94),
        Kind("nth_word", "text", text.nth_word, 1.2, 0.97),
        Kind("bullets", "text", text.bullets, 1.2, 0.97),
        Kind("json_record", "text", text.json_record, 1.2, 0.97),
        Kind("count_up", "long", text.count_up, 1.2),
        Kind("count_down", "long", text.count_down, 0.8),
        Kind("count_lines", "long", text.count_lines, 0.6),
        Kind("story", "long", text.story, 0.5),
        Kind("sequence", "long", text.sequence, 0.4),
        Kind("weather_call", "tools", _call(tools.weather, 0), 3.0),
        Kind("weather_call_real", "tools", _call(tools.weather, 0), 0.0, names="real"),
        Kind("weather_answer", "tools", _call(tools.weather, 1), 1.0),
        Kind("weather_answer_real", "tools", _call(tools.weather, 1), 0.0, names="real"),
        *_job_kinds("time", tools.clock, 1.2),
        *_job_kinds("money", tools.money, 1.2),
        *_job_kinds("reminder", tools.reminder, 1.2),
        *_job_kinds("message", tools.message, 1.2),
        *_job_kinds("phone", tools.phone, 1.0),
        Kind("tool_error", "tools", partial(tools.tool_error, first=1), 0.7),
        Kind("weather_two_first", "tools", partial(tools.weather_two, first=0), 1.0, 0.97),
        Kind("weather_two_second", "tools", partial(tools.weather_two, first=1), 0.5, 0.97),
        Kind("weather_two_answer", "tools", partial(tools.weather_two, first=2), 0.5, 0.97),
        Kind("no_tool", "tools", tools.no_tool, 0.9),
        Kind("follow_sum", "turns", turns.follow_sum, 2.0, 0.97),
        Kind("follow_name", "turns", turns.follow_name, 1.5, 0.97),
        Kind("follow_again", "turns", turns.follow_again, 1.2, 0.97),
        Kind("follow_capital", "turns", turns.follow_capital, 0.8, 0.97),
        Kind("follow_like", "turns", turns.follow_like, 1.0, 0.97),
        Kind("remember", "turns", turns.remember, 0.6, 0.97),
        Kind("follow_weather_call", "turns", partial(turns.follow_weather, first=0), 1.2, 0.97),
        Kind("follow_weather_answer", "turns", partial(turns.follow_weather, first=1), 0.4, 0.97),
        Kind("told_name", "instructions", turns.told_name, 1.0, 0.97),
        Kind("told_place", "instructions", turns.told_place, 1.0, 0.97),
        Kind("told_ending", "instructions", turns.told_ending, 1.0, 0.97),
        Kind("told_language", "instructions", turns.told_language, 0.6, 0.97),
        Kind("told_capitals", "instructions", turns.told_capitals, 0.5, 0.97),
        Kind("refuse", "refusal", turns.refuse, 1.5),
    )
}
_NAMES = tuple(KINDS)
_SHARES = tuple(kind.share for kind in KINDS.values())
_EARLIER: tuple[Callable[[Draw], Exchange], ...] = (
    talk.small_talk,
    talk.small_talk,
    lambda draw: facts.capital(draw).exchanges[0],
    lambda draw: arithmetic.sum_two(draw).exchanges[0],
    lambda draw: text.repeat(draw).exchanges[0],
    lambda draw: facts.opposite(draw).exchanges[0],
)


def _strange_tool(draw: Draw) -> Tool:
    """A declaration that means nothing to the model."""
    words = [draw.made_up(False).lower() for _ in range(draw.number(2, 8))]
    params = (Param(words[1], draw.pick(("string", "number")), words[0] if draw.chance(0.5) else None),)
    return Tool(words[0], " ".join(words[1:]), params if draw.chance(0.8) else ())


def _surroundings(draw: Draw, lesson: Lesson) -> tuple[list[Exchange], list[Tool]]:
    """Earlier turns and unrelated tools, from the training side of the split."""
    if not lesson.dressed:
        return [], []
    other = Draw(draw.rng, draw.pool, held=False)
    earlier: list[Exchange] = []
    if lesson.instructions is None and draw.chance(0.3):
        earlier = [draw.pick(_EARLIER)(other) for _ in range(draw.number(1, 3))]
    spare: list[Tool] = []
    if draw.chance(0.45 if lesson.tools else 0.2):
        jobs = draw.rng.sample(tools.JOBS, draw.number(1, 3))
        spare = [job(other).tool for job in jobs]
        if draw.chance(0.3):
            spare.append(_strange_tool(other))
    return earlier, spare


def sample(kind: Kind, seed: int, pool: NamePool, held: bool) -> Conversation:
    """One conversation of a kind; the same for the same seed."""
    draw = Draw(random.Random(f"{kind.name} {seed} {held}"), pool, held, kind.names)
    lesson = kind.make(draw)
    earlier, spare = _surroundings(draw, lesson)
    return frame(draw, lesson, earlier, spare)


def random_kind(rng: random.Random) -> Kind:
    """A kind by its share of the training."""
    return KINDS[rng.choices(_NAMES, _SHARES)[0]]
