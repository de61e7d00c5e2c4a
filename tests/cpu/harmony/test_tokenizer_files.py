"""The Hugging Face files load, encode as openai-harmony does, and their chat template equals render_chat."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_trt.build_engine import tokenizer_files, vocabulary
from gptoss_trt.runtime.harmony import Tokenizer, render_chat
from gptoss_trt.runtime.harmony.library import harmony_encoding

# ruff: noqa: E501 -- the corpus has long lines
CORPUS = [
    "The quick brown fox jumps over the lazy dog's back; it's 12,345.67 m away, isn't it? HTTPServer2Client camelCase",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Straßenverkehrsordnung, Übergrößenträger!",
    "Dès Noël, où un zéphyr haï me vêt de glaçons würmiens, je dîne d'exquis rôtis de bœuf au kir à l'aÿ d'âge mûr.",
    "El veloz murciélago hindú comía feliz cardillo y kiwi. ¿Qué? ¡Ñandú! À noite, vovô Kowalsky vê o ímã cair.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Чуєш їх, доцю, га?",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία. נועה צפרדע קטנה שותה מים. نص حكيم له سر قاطع وذو شأن عظيم",
    "いろはにほへと ちりぬるを。東京都千代田区、ﾊﾝｶｸ 漢字かな交じり文。我能吞下玻璃而不伤身体。나는 유리를 먹을 수 있어요.",
    "मैं काँच खा सकता हूँ। আমি কাচ খেতে পারি। நான் கண்ணாடி சாப்பிடுவேன். ฉันกินกระจกได้ Tôi có thể ăn thủy tinh",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇳🇴 ☕️ 1️⃣ ✈︎ e\u0301 ﬁ Ａ ½ ² ① Ⅷ",
    'def f(x: int) -> str:\n\treturn f"{x!r:>10}"  # 0xFF\n\n\nclass A(B):\n    pass\r\n\r\n',
    'SELECT * FROM "t" WHERE a <> \'b\' AND c LIKE "%d_"; -- x\n{"k": [1, 2.5e-3, null, true]}\n<div class="a">&nbsp;</div>',
    "int main(void){for(int i=0;i<10;++i)printf(\"%d\\n\",i);} // /* */ #include <a/b.h>\n$ ls -la | grep 'x' && echo $HOME",
    "   leading   inner \t tabs\t\t\n\n\n   \n trailing   ",
    "\x00\x01\x7f\x85\xa0\u1680\u180e\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\u200d",
    "a" * 300 + "ÀÉ" * 60 + "!" * 90 + "123456789" * 12 + "don'T WE'LL I'Ve",
    "https://example.org/a/b?c=d&e=%20#f user@example.org C:\\dir\\file.txt ../x/./y",
]
MARKED = "<|start|>system<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>é<|return|><|reserved_200500|><|call"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("tokenizer")
    start = time.process_time()
    paths = tokenizer_files.write_tokenizer_files(target / "new")
    assert time.process_time() - start < 20  # about 3 s alone on one core
    assert sorted(path.name for path in paths) == sorted(path.name for path in (target / "new").iterdir())
    return target / "new"


@pytest.fixture(scope="session")
def fast(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def test_sizes(fast):
    assert len(fast) == vocabulary.VOCABULARY_SIZE
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (199998, 200002, 199999)
    assert fast.model_max_length == 131_072


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_corpus_encodes_as_openai_harmony_does(text, fast):
    ids = fast.encode(text, add_special_tokens=False)
    assert ids == harmony_encoding().encode(text, disallowed_special=()) == Tokenizer.load().encode_ordinary(text)
    assert fast.decode(ids) == text


def test_tokenizers_library_loads_the_file(folder):
    from tokenizers import Tokenizer as FastTokenizer

    loaded = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    assert loaded.encode(MARKED).ids == harmony_encoding().encode(MARKED, allowed_special="all")
    assert loaded.get_vocab_size() == vocabulary.VOCABULARY_SIZE


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_encodes_as_tiktoken_does(text, fast):
    assert fast.encode(text, add_special_tokens=False) == Tokenizer.load().encode(text)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city.\nIn degrees.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city\nand country", "examples": ["Oslo"]},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
                "my-key": {"const": 1},
                "level": {"type": "integer", "enum": [1, 2]},
                "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
                "any": {},
                "list": {"type": "array"},
                "free": {"type": "object"},
            },
            "required": ["city"],
            "description": "Where\nand when",
        },
    },
}
PLAIN = {"type": "function", "function": {"name": "now"}}
LOOP = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Os"}, {"type": "text", "text": "lo?"}]},
    {"role": "assistant", "reasoning": "old", "content": "Yes."},
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant",
        "reasoning": "need it",
        "content": "I look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"t":3}'},
]


@pytest.mark.parametrize("tools", [None, [WEATHER, PLAIN]])
@pytest.mark.parametrize("length", range(1, len(LOOP) + 1))
def test_chat_template_equals_render_chat(tools, length, fast):
    ids = fast.apply_chat_template(
        LOOP[:length], tools=tools, add_generation_prompt=True, current_date="2025-06-28", return_dict=False
    )
    request = {"messages": LOOP[:length], "tools": tools or []}
    tokenizer = Tokenizer.load()
    assert tokenizer.decode(ids) == tokenizer.decode(render_chat(request, current_date="2025-06-28"))
    assert ids == render_chat(request, current_date="2025-06-28")


def test_template_takes_effort_and_refuses_what_it_cannot_say(fast):
    text = fast.apply_chat_template(LOOP[:2], tokenize=False, reasoning_effort="high", current_date="2025-06-28")
    assert "Reasoning: high" in text
    assert not text.endswith("<|start|>assistant")
    with pytest.raises(Exception, match="tool message needs"):
        fast.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
    with pytest.raises(Exception, match="role robot"):
        fast.apply_chat_template([{"role": "robot", "content": "x"}], tokenize=False)


def test_files_are_the_same_every_time(folder, tmp_path):
    for path in tokenizer_files.write_tokenizer_files(tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    assert json.loads((folder / "special_tokens_map.json").read_text())["eos_token"] == "<|return|>"
