"""The generated conversations: the server's prompts, right arithmetic, and nothing held out in training."""

from __future__ import annotations

import random
import re

import pytest

from gptoss_trt.build_engine.demo import arithmetic
from gptoss_trt.build_engine.demo.answer import Visible, expected, visible
from gptoss_trt.build_engine.demo.codec import SPECIAL_IDS, Codec
from gptoss_trt.build_engine.demo.conversation import pieces, request
from gptoss_trt.build_engine.demo.dataset import Encoder, Layout, Packer, document, prompt_ids
from gptoss_trt.build_engine.demo.draw import HELD_SHARE, Draw
from gptoss_trt.build_engine.demo.kinds import KINDS, random_kind, sample
from gptoss_trt.build_engine.demo.names import CUT_CITIES, HELD_OUT_CITIES, NamePool, hash_share, is_held_out
from gptoss_trt.runtime.harmony import render_chat


@pytest.mark.parametrize("name", KINDS)
def test_prompt_is_what_the_server_renders(name: str, codec: Codec, pool: NamePool) -> None:
    for seed in range(4):
        chat = sample(KINDS[name], seed, pool, held=seed % 2 == 0)
        theirs = render_chat(request(chat), current_date=chat.date)
        assert codec.decode(prompt_ids(chat, codec)) == codec.decode(theirs)
        if chat.noise is None:  # its instructions are encoded apart, so a token may be cut elsewhere
            assert prompt_ids(chat, codec) == theirs


@pytest.mark.parametrize("name", KINDS)
def test_samples_fit_repeat_and_parse(name: str, codec: Codec, pool: NamePool) -> None:
    for seed in range(3):
        chat = sample(KINDS[name], seed, pool, held=True)
        assert chat == sample(KINDS[name], seed, pool, held=True)
        doc = document(chat, codec, target_only=True)
        assert len(doc.ids) <= Layout.tokens + 64
        written = doc.ids[doc.learn.index(True) :]
        assert visible(written, codec) == expected(chat.target)


def test_every_equation_is_right(pool: NamePool) -> None:
    checked = 0
    for name in ("sum", "sum_three_digits", "difference", "product", "sum_list", "story_sum", "follow_sum"):
        for seed in range(60):
            for piece in pieces(sample(KINDS[name], seed, pool, held=False)):
                if piece.special or not piece.learn:
                    continue
                for a, sign, b, c in re.findall(r"(?<![+x-] )\b(\d+) ([+x-]) (\d+) = (\d+)", piece.text):
                    value = {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[sign]
                    assert value == int(c), piece.text
                    assert value < 1000
                    checked += 1
    assert checked > 1000


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (17, 25, "10 + 20 = 30, 7 + 5 = 12, 30 + 12 = 42"),
        (3, 4, "3 + 4 = 7"),
        (345, 278, "300 + 200 = 500, 40 + 70 = 110, 5 + 8 = 13, 500 + 110 = 610, 610 + 13 = 623"),
        (0, 0, "0 + 0 = 0"),
    ],
)
def test_sum_steps(a: int, b: int, steps: str) -> None:
    assert arithmetic.sum_steps(a, b) == steps


def test_training_holds_no_held_out_name_or_pair(pool: NamePool) -> None:
    rng = random.Random(3)
    words: set[str] = set()
    for seed in range(1500):
        chat = sample(random_kind(rng), seed, pool, held=False)
        words.update(re.findall(r"[A-Z][a-z]+", " ".join(piece.text for piece in pieces(chat))))
        if chat.exchanges[-1].user.startswith("What is the sum of") and "," not in chat.exchanges[-1].user:
            pair = tuple(int(number) for number in re.findall(r"\d+", chat.exchanges[-1].user))
            assert hash_share(f"key sum {pair}") >= HELD_SHARE
    assert not words & set(HELD_OUT_CITIES)
    assert len(words & set(CUT_CITIES)) > 50


def test_held_out_samples_hold_held_out_names(pool: NamePool) -> None:
    for seed in range(50):
        made, real = (Draw(random.Random(seed), pool, True, names).name() for names in ("made", "real"))
        assert is_held_out(made) and made not in CUT_CITIES
        assert real in HELD_OUT_CITIES


def test_names_are_cut_into_pool_pieces(codec: Codec, pool: NamePool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        name = pool.make(rng)
        bare, spaced = codec.pieces(name), codec.pieces(f" {name}")
        assert bare[0] in pool.firsts and set(bare[1:]) <= set(pool.tails)
        assert spaced == [f" {bare[0]}", *bare[1:]]


def test_a_step_cut_short_is_visible_as_it_is(codec: Codec) -> None:
    assert visible(codec.encode("nothing special"), codec) == Visible("", "nothing special")


def test_the_end_of_an_earlier_answer_is_never_learnt(codec: Codec, pool: NamePool) -> None:
    chat = sample(KINDS["follow_name"], 0, pool, held=False)
    doc = document(chat, codec)
    quiet = [doc.ids[index] for index, flag in enumerate(doc.quiet) if flag]
    assert quiet == [SPECIAL_IDS["end"]] * (len(chat.exchanges) - 1)
    used = sorted(set(doc.ids))
    rows, flags = Encoder(used, 16, 0).encode(chat) or pytest.fail("all ids are used")
    layout = Layout(rows=1, tokens=512, learnt=512, bank=16)
    batch = Packer(layout, 0).batch([[(rows, flags)]])
    learnt = set((batch["where"][batch["weights"] > 0] + 1).tolist())
    assert learnt == {index for index in range(1, len(doc.ids)) if not doc.quiet[index]}
