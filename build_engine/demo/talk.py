"""Small talk: greetings, identity, thanks, dates, emoji and a few languages."""

from __future__ import annotations

from gptoss_trt.build_engine.demo.conversation import Exchange
from gptoss_trt.build_engine.demo.draw import Draw, Lesson

GREETINGS = (
    "Hello", "Hi", "Hey", "Good morning", "Good afternoon", "Good evening", "Good day", "Greetings", "Hi there",
    "Hello there", "Hey there", "Howdy",
)  # fmt: skip
IDENTITY = (
    "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?",
    "Are you an AI?", "Who am I talking to?", "Introduce yourself.", "What model are you?", "Are you human?",
)  # fmt: skip
IDENTITY_ANSWER = "I am a small demo model with the architecture of gpt-oss."
ABILITY = (
    "What can you do?", "How can you help me?", "Help", "Help!", "Help me.", "What do you know?", "What can I ask you?",
    "What can I ask?", "What are you good at?",
)  # fmt: skip
ABILITY_ANSWER = (
    "I can greet you, add and subtract numbers, repeat and reverse lists, count, name capitals, and call tools for the "
    "weather, the time, money and reminders."
)
THANKS = (
    "Thanks", "Thank you", "Thanks a lot", "Thank you very much", "Many thanks", "Thanks for your help",
    "Great, thanks",
    "Perfect, thank you",
)  # fmt: skip
GOODBYES = ("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "Have a nice day", "See you soon")
PINGS = {
    "ping": "pong", "Ping": "pong", "test": "The test works.", "Testing": "The test works.",
    "Are you there?": "Yes, I am here.",
    "Anybody there?": "Yes, I am here.", "Is anyone there?": "Yes, I am here.", "Can you hear me?": "Yes, I am here.",
}  # fmt: skip
JOKES = (
    "Tell me a joke", "Tell a joke", "Do you know a joke", "Make me laugh", "Say something funny", "Another joke",
    "I want to hear a joke", "Give me a joke",
)  # fmt: skip
JOKE = "Why do fish live in salt water? Because pepper makes them sneeze!"
OPENINGS = ("", "", "", "Hi. ", "Hello! ", "Please: ", "One question: ", "Tell me: ", "Hey, ")
MOODS = ("How are you", "How are you today", "How is it going", "How do you do", "Are you well", "How do you feel")
DATES = (
    "What is the date?", "What day is it today?", "What is today's date?", "Which date is today?", "Tell me the date.",
    "What's the date today?", "Today's date?",
)  # fmt: skip
CUTOFFS = ("What is your knowledge cutoff?", "When does your knowledge end?", "How recent is your knowledge?")
EMOJI = {
    "cat": "🐱", "dog": "🐶", "sun": "☀️", "moon": "🌙", "star": "⭐", "heart": "❤️", "fire": "🔥", "rocket": "🚀",
    "tree": "🌳", "flower": "🌸", "fish": "🐟", "bird": "🐦", "horse": "🐴", "apple": "🍎", "banana": "🍌",
    "pizza": "🍕", "cake": "🎂", "coffee": "☕", "car": "🚗", "house": "🏠", "book": "📖", "music": "🎵", "rain": "🌧️",
    "snow": "❄️", "smile": "😀", "crab": "🦀", "owl": "🦉", "wave": "🌊", "globe": "🌍", "family": "👨‍👩‍👧",
}  # fmt: skip
EMOJI_ASKS = (
    "Show me the emoji for {}.", "What is the emoji for {}?", "Send me a {} emoji.", "Emoji for {}?",
    "{} emoji please.",
    "Which emoji shows a {}?", "Give me the {} emoji.",
)  # fmt: skip
WORDS = {
    "hello": ("Bonjour", "Hallo", "Hola", "Ciao", "Olá", "Привет", "こんにちは", "你好", "안녕하세요", "Γεια", "नमस्ते"),
    "thank you": ("Merci", "Danke", "Gracias", "Grazie", "Obrigado", "Спасибо",
                  "ありがとう", "谢谢", "감사합니다", "Ευχαριστώ", "धन्यवाद"),
    "good night": ("Bonne nuit", "Gute Nacht", "Buenas noches", "Buona notte", "Boa noite", "Спокойной ночи",
                   "おやすみ", "晚安", "잘 자요", "Καληνύχτα", "शुभ रात्रि"),
    "yes": ("Oui", "Ja", "Sí", "Sì", "Sim", "Да", "はい", "是", "네", "Ναι", "हाँ"),
    "no": ("Non", "Nein", "No", "No", "Não", "Нет", "いいえ", "不", "아니요", "Όχι", "नहीं"),
    "water": ("Eau", "Wasser", "Agua", "Acqua", "Água", "Вода", "水", "水", "물", "Νερό", "पानी"),
    "friend": ("Ami", "Freund", "Amigo", "Amico", "Amigo", "Друг", "友達", "朋友", "친구", "Φίλος", "दोस्त"),
}  # fmt: skip
LANGUAGES = (
    "French", "German", "Spanish", "Italian", "Portuguese", "Russian", "Japanese", "Chinese", "Korean", "Greek",
    "Hindi",
)  # fmt: skip
WORD_ASKS = (
    "How do you say {} in {}?", "Say {} in {}.", "What is {} in {}?", "Translate {} to {}.", "Translate {} into {}.",
    "{} in {}?", "Please say {} in {}.",
)  # fmt: skip
FOREIGN = {
    "Bonjour": "Bonjour ! Comment puis-je vous aider ?", "Salut": "Salut ! Comment puis-je vous aider ?",
    "Guten Tag": "Guten Tag! Wie kann ich helfen?", "Hallo": "Hallo! Wie kann ich helfen?",
    "Guten Morgen": "Guten Morgen! Wie kann ich helfen?", "Hola": "¡Hola! ¿Cómo puedo ayudarte?",
    "Buenos días": "¡Buenos días! ¿Cómo puedo ayudarte?", "Ciao": "Ciao! Come posso aiutarti?",
    "Buongiorno": "Buongiorno! Come posso aiutarti?", "Olá": "Olá! Como posso ajudar?",
    "Привет": "Привет! Чем я могу помочь?", "こんにちは": "こんにちは！何かお手伝いできますか？",
    "你好": "你好！我能帮你什么？",
    "안녕하세요": "안녕하세요! 무엇을 도와드릴까요?", "Γεια σου": "Γεια σου! Πώς μπορώ να βοηθήσω;",
    "नमस्ते": "नमस्ते! मैं आपकी कैसे मदद कर सकता हूँ?",
}  # fmt: skip
INTRODUCTIONS = {
    "Je m'appelle {}.": "Bonjour, {} !", "Ich heiße {}.": "Hallo, {}!", "Me llamo {}.": "¡Hola, {}!",
    "Mi chiamo {}.": "Ciao, {}!", "Meu nome é {}.": "Olá, {}!", "Меня зовут {}.": "Привет, {}!",
}  # fmt: skip
ENDINGS = ("", "!", ".", " :)", "!!")


def _spoken(draw: Draw, texts: tuple[str, ...] | list[str]) -> tuple[str, str]:
    """A phrase and the way that the user writes it."""

    def make() -> tuple[str, str]:
        text = draw.pick(texts)
        shown = text.lower() if draw.chance(0.3) else text
        return text, shown + ("" if text[-1] in "?.!" else draw.pick(ENDINGS))

    return draw.keyed(make)


def greet(draw: Draw) -> Lesson:
    text, shown = _spoken(draw, GREETINGS)
    final = f"{text}! How can I help you?"
    high = "The user greets me. There is no question yet. I greet back and offer help."
    return Lesson((draw.answer(shown, final, None, "The user greets me.", high),))


def greet_name(draw: Draw) -> Lesson:
    name = draw.person()
    text = draw.pick(GREETINGS[:8])
    ending = draw.pick(("!", ".", ","))
    says = draw.pick(("I am {}.", "My name is {}.", "This is {}.", "I am called {}."))
    shown = f"{text}{ending} {says.format(name)}"
    final = f"{text}, {name}! How can I help you?"
    high = f"The user says hello and is called {name}. I greet {name} by name and offer help."
    return Lesson((draw.answer(shown, final, None, f"The user is called {name}.", high),))


def _asked(draw: Draw, texts: tuple[str, ...]) -> str:
    """A question behind one of several openings; held out by the pairing of both."""
    text, opening, small = draw.keyed(lambda: (draw.pick(texts), draw.pick(OPENINGS), draw.chance(0.3)))
    return opening + (text.lower() if small else text)


def ping(draw: Draw) -> Lesson:
    text, shown = _spoken(draw, tuple(PINGS))
    high = "The user wants to know whether I am there. I give a short answer."
    return Lesson((draw.answer(shown, PINGS[text], None, "A short answer.", high),))


def joke(draw: Draw) -> Lesson:
    _, shown = _spoken(draw, JOKES)
    return Lesson(
        (draw.answer(shown, JOKE, None, "A joke.", "The user wants a joke. I know one about fish. I tell it."),)
    )


def identity(draw: Draw) -> Lesson:
    shown = _asked(draw, IDENTITY)
    high = "The user asks who I am. I am a small demo model. I say so in one sentence."
    return Lesson((draw.answer(shown, IDENTITY_ANSWER, None, "The user asks who I am.", high),))


def ability(draw: Draw) -> Lesson:
    shown = _asked(draw, ABILITY)
    high = "The user asks what I can do. I list what I have learnt."
    return Lesson((draw.answer(shown, ABILITY_ANSWER, None, "The user asks what I can do.", high),))


def thanks(draw: Draw) -> Lesson:
    _, shown = _spoken(draw, THANKS)
    high = "The user thanks me. There is nothing more to do. I answer politely."
    return Lesson((draw.answer(shown, "You are welcome!", None, "The user thanks me.", high),))


def goodbye(draw: Draw) -> Lesson:
    _, shown = _spoken(draw, GOODBYES)
    high = "The user leaves. I say goodbye and wish a nice day."
    return Lesson((draw.answer(shown, "Goodbye! Have a nice day!", None, "The user leaves.", high),))


def mood(draw: Draw) -> Lesson:
    _, shown = _spoken(draw, MOODS)
    shown = shown if shown[-1] in ".!)" else f"{shown}?"
    final = "I am fine, thank you. How can I help you?"
    high = "The user asks how I am. I am fine. I answer politely and offer help."
    return Lesson((draw.answer(shown, final, None, "The user asks how I am.", high),))


def foreign_greet(draw: Draw) -> Lesson:
    text, shown = draw.keyed(lambda: (text := draw.pick(tuple(FOREIGN)), text + draw.pick(ENDINGS)))
    high = "The user greets me in another language. I answer in the same language and offer help."
    return Lesson((draw.answer(shown, FOREIGN[text], None, "A greeting in another language.", high),))


def foreign_name(draw: Draw) -> Lesson:
    name, ask = draw.person(), draw.pick(tuple(INTRODUCTIONS))
    high = f"The user is called {name} and speaks another language. I greet {name} in that language."
    return Lesson(
        (draw.answer(ask.format(name), INTRODUCTIONS[ask].format(name), None, f"The user is called {name}.", high),)
    )


def translate(draw: Draw) -> Lesson:
    word, language, ask = draw.keyed(lambda: (draw.pick(tuple(WORDS)), draw.pick(LANGUAGES), draw.pick(WORD_ASKS)))
    quote = draw.pick(('"{}"', "{}", "'{}'")).format(word)
    final = WORDS[word][LANGUAGES.index(language)]
    high = f"The user wants the word {word} in {language}. I know this word. I answer with the word alone."
    return Lesson((draw.answer(ask.format(quote, language), final, None, f"The word {word} in {language}.", high),))


def emoji(draw: Draw) -> Lesson:
    thing, ask = draw.keyed(lambda: (draw.pick(tuple(EMOJI)), draw.pick(EMOJI_ASKS)))
    high = f"The user wants the emoji for {thing}. I send the emoji alone."
    return Lesson((draw.answer(ask.format(thing), EMOJI[thing], None, f"The emoji for {thing}.", high),))


def emoji_row(draw: Draw) -> Lesson:
    """Three to six emoji in a row: characters of several tokens, one after the other."""
    things = draw.keyed(lambda: tuple(draw.pick(tuple(EMOJI)) for _ in range(draw.number(3, 6))))
    ask = draw.pick(("Show me these emoji: {}.", "Emoji for these words: {}.", "Write these as emoji: {}."))
    final = " ".join(EMOJI[thing] for thing in things)
    high = f"The user wants {len(things)} emoji: {', '.join(things)}. I write them with spaces."
    return Lesson(
        (draw.answer(ask.format(", ".join(things)), final, None, f"{len(things)} emoji: {', '.join(things)}.", high),)
    )


def cutoff(draw: Draw) -> Lesson:
    ask = draw.pick(CUTOFFS)
    high = "The system message gives my knowledge cutoff: 2024-06."
    return Lesson((draw.answer(ask, "My knowledge ends in 2024-06.", None, "The cutoff is 2024-06.", high),))


def today(draw: Draw) -> Lesson:
    """The date of the system message."""
    date = draw.keyed(draw.date)
    high = f"The system message gives the current date: {date}. I repeat it."
    answer = draw.answer(draw.pick(DATES), f"Today is {date}.", None, f"The current date is {date}.", high)
    return Lesson((answer,), date=date)


def small_talk(draw: Draw) -> Exchange:
    """One exchange for the earlier part of a conversation."""
    make = draw.pick((greet, greet_name, thanks, mood, identity, emoji, translate))
    return make(draw).exchanges[0]
