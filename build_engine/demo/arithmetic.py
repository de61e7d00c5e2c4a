"""Sums, differences and small products, worked out in the analysis with numbers of at most three digits.

Invariant: every number that is written has at most three digits, so it is one token; the pairs of a sample lie on
one side of the held-out split.
"""

from __future__ import annotations

from gptoss_trt.build_engine.demo.draw import Draw, Lesson

SUM_ASKS = (
    "What is {} + {}?", "{} + {}", "{} + {} = ?", "Add {} and {}.", "What is the sum of {} and {}?",
    "Calculate {} + {}.",
    "How much is {} + {}?", "What is {} plus {}?", "How much is {} plus {}?", "Compute {} + {}.", "{} plus {}?",
    "What's {} + {}?", "{} + {}?", "{}+{}", "What is {}+{}?", "{}+{}=",
)  # fmt: skip
MINUS_ASKS = (
    "What is {} - {}?", "{} - {}", "{} - {} = ?", "Calculate {} - {}.", "How much is {} - {}?", "What is {} minus {}?",
    "How much is {} minus {}?", "Compute {} - {}.", "{} minus {}?", "What's {} - {}?", "{} - {}?", "{}-{}",
    "What is {}-{}?",
)  # fmt: skip
TIMES_ASKS = (
    "What is {} x {}?", "{} x {}", "{} x {} = ?", "Multiply {} by {}.", "What is {} times {}?",
    "How much is {} times {}?",
    "Calculate {} x {}.", "{} times {}?", "What is the product of {} and {}?", "What is {} * {}?",
)  # fmt: skip
THINGS = ("apples", "books", "coins", "stones", "stars", "cats", "cards", "eggs", "balls", "cakes")


def _split(number: int) -> list[int]:
    return [100 * (number // 100), 10 * (number // 10 % 10), number % 10]


def sum_steps(a: int, b: int) -> str:
    """`10 + 20 = 30, 7 + 5 = 12, 30 + 12 = 42`: digit by digit, from the highest place that either number has."""
    places = [(x, y) for x, y in zip(_split(a), _split(b), strict=True) if x or y]
    if len(places) <= 1:
        return f"{a} + {b} = {a + b}"
    parts = [f"{x} + {y} = {x + y}" for x, y in places]
    total = sum(places[0])
    for x, y in places[1:]:
        parts.append(f"{total} + {x + y} = {total + x + y}")
        total += x + y
    return ", ".join(parts)


def minus_steps(a: int, b: int) -> str:
    """`52 - 10 = 42, 42 - 7 = 35`: one place of the smaller number after the other."""
    places = [place for place in _split(b) if place]
    parts, total = [], a
    for place in places or [0]:
        parts.append(f"{total} - {place} = {total - place}")
        total -= place
    return ", ".join(parts)


def times_steps(a: int, b: int) -> str:
    """`20 x 4 = 80, 3 x 4 = 12, 80 + 12 = 92` for a two-digit and a one-digit number."""
    tens, ones = 10 * (a // 10), a % 10
    if not tens or not ones:
        return f"{a} x {b} = {a * b}"
    return f"{tens} x {b} = {tens * b}, {ones} x {b} = {ones * b}, {sum_steps(tens * b, ones * b)}"


def _lesson(draw: Draw, ask: str, expression: str, steps: str, result: int, check: str) -> Lesson:
    final = draw_final(expression, result)
    high = f"The user wants {expression}. {expression}: {steps}. The result is {result}. Check: {check}."
    return Lesson((draw.answer(ask, final, f"{steps}.", f"{expression}: {steps}.", high),))


def draw_final(expression: str, result: int) -> str:
    """The visible answer of every calculation."""
    return f"{expression} = {result}"


def sum_two(draw: Draw) -> Lesson:
    a, b = draw.keyed(lambda: (draw.number(0, 99), draw.number(0, 99)), lambda pair: f"sum {pair}")
    return _lesson(draw, draw.pick(SUM_ASKS).format(a, b), f"{a} + {b}", sum_steps(a, b), a + b, f"{a + b} - {b} = {a}")


def sum_three_digits(draw: Draw) -> Lesson:
    def make() -> tuple[int, int]:
        a = draw.number(100, 899)
        b = draw.number(10, 999 - a)
        return (a, b) if draw.chance(0.5) else (b, a)

    a, b = draw.keyed(make, lambda pair: f"sum {pair}")
    return _lesson(draw, draw.pick(SUM_ASKS).format(a, b), f"{a} + {b}", sum_steps(a, b), a + b, f"{a + b} - {b} = {a}")


def difference(draw: Draw) -> Lesson:
    """A number of at most 199 and a smaller one of at most 99."""

    def make() -> tuple[int, int]:
        a = draw.number(1, 99) if draw.chance(0.7) else draw.number(100, 199)
        return a, draw.number(0, min(a, 99))

    a, b = draw.keyed(make, lambda pair: f"minus {pair}")
    check = f"{a - b} + {b} = {a}"
    return _lesson(draw, draw.pick(MINUS_ASKS).format(a, b), f"{a} - {b}", minus_steps(a, b), a - b, check)


def product(draw: Draw) -> Lesson:
    a, b = draw.keyed(lambda: (draw.number(1, 99), draw.number(2, 9)), lambda pair: f"times {pair}")
    return _lesson(
        draw, draw.pick(TIMES_ASKS).format(a, b), f"{a} x {b}", times_steps(a, b), a * b, f"{b} x {a} = {a * b}"
    )


def sum_list(draw: Draw) -> Lesson:
    """Three numbers, added from left to right."""
    a, b, c = draw.keyed(lambda: tuple(draw.number(1, 99) for _ in range(3)), lambda three: f"list {three}")
    ask = draw.pick(
        ("What is {} + {} + {}?", "{} + {} + {}", "Add {}, {} and {}.", "What is the sum of {}, {} and {}?")
    )
    steps = f"{sum_steps(a, b)}, then {sum_steps(a + b, c)}"
    check = f"{a + b + c} - {c} = {a + b}"
    return _lesson(draw, ask.format(a, b, c), f"{a} + {b} + {c}", steps, a + b + c, check)


def story_sum(draw: Draw) -> Lesson:
    """A small word problem: somebody gets or gives things."""
    name, thing = draw.person(), draw.pick(THINGS)
    gets = draw.chance(0.5)

    def make() -> tuple[int, int]:
        a = draw.number(2, 99)
        return a, draw.number(1, 99) if gets else draw.number(1, a - 1)

    a, b = draw.keyed(make, lambda pair: f"story {gets} {pair}")
    verb = "gets {} more" if gets else draw.pick(("gives away {}", "loses {}"))
    ask = f"{name} has {a} {thing} and {verb.format(b)}. How many {thing} does {name} have now?"
    result = a + b if gets else a - b
    steps = sum_steps(a, b) if gets else minus_steps(a, b)
    expression = f"{a} {'+' if gets else '-'} {b}"
    final = f"{name} has {result} {thing}."
    high = f"The user asks how many {thing} {name} has. {expression}: {steps}. So {name} has {result} {thing}."
    return Lesson((draw.answer(ask, final, f"{steps}.", f"{name} has {expression}: {steps}.", high),))


def compare(draw: Draw) -> Lesson:
    def make() -> tuple[int, int]:
        a = draw.number(1, 199)
        b = draw.number(1, 199)
        return a, b if b != a else a - 1

    a, b = draw.keyed(make, lambda pair: f"compare {pair}")
    larger = draw.chance(0.5)
    word = "larger" if larger else "smaller"
    result = max(a, b) if larger else min(a, b)
    ask = draw.pick(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?"))
    sign = "greater" if a > b else "less"
    fact = f"{a} is {sign} than {b}."
    high = f"The user wants the {word} number. {fact} So {result} is {word}."
    return Lesson(
        (
            draw.answer(
                ask.format(w=word, a=a, b=b), f"{result} is {word}.", fact, f"{fact} The {word} one is {result}.", high
            ),
        )
    )


def even_odd(draw: Draw) -> Lesson:
    number = draw.keyed(lambda: draw.number(0, 999), lambda value: f"even {value}")
    ask = draw.pick(("Is {} even or odd?", "Is {} odd or even?", "Is the number {} even or odd?", "{}: even or odd?"))
    word = "odd" if number % 2 else "even"
    high = f"The last digit of {number} is {number % 10}. It is {word}. So {number} is {word}."
    return Lesson(
        (draw.answer(ask.format(number), f"{number} is {word}.", None, f"The last digit is {number % 10}.", high),)
    )


def successor(draw: Draw) -> Lesson:
    """The neighbour of a number of at most 199, known by heart: held out by number and phrasing."""
    asks = {
        "after": ("What number comes after {}?", "Which number comes after {}?", "What is the number after {}?",
                  "{} and then?", "The next number after {}?"),
        "before": ("What number comes before {}?", "Which number comes before {}?", "What is the number before {}?",
                   "The number just before {}?"),
    }  # fmt: skip

    def make() -> tuple[int, str, str]:
        word = draw.pick(("after", "before"))
        return draw.number(1, 199), word, draw.pick(asks[word])

    number, word, ask = draw.keyed(make)
    after = word == "after"
    other = number + 1 if after else number - 1
    step = f"{number} {'+' if after else '-'} 1 = {other}"
    high = f"The user wants the number {word} {number}. {step}. So it is {other}."
    return Lesson((draw.answer(ask.format(number), f"{other} comes {word} {number}.", None, f"{step}.", high),))
