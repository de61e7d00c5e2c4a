"""Vocabulary, tokenizer, incremental text and stop strings."""

from __future__ import annotations

import gzip
import itertools
import os
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_trt.build_engine import vocabulary
from gptoss_trt.runtime.harmony import StopMatcher, TextStream, Tokenizer
from gptoss_trt.runtime.harmony.library import harmony_encoding

TOKENIZER = Tokenizer.load()
TEXTS = (
    "",
    "Hello world",
    "naïve café",
    "日本語 テスト",
    "😀👩‍👩‍👧‍👦",
    "def f(x):\n\treturn x**2\n",
    "\x00\x1f",
    "  \n\n ",
)


def chunked(items: list, cuts: list[int]) -> list[list]:
    edges = [0, *sorted(min(cut, len(items)) for cut in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def test_special_table_covers_every_id_above_the_ordinary_ones():
    assert sorted(vocabulary.SPECIAL_TOKENS.values()) == list(range(199_998, 201_088))
    assert len(vocabulary.load_ranks()) == vocabulary.ORDINARY_TOKENS


def test_ranks_are_the_ranks_of_the_file():
    lines = vocabulary.read_vocabulary().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines)))


def test_every_special_text_encodes_to_its_id():
    text = "".join(vocabulary.SPECIAL_TOKENS)
    assert TOKENIZER.encode(text) == list(vocabulary.SPECIAL_TOKENS.values())
    assert not TOKENIZER.special_ids & set(TOKENIZER.encode_ordinary(text))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text):
    ids = TOKENIZER.encode_ordinary(text)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text == TOKENIZER.decode(ids)


def test_lone_surrogate_becomes_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode_ordinary("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("token_id", [-1, 201_088, 10**9])
def test_ids_outside_the_vocabulary_are_named(token_id):
    for use in (TOKENIZER.token_bytes, lambda number: TextStream().push([number])):
        with pytest.raises(ValueError, match=rf"{token_id} is outside the vocabulary \(0 to 201087\)"):
            use(token_id)


def test_damaged_vocabulary_is_refused(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(vocabulary.resources, "files", lambda _: tmp_path)
    with pytest.raises(vocabulary.VocabularyError, match="missing"):
        vocabulary.read_vocabulary()
    path = tmp_path / "data" / "o200k_base.tiktoken.gz"
    path.write_bytes(gzip.compress(b"IQ== 0\n"))
    with pytest.raises(vocabulary.VocabularyError, match="sha256 is"):
        vocabulary.read_vocabulary()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(vocabulary.VocabularyError, match="decompressed"):
        vocabulary.read_vocabulary()


def test_cache_is_repaired_and_a_named_folder_respected(tmp_path, monkeypatch):
    monkeypatch.delenv(vocabulary.TIKTOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = vocabulary.ensure_tiktoken_dir()
    assert folder.is_relative_to(tmp_path)
    (folder / vocabulary.FILE_NAME).write_bytes(b"broken")
    assert vocabulary.ensure_tiktoken_dir() == folder
    assert (folder / vocabulary.FILE_NAME).read_bytes() == vocabulary.read_vocabulary()
    assert [path.name for path in folder.iterdir()] == [vocabulary.FILE_NAME]
    monkeypatch.setenv(vocabulary.TIKTOKEN_VARIABLE, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert vocabulary.ensure_tiktoken_dir() == folder


def test_next_cache_folder_is_taken_when_one_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.delenv(vocabulary.TIKTOKEN_VARIABLE, raising=False)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert vocabulary.ensure_tiktoken_dir().is_relative_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(vocabulary.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(vocabulary.VocabularyError, match="tried"):
        vocabulary.ensure_tiktoken_dir()


def test_loads_offline_within_two_seconds():
    script = textwrap.dedent("""
        import os, socket, time
        def refuse(*args, **kwargs):
            raise AssertionError("network touched")
        socket.socket.connect = refuse
        start = time.process_time()
        from gptoss_trt.runtime.harmony import Tokenizer
        ids = Tokenizer.load().encode("hi<|end|>")
        assert ids[-1] == 200007 and Tokenizer.load() is Tokenizer.load()
        print(time.process_time() - start)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0


def test_openai_harmony_reads_the_cache_folder_offline_and_encodes_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(vocabulary.TIKTOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    encoding = harmony_encoding()
    assert vocabulary.TIKTOKEN_VARIABLE not in os.environ
    for text in (*TEXTS, "".join(vocabulary.SPECIAL_TOKENS)):
        assert TOKENIZER.encode_ordinary(text) == encoding.encode(text, disallowed_special=())
        assert TOKENIZER.encode(text) == encoding.encode(text, allowed_special="all")


@pytest.mark.parametrize("text", ["a", " ", "\n", "^", "1", "日"])
def test_time_is_not_quadratic_in_a_run_of_one_character(text):
    start = time.process_time()
    assert TOKENIZER.encode_ordinary(text * 100_000)
    assert time.process_time() - start < 2.0


ids_strategy = st.lists(
    st.one_of(
        st.integers(0, 255),  # single bytes, most of them no character alone
        st.integers(0, 201_087),
        st.sampled_from(sorted(TOKENIZER.special_ids)[:16]),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(ids=ids_strategy, cuts=st.lists(st.integers(0, 40), max_size=6), skip=st.booleans())
def test_text_is_the_same_for_any_chunking(ids, cuts, skip):
    whole = TextStream(skip)
    expected = whole.push(ids) + whole.finish()
    stream = TextStream(skip)
    parts = [stream.push(chunk) for chunk in chunked(ids, cuts)]
    assert "".join(parts) + stream.finish() == expected
    singles = TextStream(skip)
    assert "".join(singles.push([number]) for number in ids) + singles.finish() == expected
    if skip:
        runs: list[list[bytes]] = [[]]
        for number in ids:
            if number in TOKENIZER.special_ids:
                runs.append([])
            else:
                runs[-1].append(TOKENIZER.token_bytes(number))
        assert expected == "".join(b"".join(run).decode("utf-8", "replace") for run in runs)


def test_characters_come_out_whole():
    stream = TextStream()
    ids = [TOKENIZER.encode_ordinary("x")[0], *(vocabulary.token_bytes().index(bytes([b])) for b in "😀".encode())]
    assert [stream.push([number]) for number in ids] == ["x", "", "", "", "😀"]
    assert stream.finish() == ""
    cut = TextStream()
    assert cut.push(ids[:3]) == "x"
    assert cut.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        ([], "abc", "abc", None),
        (["b"], "abc", "a", "b"),
        (["bc", "abcd"], "xabcd", "xa", "bc"),
        (["abcd", "bcd"], "xabcd", "x", "abcd"),
        (["aab"], "aaab", "a", "aab"),
        (["END"], "the EN", "the EN", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["é"], "café!", "caf", "é"),
    ],
)
def test_stop_strings(stops, text, shown, matched):
    for size in (1, 2, 3, len(text)):
        matcher = StopMatcher(stops)
        out = ""
        for start in range(0, len(text), size):
            out += matcher.push(text[start : start + size])[0]
        assert (out + matcher.finish(), matcher.matched) == (shown, matched)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_stop_matching_against_its_definition(text, stops, cuts, include):
    ends = [(end, end - len(s), s) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
    end, start, _ = min(ends, default=(len(text), len(text), None))
    matcher = StopMatcher(stops, include_stop=include)
    seen = shown = ""
    for chunk in chunked(list(text), cuts):
        if matcher.matched is None:
            seen += "".join(chunk)
        out, matched = matcher.push("".join(chunk))
        shown += out
        held = seen[len(shown) :]
        if matched is None:
            assert held == "" or any(s.startswith(held) for s in stops)
    assert shown + matcher.finish() == text[: end if include else start]


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
