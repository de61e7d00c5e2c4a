"""The engine option `deterministic`: a token has the same bits in any company and however its prompt was cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from test_long_decode import BLOCK_TOKENS, Text, on_card

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.model import GptOssModel, GraphedModel
from gptoss_trt.runtime.model.loader import random_weights

OPS = torch.ops.gptoss_trt
LENGTH = 300
LONG = 5000  # keys: the library cuts them every 4,096
COMPANY = (1, 3, 9, 33, 64)


@pytest.fixture(scope="module", params=["bf16", "fp8_block128"])
def model(request: pytest.FixtureRequest) -> Iterator[GraphedModel]:
    device = torch.device("cuda")
    dispatch.be_invariant(True)
    weights = random_weights(model_config("gpt-oss-20b", 2), Formats(dense=request.param), 5, device)
    yield GraphedModel(GptOssModel(weights, device))
    dispatch.be_invariant(False)


def some(text: Text, sequences: int) -> Text:
    """The first `sequences` of a text."""
    return Text(text.ids[:sequences], text.prompts[:sequences], text.table[:sequences])


def read(model: GraphedModel, text: Text, begins: list[int], ends: list[int], rows: list[int]) -> torch.Tensor:
    return model.model.forward(on_card(text.piece(begins, ends, rows)))


def test_a_prompt_in_one_piece_in_chunks_and_among_others(model: GraphedModel) -> None:
    text = Text.random((1,) * 6, LENGTH - 1)
    model.allocate_kv(text.table.numel(), text.table.numel(), BLOCK_TOKENS)
    alone = some(text, 1)
    whole = read(model, alone, [0], [LENGTH], [0]).clone()
    for cuts in ((0, 17, 18, 200, LENGTH), (0, 128, LENGTH), (0, LENGTH - 1, LENGTH)):
        for begin, end in itertools.pairwise(cuts):
            part = read(model, alone, [begin], [end], [begin])
            assert torch.equal(part, whole[begin:end]), (cuts, begin)
    ends = [LENGTH, 5, 129, 64, LENGTH, 1]
    together = read(model, text, [0] * 6, ends, [0] * 6)
    assert torch.equal(together[:LENGTH], whole)


def test_token_by_token_in_any_company(model: GraphedModel) -> None:
    text = Text.random((1,) * max(COMPANY), LENGTH - 1)
    model.allocate_kv(text.table.numel(), text.table.numel(), BLOCK_TOKENS)
    whole = read(model, some(text, 1), [0], [LENGTH], [0]).clone()
    for sequence in range(1, max(COMPANY)):
        others = Text(text.ids[sequence:][:1], (1,), text.table[sequence:][:1])
        read(model, others, [0], [LENGTH], [LENGTH - 1])
    for sequences in COMPANY:
        for position in (1, 16, 17, 127, 128, 129, 200, LENGTH - 1):
            logits = model.forward(some(text, sequences).step(position - 1))
            assert torch.equal(logits[0], whole[position]), (sequences, position)


def test_long_contexts(model: GraphedModel) -> None:
    text = Text.random((1, 1, 1), LONG)
    model.allocate_kv(text.table.numel(), text.table.numel(), BLOCK_TOKENS)
    alone = some(text, 1)
    whole = read(model, alone, [0], [LONG + 1], [LONG - 3]).clone()
    last = model.model.forward(on_card(alone.piece([0], [LONG + 1], [LONG])), ends_only=True)
    assert torch.equal(last[0], whole[3])
    read(model, alone, [0], [2000], [1999])
    assert torch.equal(read(model, alone, [2000], [LONG + 1], [LONG - 3]), whole)
    for position in (LONG - 3, LONG):
        assert torch.equal(model.forward(alone.step(position - 1))[0], whole[position - LONG + 3])
        assert torch.equal(model.forward(text.step(position - 1))[0], whole[position - LONG + 3])


def test_without_the_option_rows_may_differ() -> None:
    """What the option is for: a product of one token goes to another kernel than that of 33, and rounds otherwise."""
    x = torch.randn(64, 2880, device="cuda").to(torch.bfloat16)
    weight = (torch.randn(5120, 2880, device="cuda") * 0.02).to(torch.bfloat16)

    def first_row(rows: int) -> torch.Tensor:
        out = torch.empty(rows, 5120, device="cuda")
        OPS.dense(x[:rows].contiguous(), weight, None, out)
        return out[0]

    before = dispatch.is_invariant()
    try:
        dispatch.be_invariant(False)
        assert not torch.equal(first_row(33), first_row(1))
        dispatch.be_invariant(True)
        assert all(torch.equal(first_row(rows), first_row(1)) for rows in (3, 9, 33, 64))
    finally:
        dispatch.be_invariant(before)
