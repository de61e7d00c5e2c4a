"""Function calls and answers from their results: weather, time, money, reminders, messages and phone numbers.

Invariant: arguments are JSON text without spaces, in the declared order of the parameters; the analysis names
every argument before the call. Knows nothing of how calls are rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gptoss_trt.build_engine.demo.conversation import Call, Exchange, Param, Step, Tool
from gptoss_trt.build_engine.demo.draw import Draw, Lesson

CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear", "cold", "warm")
CODES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "SEK", "NOK", "INR")
TASKS = ("call {}", "meet {}", "visit {}", "write to {}", "pay {}", "thank {}", "help {}", "buy a gift for {}")
NOTES = (
    "I am late", "see you soon", "happy birthday", "call me back", "the train is late", "dinner is ready", "good luck",
    "where are you", "I am at home", "the meeting is over",
)  # fmt: skip
WEATHER_ASKS = (
    "What is the weather in {}?", "How is the weather in {}?", "What's the weather in {}?", "Weather in {}?",
    "What is the weather like in {}?", "What's the weather like in {}?", "Tell me the weather in {}.",
    "weather in {}", "Is it warm in {}?", "Is it raining in {}?", "Do I need an umbrella in {}?", "{}?",
    "How warm is it in {}?", "What is the weather in {} today?", "What's the weather like in {} today?",
    "Please check the weather in {}.", "What is the temperature in {}?",
)  # fmt: skip
TIME_ASKS = (
    "What time is it in {}?", "What is the time in {}?", "Time in {}?", "Tell me the time in {}.",
    "How late is it in {}?",
    "What's the time in {}?", "What is the local time in {}?",
)  # fmt: skip
MONEY_ASKS = (
    "Convert {} {} to {}.", "How much is {} {} in {}?", "What is {} {} in {}?", "Change {} {} to {}.", "{} {} in {}?",
    "Convert {} {} into {}.",
)  # fmt: skip
REMIND_ASKS = (
    "Remind me to {} at {}.", "Set a reminder to {} at {}.", "Please remind me to {} at {}.", "Reminder: {} at {}.",
    "Can you remind me to {} at {}?",
)  # fmt: skip
MESSAGE_ASKS = (
    "Send {} a message: {}",
    "Send a message to {}: {}",
    "Message {}: {}",
    "Tell {} this: {}",
    "Write to {}: {}",
)
PHONE_ASKS = (
    "What is the phone number of {}?", "Phone number of {}?", "Find the phone number of {}.",
    "Look up the number of {}.",
    "How can I call {}?",
)  # fmt: skip
ERRORS = (
    "not found",
    "unknown city",
    "timeout",
    "no connection",
    "service unavailable",
    "access denied",
    "try again later",
)


@dataclass(frozen=True)
class Job:
    """A request that needs one tool: the tool, the user's text, the call, a result and the answer to it."""

    tool: Tool
    user: str
    call: Call
    facts: str  # the arguments in words, for the analysis
    result: str
    answer: str
    reading: str  # the result in words, for the analysis

    def steps(self, draw: Draw) -> tuple[Step, Step]:
        low = f"{self.facts}."
        high = f"The user's request needs a tool. {self.facts}. I call {self.call.name}."
        think = draw.think(low, f"{self.facts}. I call {self.call.name}.", high)
        read_high = f"The tool answered: {self.reading}. I tell the user."
        return (
            Step(think, call=self.call, result=self.result),
            Step(draw.think(None, f"The result: {self.reading}.", read_high), self.answer),
        )


def _json(draw: Draw, **values: object) -> str:
    """A tool's result, with or without spaces after colons and commas."""
    colon, comma = draw.pick(((":", ","), (": ", ", ")))
    texts = (
        f'"{key}"{colon}' + (f'"{value}"' if isinstance(value, str) else str(value)) for key, value in values.items()
    )
    return "{" + comma.join(texts) + "}"


def weather_tool(draw: Draw) -> Tool:
    description = draw.pick(
        ("Weather for a city.", "Get the weather for a city.", "Get the current weather in a city.",
         "Get the current weather.",
         "Returns the weather of a city.", "Get current weather", "Get the weather", "Current weather for a location")
    )  # fmt: skip
    key = draw.pick(("city", "city", "city", "location"))
    notes = (None, None, "City name", "Name of the city", "The city", "The name of the city", "The city, e.g. Paris")
    params = [Param(key, description=draw.pick(notes))]
    if draw.chance(0.15):
        params.append(Param("unit", required=False, choices=draw.pick((("celsius", "fahrenheit"), ("c", "f")))))
    return Tool("get_weather", description, tuple(params))


def weather(draw: Draw, city: str | None = None) -> Job:
    tool, city = weather_tool(draw), city or draw.name()
    degrees, condition = draw.keyed(lambda: (draw.number(-20, 45), draw.pick(CONDITIONS)))
    reading = f"{degrees} degrees and {condition}"
    form = draw.number(0, 7)
    if form < 2:
        result = _json(draw, temperature=degrees, condition=condition)
    elif form == 2:
        result = _json(draw, city=city, temperature=degrees, condition=condition)
    elif form == 3:
        result = _json(draw, temperature_c=degrees, condition=condition)
    elif form == 4:
        result = _json(
            draw,
            **{
                draw.pick(("temp", "temp_c", "temperature")): degrees,
                draw.pick(("sky", "weather", "conditions")): condition,
            },
        )
    elif form == 5:
        result = draw.pick(
            (f"{degrees} C, {condition}", f"{degrees} degrees and {condition}", f"{condition}, {degrees} degrees")
        )
    else:
        reading = f"{degrees} degrees"
        result = _json(draw, **{draw.pick(("temperature", "t", "temp", "temp_c", "temperature_c")): degrees})
    call = Call("get_weather", f'{{"{tool.params[0].name}":"{city}"}}')
    ask = draw.pick(WEATHER_ASKS).format(city)
    return Job(tool, ask, call, f"The weather in {city}", result, f"It is {reading} in {city}.", reading)


def clock(draw: Draw) -> Job:
    city = draw.name()
    time = draw.keyed(lambda: f"{draw.number(0, 23):02d}:{draw.number(0, 59):02d}")
    note = draw.pick((None, "City name", "The city"))
    text = draw.pick(
        ("Time in a city.", "Get the local time in a city.", "Get the current time in a city.", "Current time.")
    )
    call = Call("get_time", f'{{"city":"{city}"}}')
    result = _json(draw, time=time) if draw.chance(0.8) else time
    tool = Tool("get_time", text, (Param("city", description=note),))
    return Job(
        tool, draw.pick(TIME_ASKS).format(city), call, f"The time in {city}", result, f"It is {time} in {city}.", time
    )


def money(draw: Draw) -> Job:
    source, target = draw.two(lambda: draw.pick(CODES))
    amount, value = draw.keyed(lambda: (draw.number(1, 999), draw.number(1, 999)))
    text = draw.pick(
        ("Convert money.", "Convert an amount between currencies.", "Currency conversion.", "Converts currencies.")
    )
    tool = Tool("convert_currency", text, (Param("amount", "number"), Param("from"), Param("to")))
    call = Call("convert_currency", f'{{"amount":{amount},"from":"{source}","to":"{target}"}}')
    ask = draw.pick(MONEY_ASKS).format(amount, source, target)
    facts = f"{amount} from {source} to {target}"
    result = _json(draw, **{draw.pick(("result", "amount", "value")): value}) if draw.chance(0.8) else str(value)
    return Job(tool, ask, call, facts, result, f"{amount} {source} is {value} {target}.", f"{value} {target}")


def reminder(draw: Draw) -> Job:
    task = draw.pick(TASKS).format(draw.person())
    time = draw.keyed(lambda: f"{draw.number(0, 23):02d}:{draw.number(0, 59):02d}")
    text = draw.pick(("Set a reminder.", "Set a reminder for the user.", "Remind the user.", "Create a reminder."))
    tool = Tool("set_reminder", text, (Param("text"), Param("time")))
    call = Call("set_reminder", f'{{"text":"{task}","time":"{time}"}}')
    result = draw.pick(
        (_json(draw, ok=draw.pick((1,))), _json(draw, status="ok"), '{"ok":true}', '{"ok": true}', "ok", "done")
    )
    answer = f"I will remind you to {task} at {time}."
    return Job(
        tool, draw.pick(REMIND_ASKS).format(task, time), call, f"Remind to {task} at {time}", result, answer, "done"
    )


def message(draw: Draw) -> Job:
    name, note = draw.person(), draw.pick(NOTES)
    text = draw.pick(("Send a message.", "Send a message to a person.", "Send a text message."))
    tool = Tool("send_message", text, (Param("to"), Param("text")))
    call = Call("send_message", f'{{"to":"{name}","text":"{note}"}}')
    result = draw.pick(('{"ok":true}', '{"ok": true}', _json(draw, status="sent"), "sent", "ok"))
    ask = draw.pick(MESSAGE_ASKS).format(name, note)
    return Job(tool, ask, call, f'A message to {name}: "{note}"', result, f"I sent the message to {name}.", "sent")


def phone(draw: Draw) -> Job:
    name = draw.person()
    number = draw.keyed(lambda: f"{draw.number(100, 999)} {draw.number(100, 999)}")
    text = draw.pick(("Find a phone number.", "Look up the phone number of a person.", "Phone book."))
    tool = Tool("find_phone", text, (Param("name"),))
    result = _json(draw, phone=number) if draw.chance(0.8) else number
    call = Call("find_phone", f'{{"name":"{name}"}}')
    answer = f"The phone number of {name} is {number}."
    return Job(tool, draw.pick(PHONE_ASKS).format(name), call, f"The phone number of {name}", result, answer, number)


JOBS: tuple[Callable[[Draw], Job], ...] = (weather, clock, money, reminder, message, phone)


def called(draw: Draw, job: Job, first: int) -> Lesson:
    return Lesson((Exchange(job.user, job.steps(draw)),), (job.tool,), first=first)


def tool_error(draw: Draw, first: int) -> Lesson:
    """The tool reports an error: the answer names it."""
    job, error = draw.pick(JOBS)(draw), draw.pick(ERRORS)
    call, _ = job.steps(draw)
    result = _json(draw, error=error) if draw.chance(0.8) else f"Error: {error}"
    final = f"Sorry, the tool failed: {error}."
    answer = Step(
        draw.think(None, f"An error: {error}.", f"The tool answered with an error: {error}. I tell the user."), final
    )
    steps = (Step(call.analysis, call=call.call, result=result), answer)
    return Lesson((Exchange(job.user, steps),), (job.tool,), first=first)


def weather_two(draw: Draw, first: int) -> Lesson:
    """Two cities in one question: two calls, one answer."""
    one, two = draw.two(draw.name)
    jobs = weather(draw, one), weather(draw, two)
    tool = jobs[0].tool
    calls = []
    for job, city, note in ((jobs[0], one, "First"), (jobs[1], two, "Now")):
        call = Call("get_weather", f'{{"{tool.params[0].name}":"{city}"}}')
        think = f"{note} the weather in {city}. I call get_weather."
        calls.append(
            Step(
                draw.think(f"{note} the weather in {city}.", think, f"Two cities: {one} and {two}. {think}"),
                call=call,
                result=job.result,
            )
        )
    final = f"It is {jobs[0].reading} in {one} and {jobs[1].reading} in {two}."
    reading = f"The results: {jobs[0].reading} in {one}, {jobs[1].reading} in {two}."
    answer = Step(draw.think(None, reading, f"I have both. {reading} I tell the user."), final)
    ask = draw.pick(("What is the weather in {} and {}?", "How is the weather in {} and {}?", "Weather in {} and {}?",
                     "Compare the weather in {} and {}."))  # fmt: skip
    return Lesson((Exchange(ask.format(one, two), (*calls, answer)),), (tool,), first=first)


def no_tool(draw: Draw) -> Lesson:
    """A request whose tool is not declared."""
    kind = draw.pick((weather, weather, clock, money, reminder, message, phone))
    job = kind(draw)
    while job.user.endswith("?") and len(job.user.split()) == 1:
        job = kind(draw)
    thing = {
        "get_weather": "the weather", "get_time": "the time", "convert_currency": "money", "set_reminder": "reminders",
        "send_message": "messages", "find_phone": "phone numbers",
    }[job.tool.name]  # fmt: skip
    high = f"The user asks about {thing}. There is no tool for it. I say so."
    answer = draw.answer(job.user, f"Sorry, I have no tool for {thing}.", None, f"There is no tool for {thing}.", high)
    return Lesson((answer,), dressed=False)
