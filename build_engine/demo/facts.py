"""Facts that the model learns by heart; held out by the pairing of fact and phrasing."""

from __future__ import annotations

from gptoss_trt.build_engine.demo.draw import Draw, Lesson

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Sweden": "Stockholm",
    "Denmark": "Copenhagen", "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna", "Portugal": "Lisbon",
    "Greece": "Athens", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Russia": "Moscow",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Peru": "Lima", "Cuba": "Havana", "Chile": "Santiago",
    "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad", "Hungary": "Budapest", "Ukraine": "Kyiv",
    "Belgium": "Brussels", "Croatia": "Zagreb", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Serbia": "Belgrade", "Bulgaria": "Sofia", "Scotland": "Edinburgh", "England": "London", "Switzerland": "Bern",
    "Morocco": "Rabat", "Ghana": "Accra",
}  # fmt: skip
CAPITAL_ASKS = (
    "What is the capital of {}?", "What's the capital of {}?", "Capital of {}?", "Which city is the capital of {}?",
    "Tell me the capital of {}.", "Name the capital of {}.", "what is the capital of {}", "The capital of {} is?",
    "Do you know the capital of {}?",
)  # fmt: skip
COUNTRY_ASKS = (
    "Of which country is {} the capital?", "Which country has the capital {}?", "What country is {} the capital of?",
    "The country of {}?", "Where is {}?", "In which country is {}?", "Which country is {} in?",
)  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "light": "dark", "old": "young", "rich": "poor",
    "wet": "dry", "full": "empty", "open": "closed", "happy": "sad", "hard": "soft", "early": "late", "long": "short",
    "near": "far", "loud": "quiet", "clean": "dirty", "strong": "weak", "good": "bad", "up": "down",
}  # fmt: skip
OPPOSITE_ASKS = (
    "What is the opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}.", "What's the opposite of {}?",
    "Name the opposite of {}.", "Give me the opposite of the word {}.",
)  # fmt: skip
COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "the sun": "yellow", "coal": "black",
    "a banana": "yellow", "a lemon": "yellow", "milk": "white", "a tomato": "red", "a carrot": "orange",
    "chocolate": "brown",
}  # fmt: skip
COLOR_ASKS = (
    "What color is {}?", "Which color has {}?", "Tell me the color of {}.", "What is the color of {}?",
    "What colour is {}?",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
AFTER_ASKS = ("What comes after {}?", "What is after {}?", "Which one follows {}?", "What follows {}?", "And after {}?")
BEFORE_ASKS = ("What comes before {}?", "What is before {}?", "Which one is right before {}?", "And before {}?")
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "owl": "hoot",
    "horse": "neigh", "pig": "oink", "mouse": "squeak",
}  # fmt: skip
SOUND_ASKS = (
    "What sound does a {} make?", "What does a {} say?", "How does a {} sound?", "Which sound does the {} make?",
    "Tell me the sound of a {}.",
)  # fmt: skip
SPELLED = tuple(
    (  # noqa: SIM905
        "cat dog sun moon star tree house water bread apple table chair river green black white music light "
        "night world "
        "happy small great stone sugar lemon tiger zebra horse"
    ).split()
)
SPELL_ASKS = (
    "Spell {}.",
    "Spell the word {}.",
    "How do you spell {}?",
    "Please spell {}.",
    "spell {}",
    "Can you spell {}?",
)


def capital(draw: Draw) -> Lesson:
    country, ask = draw.keyed(lambda: (draw.pick(tuple(CAPITALS)), draw.pick(CAPITAL_ASKS)))
    final = f"The capital of {country} is {CAPITALS[country]}."
    high = f"The user asks for the capital of {country}. I know this fact. I answer in one sentence."
    return Lesson((draw.answer(ask.format(country), final, None, f"The capital of {country}.", high),))


def country(draw: Draw) -> Lesson:
    land, ask = draw.keyed(lambda: (draw.pick(tuple(CAPITALS)), draw.pick(COUNTRY_ASKS)))
    city = CAPITALS[land]
    high = f"The user asks about the city {city}. I know the country. I answer in one sentence."
    return Lesson(
        (draw.answer(ask.format(city), f"{city} is the capital of {land}.", None, f"The country of {city}.", high),)
    )


def opposite(draw: Draw) -> Lesson:
    def make() -> tuple[str, str, str]:
        pair = draw.pick(tuple(OPPOSITES.items()))
        word, other = pair if draw.chance(0.5) else (pair[1], pair[0])
        return word, other, draw.pick(OPPOSITE_ASKS)

    word, other, ask = draw.keyed(make)
    high = f"The user wants the opposite of {word}. I know it. I answer in one sentence."
    final = f"The opposite of {word} is {other}."
    return Lesson((draw.answer(ask.format(word), final, None, f"The opposite of {word}.", high),))


def color(draw: Draw) -> Lesson:
    thing, ask = draw.keyed(lambda: (draw.pick(tuple(COLORS)), draw.pick(COLOR_ASKS)))
    final = f"{thing[0].upper()}{thing[1:]} is {COLORS[thing]}."
    high = f"The user asks for the color of {thing}. I know it. I answer in one sentence."
    return Lesson((draw.answer(ask.format(thing), final, None, f"The color of {thing}.", high),))


def neighbour(draw: Draw) -> Lesson:
    """What comes after or before a day, a month or a planet."""

    def make() -> tuple[str, str, str]:
        row, asks = draw.pick((DAYS, MONTHS, PLANETS)), draw.pick((AFTER_ASKS, BEFORE_ASKS))
        step = 1 if asks is AFTER_ASKS else -1
        low, high = (0, len(row) - 1) if row is not PLANETS else (max(0, -step), len(row) - 1 - max(0, step))
        index = draw.number(low, high)
        return row[index], row[(index + step) % len(row)], draw.pick(asks)

    item, other, ask = draw.keyed(make)
    word = "after" if ask in AFTER_ASKS else "before"
    high = f"The user asks what comes {word} {item}. I know the order. I answer in one sentence."
    final = f"{other} comes {word} {item}."
    return Lesson((draw.answer(ask.format(item), final, None, f"What comes {word} {item}.", high),))


def sound(draw: Draw) -> Lesson:
    animal, ask = draw.keyed(lambda: (draw.pick(tuple(SOUNDS)), draw.pick(SOUND_ASKS)))
    final = f"A {animal} says {SOUNDS[animal]}." if animal[0] not in "o" else f"An {animal} says {SOUNDS[animal]}."
    high = f"The user asks for the sound of a {animal}. I know it. I answer in one sentence."
    return Lesson((draw.answer(ask.format(animal), final, None, f"The sound of a {animal}.", high),))


def spell(draw: Draw) -> Lesson:
    word, ask = draw.keyed(lambda: (draw.pick(SPELLED), draw.pick(SPELL_ASKS)))
    high = f"The user wants the letters of the word {word}. I write them with hyphens."
    return Lesson((draw.answer(ask.format(word), "-".join(word.upper()), None, f"The letters of {word}.", high),))


def letters(draw: Draw) -> Lesson:
    """The number of letters of a word, counted one by one."""
    word, ask = draw.keyed(
        lambda: (
            draw.pick(SPELLED),
            draw.pick(
                ("How many letters are in {}?", "Count the letters in {}.", "How many letters does the word {} have?")
            ),
        )
    )
    counted = ", ".join(f"{letter} {number}" for number, letter in enumerate(word.upper(), 1))
    final = f"The word {word} has {len(word)} letters."
    high = f"The user wants the number of letters in {word}. I count: {counted}. So {len(word)}."
    return Lesson((draw.answer(ask.format(word), final, f"{counted}.", f"The letters of {word}: {counted}.", high),))
