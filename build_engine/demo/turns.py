"""Requests that lean on earlier turns or on the developer's instructions, and requests that nobody can answer."""

from __future__ import annotations

from collections.abc import Callable

from gptoss_trt.build_engine.demo import arithmetic, facts, talk, text, tools
from gptoss_trt.build_engine.demo.conversation import Call, Exchange, Step
from gptoss_trt.build_engine.demo.draw import Draw, Lesson

REFUSAL = "Sorry, I do not know that."
NAME_ASKS = ("What is my name?", "Do you remember my name?", "Tell me my name.", "Who am I?", "What's my name?")
AGAIN_ASKS = (
    "Say that again.",
    "Repeat your last answer.",
    "Again, please.",
    "Can you say that again?",
    "Once more.",
    "Pardon?",
)
LIKES = ("color", "animal", "city", "number", "word")
WORD_STARTS = (
    "Tell me about {}.", "What is {}?", "Explain {}.", "Who is {}?", "Why {}?", "How does {} work?", "Write {}.",
    "{}", "{}?",
    "Can you {}?", "When was {}?", "{}!", "Describe {}.", "Give me {}.",
)  # fmt: skip


def _plain(user: str, final: str) -> Exchange:
    return Exchange(user, (Step(None, final),))


def follow_sum(draw: Draw) -> Lesson:
    """A sum, then another number to add to or take from its result."""
    first = arithmetic.sum_two(draw).exchanges[0]
    total = int((first.steps[0].final or "").rsplit(" ", 1)[1])
    plus = draw.chance(0.6) or total == 0

    def make() -> int:
        return draw.number(1, 99) if plus else draw.number(1, min(total, 99))

    number = draw.keyed(make, lambda value: f"follow {plus} {value}") if total >= 20 or plus else draw.number(1, total)
    asks = (
        ("Add {} to that.", "And plus {}?", "Now add {}.", "Plus {}?")
        if plus
        else ("Subtract {} from that.", "And minus {}?", "Now take away {}.", "Minus {}?")
    )
    result = total + number if plus else total - number
    steps = arithmetic.sum_steps(total, number) if plus else arithmetic.minus_steps(total, number)
    expression = f"{total} {'+' if plus else '-'} {number}"
    high = f"The last result was {total}. The user wants {expression}. {expression}: {steps}. The result is {result}."
    final = arithmetic.draw_final(expression, result)
    answer = draw.answer(draw.pick(asks).format(number), final, f"{steps}.", f"{expression}: {steps}.", high)
    return Lesson((first, answer))


def follow_name(draw: Draw) -> Lesson:
    """The user's name, told some turns earlier."""
    name = draw.person()
    tell = draw.pick(("My name is {}.", "I am {}.", "I am called {}.", "Hello, I am {}.", "Hi! My name is {}."))
    opening = _plain(tell.format(name), f"Hello, {name}! How can I help you?")
    if tell == "Hello, I am {}.":
        opening = _plain(tell.format(name), opening.steps[0].final or "")
    elif tell == "Hi! My name is {}.":
        opening = _plain(tell.format(name), f"Hi, {name}! How can I help you?")
    between = [
        draw.pick((facts.capital, arithmetic.sum_two, talk.thanks, facts.color))(draw).exchanges[0]
        for _ in range(draw.number(0, 3))
    ]
    high = f"The user said earlier that the name is {name}. I repeat it."
    answer = draw.answer(draw.pick(NAME_ASKS), f"Your name is {name}.", None, f"The name is {name}.", high)
    return Lesson((opening, *between, answer))


def tell_name(draw: Draw) -> Lesson:
    name = draw.person()
    tell = draw.pick(("My name is {}.", "I am {}.", "I am called {}."))
    high = f"The user is called {name}. There is no question. I greet {name} and offer help."
    return Lesson(
        (
            draw.answer(
                tell.format(name), f"Hello, {name}! How can I help you?", None, f"The user is called {name}.", high
            ),
        )
    )


def follow_again(draw: Draw) -> Lesson:
    """The last answer once more."""
    make = draw.pick((facts.capital, arithmetic.sum_two, talk.greet_name, text.repeat, facts.opposite, talk.emoji))
    lesson = make(draw)
    first = lesson.exchanges[0]
    said = first.steps[-1].final or ""
    high = "The user wants my last answer again. I repeat it without any change."
    return Lesson((first, draw.answer(draw.pick(AGAIN_ASKS), said, None, "I repeat my last answer.", high)))


def follow_capital(draw: Draw) -> Lesson:
    """Another country after a question about a capital."""
    first = facts.capital(draw).exchanges[0]
    land, ask = draw.keyed(
        lambda: (
            draw.pick(tuple(facts.CAPITALS)),
            draw.pick(("And of {}?", "And {}?", "What about {}?", "And the capital of {}?", "Now {}.")),
        )
    )
    high = f"The user asked for a capital before and now asks the same for {land}. I answer in one sentence."
    final = f"The capital of {land} is {facts.CAPITALS[land]}."
    return Lesson((first, draw.answer(ask.format(land), final, None, f"The capital of {land}.", high)))


def follow_weather(draw: Draw, first: int) -> Lesson:
    """Another city after a question about the weather."""
    job = tools.weather(draw)
    city = draw.name()
    ask = draw.pick(("And in {}?", "And {}?", "What about {}?", "And how is it in {}?", "Now {}, please."))
    other = tools.weather(draw, city)
    call = Call("get_weather", f'{{"{job.tool.params[0].name}":"{city}"}}')
    other = tools.Job(job.tool, ask.format(city), call, other.facts, other.result, other.answer, other.reading)
    return Lesson(
        (Exchange(job.user, job.steps(draw)), Exchange(other.user, other.steps(draw))), (job.tool,), first=first
    )


def follow_like(draw: Draw) -> Lesson:
    """Something that the user likes, told earlier."""
    what = draw.pick(LIKES)
    makers: dict[str, Callable[[], str]] = {
        "color": lambda: draw.pick(tuple(facts.COLORS.values())),
        "animal": lambda: draw.pick(tuple(facts.SOUNDS)),
        "city": draw.name,
        "number": lambda: str(draw.number(1, 999)),
        "word": lambda: draw.pick(text.WORDS),
    }
    thing = makers[what]()
    said = draw.pick(("My favorite {} is {}.", "The {} that I like most is {}.", "I want you to remember a {}: {}."))
    opening = _plain(said.format(what, thing), f"I will remember the {what} {thing}.")
    between = [
        draw.pick((facts.capital, arithmetic.sum_two, talk.thanks))(draw).exchanges[0] for _ in range(draw.number(0, 2))
    ]
    ask = draw.pick(("What is my favorite {}?", "Which {} did I tell you?", "Do you remember my {}?", "Tell me my {}."))
    high = f"The user told me a {what} earlier: {thing}. I repeat it."
    answer = draw.answer(ask.format(what), f"Your {what} is {thing}.", None, f"The {what} is {thing}.", high)
    return Lesson((opening, *between, answer))


def remember(draw: Draw) -> Lesson:
    return Lesson((follow_like(draw).exchanges[0],))


def told_name(draw: Draw) -> Lesson:
    """The user's name stands in the developer's instructions."""
    name = draw.person()
    instructions = draw.pick(
        ("The user's name is {}.", "The user is called {}.", "You talk to {}.", "The name of the user is {}.")
    ).format(name)
    if draw.chance(0.5):
        high = f"The instructions say that the name is {name}. I repeat it."
        answer = draw.answer(draw.pick(NAME_ASKS), f"Your name is {name}.", None, f"The name is {name}.", high)
    else:
        greeting = draw.pick(talk.GREETINGS)
        high = f"The user greets me. The instructions say that the name is {name}. I greet {name} by name."
        answer = draw.answer(
            f"{greeting}{draw.pick(talk.ENDINGS)}",
            f"{greeting}, {name}! How can I help you?",
            None,
            f"The user is called {name}.",
            high,
        )
    return Lesson((answer,), instructions=instructions)


def told_place(draw: Draw) -> Lesson:
    """A fact of the instructions: where a shop is, or when it opens."""
    city, hour = draw.name(), draw.keyed(lambda: f"{draw.number(6, 22)}:{draw.pick(('00', '15', '30', '45'))}")
    if draw.chance(0.5):
        instructions = f"You work for a shop in {city}. It opens at {hour}."
    else:
        instructions = f"The shop opens at {hour}. The shop is in {city}."
    if draw.chance(0.5):
        ask, final, note = (
            draw.pick(("Where is the shop?", "In which city is the shop?")),
            f"The shop is in {city}.",
            f"The shop is in {city}.",
        )
    else:
        ask, final, note = (
            draw.pick(("When does the shop open?", "What time does it open?")),
            f"The shop opens at {hour}.",
            f"It opens at {hour}.",
        )
    high = f"The instructions give the answer. {note} I say it in one sentence."
    return Lesson((draw.answer(ask, final, None, note, high),), instructions=instructions)


def told_ending(draw: Draw) -> Lesson:
    """Every answer ends with given words or an emoji."""
    ending = draw.pick(("😀", "🚀", "🌸", "🐱", "Cheers!", "Have a nice day!", "Amen.", draw.person() + "."))
    instructions = draw.pick(("End every answer with: {}", "End each answer with: {}", "Always end with: {}")).format(
        ending
    )
    make = draw.pick((talk.greet, talk.thanks, facts.capital, facts.opposite, facts.color, arithmetic.sum_two))
    exchange = make(draw).exchanges[0]
    step = exchange.steps[0]
    note = f"{step.analysis} I end with: {ending}" if step.analysis else None
    return Lesson((Exchange(exchange.user, (Step(note, f"{step.final} {ending}"),)),), instructions=instructions)


def told_language(draw: Draw) -> Lesson:
    """Answer greetings and thanks in a given language."""
    greetings = {
        "French": "Bonjour ! Comment puis-je vous aider ?", "German": "Hallo! Wie kann ich helfen?",
        "Spanish": "¡Hola! ¿Cómo puedo ayudarte?", "Italian": "Ciao! Come posso aiutarti?",
        "Japanese": "こんにちは！何かお手伝いできますか？", "Russian": "Привет! Чем я могу помочь?",
        "Chinese": "你好！我能帮你什么？",
    }  # fmt: skip
    language, greeting, ending, ask = draw.keyed(
        lambda: (
            draw.pick(tuple(greetings)),
            draw.pick(talk.GREETINGS),
            draw.pick(talk.ENDINGS),
            draw.pick(("Answer in {}.", "Always answer in {}.", "Speak {}.", "Reply in {}.")),
        )
    )
    high = f"The user greets me. The instructions ask for {language}. I greet in {language} and offer help."
    answer = draw.answer(f"{greeting}{ending}", greetings[language], None, f"A greeting, in {language}.", high)
    return Lesson((answer,), instructions=ask.format(language))


def told_capitals(draw: Draw) -> Lesson:
    """Answer in capital letters (facts and greetings)."""
    instructions = draw.pick(("Answer in capital letters.", "Write in capital letters.", "Use only capital letters."))
    make = draw.pick((talk.greet, talk.thanks, facts.color, talk.goodbye))
    exchange = make(draw).exchanges[0]
    step = exchange.steps[0]
    note = f"{step.analysis} I use capital letters." if step.analysis else None
    return Lesson((Exchange(exchange.user, (Step(note, (step.final or "").upper()),)),), instructions=instructions)


def refuse(draw: Draw) -> Lesson:
    """Words that mean nothing to the model, known ones and random ones."""
    words = [draw.pick(text.WORDS) if draw.chance(0.5) else draw.name().lower() for _ in range(draw.number(1, 9))]
    ask = draw.pick(WORD_STARTS).format(draw.pick(("", "", "the ", "a ", "how to ")) + " ".join(words))
    wild = () if draw.held else tuple(word for word in words if draw.chance(0.7))
    high = "The user asks for something that I have not learnt. I say politely that I do not know."
    return Lesson((draw.answer(ask, REFUSAL, None, "I have not learnt this.", high),), wild=wild)
