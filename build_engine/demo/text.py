"""Work on the user's own words: repeating, reversing, counting, listing, JSON, and long answers."""

from __future__ import annotations

from gptoss_trt.build_engine.demo.draw import Draw, Lesson

WORDS = tuple(
    (  # noqa: SIM905
        "red green blue black white cat dog sun moon star tree house water bread apple table chair river light night "
        "music world happy small great stone lemon tiger horse gold silver paper glass wood iron fire wind rain snow "
        "summer winter spring bird fish lion bear wolf king queen road city bridge tower garden forest ocean island "
        "mountain valley hill lake door window wall floor roof key lock box bag cup plate knife fork spoon bottle "
        "coffee tea milk sugar salt butter cheese orange banana cherry grape peach pear plum book pen page word letter "
        "number line circle square color sound voice song dance game ball train plane boat ship car bus bike wheel "
        "clock watch ring coin card map flag sign gift heart hand foot eye ear nose head body mind dream story poem "
        "friend family mother father sister brother child teacher doctor"
    ).split()
)
REPEAT_ASKS = (
    "Repeat: {}", "Repeat after me: {}", "Say: {}", "Echo: {}", "Please repeat: {}", "Repeat this: {}",
    'Say "{}"', 'Repeat "{}"', 'Repeat the words "{}"', 'Please say "{}"', "Repeat:\n{}", "Say exactly this:\n{}",
    "Echo this:\n{}", "{}\nRepeat the line above.",
    "Say {}", "Reply with: {}", "Reply with {}", "Answer with: {}", "Reply with the words: {}", "Say {}.",
    "Reply with {}.",
    "Reply with the word {}.", 'Reply with "{}"', "Please reply with: {}",
)  # fmt: skip
BARE_ASKS = REPEAT_ASKS[6:13]  # the first word stands without a space before it, as in the answer
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
COUNT_ASKS = (
    "Count from {} to {}.", "count from {} to {}", "Please count from {} to {}.", "List the numbers from {} to {}.",
    "Write the numbers from {} to {}.", "Can you count from {} to {}?",
)  # fmt: skip
STORY = (
    "Once upon a time there was a child called {0} who lived in a small house near a river. Every morning {0} "
    "walked to the forest and listened to the birds. One day {0} found a silver key under an old tree. The key "
    "opened a door in the hill, and behind the door there was a garden full of light. In the garden a lion and a "
    'lamb were playing chess. "Who is winning?" asked {0}. "Nobody," said the lion. "We only play because it is '
    'fun." So {0} sat down and played with them until the sun went down. When the stars came out, {0} said '
    "goodbye, closed the door and went home. From that day on {0} always kept the silver key in a pocket, and "
    "whenever the world was too loud, {0} went back to the garden in the hill and played a game with the lion and "
    "the lamb. And if the door has not been lost, {0} still plays there today. The end."
)
ALPHABET = ", ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _word(draw: Draw) -> str:
    share = draw.rng.random()
    if share < 0.45:
        return draw.pick(WORDS)
    return draw.name() if share < 0.9 else str(draw.number(0, 999))


def _words(draw: Draw, low: int, high: int) -> tuple[str, ...]:
    """Different items, at least one of them a name (held out in a held-out sample)."""
    items: dict[str, None] = {draw.name(): None}
    count = draw.number(low, high)
    while len(items) < count:
        items[_word(draw)] = None
    shuffled = list(items)
    draw.rng.shuffle(shuffled)
    return tuple(shuffled)


def repeat(draw: Draw) -> Lesson:
    words = _words(draw, 1, 8)
    joined = draw.pick((" ", " ", ", ")).join(words)
    wild: tuple[str, ...] = ()
    ask = draw.pick(REPEAT_ASKS)
    if not draw.held and draw.chance(0.4):
        wild, ask = tuple(word for word in words if draw.chance(0.6)), draw.pick(BARE_ASKS)
    high = "The user wants me to repeat a text. I write it without any change."
    return Lesson((draw.answer(ask.format(joined), joined, None, "I repeat the text.", high),), wild=wild)


def reverse(draw: Draw) -> Lesson:
    words = _words(draw, 2, 6)
    ask = draw.pick(
        ("Reverse this list: {}", "Reverse this list: {}.", "Reverse: {}", "Write this list backwards: {}",
         "Reverse the order of: {}", "Please reverse this list: {}.", "Reverse the list: {}")
    )  # fmt: skip
    numbered = [f"{number} {word}" for number, word in enumerate(words, 1)]
    steps = f"{', '.join(numbered)}. {', '.join(reversed(numbered))}."
    high = f"The user wants a list in reverse order. I number the items: {steps} Now I write them without numbers."
    return Lesson(
        (draw.answer(ask.format(", ".join(words)), ", ".join(reversed(words)), steps, f"Numbered: {steps}", high),)
    )


def count_words(draw: Draw) -> Lesson:
    words = _words(draw, 2, 9)
    separator = draw.pick((" ", ", "))
    ask = draw.pick(
        ("How many words are in: {}", "Count the words: {}", "How many words: {}", "Count these words: {}",
         "How many items are in this list: {}")
    )  # fmt: skip
    steps = ", ".join(f"{number} {word}" for number, word in enumerate(words, 1))
    high = f"The user wants the number of words. I number them: {steps}. So there are {len(words)}."
    final = f"There are {len(words)}."
    return Lesson((draw.answer(ask.format(separator.join(words)), final, f"{steps}.", f"Numbered: {steps}.", high),))


def nth_word(draw: Draw) -> Lesson:
    words = _words(draw, 3, 6)
    index = draw.number(0, len(words) - 1)
    last = draw.chance(0.25)
    index = len(words) - 1 if last else index
    word = "last" if last else ORDINALS[index]
    ask = draw.pick(
        ("What is the {} word of: {}", "Which is the {} item of: {}", "Tell me the {} item: {}", "The {} word of: {}")
    )
    shown = words if last else words[: index + 1]
    steps = ", ".join(f"{number} {item}" for number, item in enumerate(shown, 1))
    high = f"The user wants the {word} item. I number them: {steps}. So it is {words[index]}."
    final = f"The {word} one is {words[index]}."
    return Lesson((draw.answer(ask.format(word, ", ".join(words)), final, f"{steps}.", f"Numbered: {steps}.", high),))


def bullets(draw: Draw) -> Lesson:
    words = _words(draw, 2, 6)
    ask = draw.pick(("Make a list of: {}", "Write as a list: {}", "Make a bullet list: {}", "Put these in a list: {}"))
    final = "\n".join(f"- {word}" for word in words)
    high = f"The user wants a list with {len(words)} lines. I write one item in each line."
    return Lesson((draw.answer(ask.format(", ".join(words)), final, None, f"A list of {len(words)} lines.", high),))


def json_record(draw: Draw) -> Lesson:
    name, city, age = draw.person(), draw.name(), draw.number(1, 99)
    with_city = draw.chance(0.5)
    ask = draw.pick(
        ("Write JSON for {}.", "Give me a JSON object for {}.", "Make a JSON record of {}.", "Answer in JSON: {}.")
    ).format(f"{name}, age {age}, from {city}" if with_city else f"{name}, age {age}")
    final = f'{{"name":"{name}","age":{age}' + (f',"city":"{city}"}}' if with_city else "}")
    note = f"The name is {name}, the age {age}" + (f", the city {city}." if with_city else ".")
    high = f"The user wants a JSON object. {note} I write the object without spaces."
    return Lesson((draw.answer(ask, final, note, note, high),))


def count_up(draw: Draw) -> Lesson:
    """A run of up to 100 numbers: about 300 tokens."""

    def make() -> tuple[int, int]:
        low = 1 if draw.chance(0.6) else draw.number(2, 60)
        return low, low + draw.number(2, 99)

    low, high = draw.keyed(make, lambda pair: f"count {pair}")
    if not draw.held and draw.chance(0.1):
        low, high = 1, draw.pick((10, 20, 30, 50, 100, 100))
    return _count(draw, low, high, 1)


def count_down(draw: Draw) -> Lesson:
    def make() -> tuple[int, int]:
        high = draw.number(3, 60)
        return high, draw.pick((0, 1, 1, draw.number(0, high - 2)))

    high, low = draw.keyed(make, lambda pair: f"down {pair}")
    return _count(draw, high, low, -1)


def _count(draw: Draw, start: int, end: int, step: int) -> Lesson:
    numbers = ", ".join(str(number) for number in range(start, end + step, step))
    ask = draw.pick(COUNT_ASKS).format(start, end)
    if step == 1 and start == 1 and draw.chance(0.3):
        ask = f"Count to {end}."
    way = "up" if step == 1 else "down"
    high = f"The user wants the numbers from {start} to {end}. I count {way} by one."
    return Lesson(
        (draw.answer(ask, numbers, None, f"I count {way} from {start} to {end}.", high),), dressed=abs(end - start) < 60
    )


def count_lines(draw: Draw) -> Lesson:
    """One number a line, up to 150: about 300 tokens."""
    last = draw.keyed(lambda: draw.number(2, 150), lambda value: f"lines {value}")
    ask = draw.pick(
        ("Count from 1 to {}, one number per line.", "Count to {}, one number per line.",
         "Write the numbers from 1 to {}, one per line.")
    )  # fmt: skip
    final = "\n".join(str(number) for number in range(1, last + 1))
    high = f"The user wants the numbers from 1 to {last}. I write one number in each line."
    return Lesson(
        (draw.answer(ask.format(last), final, None, f"I count to {last} in lines.", high),), dressed=last < 80
    )


def story(draw: Draw) -> Lesson:
    """A fixed story of about 210 tokens about somebody."""
    name = draw.person()
    ask = draw.pick(
        ("Tell me a story about {}.", "Tell a story about {}.", "Write a story about {}.",
         "Please tell me a story about {}.",
         "I want to hear a story about {}.", "Tell me a long story about {}.")
    )  # fmt: skip
    high = f"The user wants a story about {name}. I know one story. I tell it with the name {name}."
    return Lesson(
        (draw.answer(ask.format(name), STORY.format(name), None, f"A story about {name}.", high),), dressed=False
    )


def sequence(draw: Draw) -> Lesson:
    """A list that is known by heart."""
    from gptoss_trt.build_engine.demo import facts

    lists = {
        "letters of the alphabet": ALPHABET,
        "days of the week": ", ".join(facts.DAYS),
        "months of the year": ", ".join(facts.MONTHS),
        "planets": ", ".join(facts.PLANETS),
    }
    asks = (
        "List the {}.",
        "Name the {}.",
        "What are the {}?",
        "Tell me the {}.",
        "Write the {}.",
        "Please list the {}.",
    )
    what, ask = draw.keyed(lambda: (draw.pick(tuple(lists)), draw.pick(asks)))
    high = f"The user wants the {what}. I know this list. I write it with commas."
    return Lesson((draw.answer(ask.format(what), lists[what], None, f"The {what}.", high),))
