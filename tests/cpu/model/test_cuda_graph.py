"""Decode graphs on a CPU, where the same steps run without capture: padding, buffers, drawing, which batches they
take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gptoss_trt.reference.sample import columns, sample
from gptoss_trt.runtime.model import GraphedModel, StepBatch, load_model
from gptoss_trt.runtime.model.cuda_graph import StepGraphs
from gptoss_trt.runtime.model.draw import NOT_FINITE, Draws
from gptoss_trt.runtime.model.graph_shapes import (
    GraphShape,
    graph_sizes,
    is_decode,
    padded_rows,
    padded_width,
)
from gptoss_trt.runtime.model.step_buffers import StepBuffers

CPU = torch.device("cpu")
BLOCKS = 12


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_batch(rows: int, context: int = 20, block_tokens: int = 16) -> StepBatch:
    blocks = -(-context // block_tokens)
    table = torch.arange(rows * blocks, dtype=torch.int32).reshape(rows, blocks)
    return StepBatch(
        token_ids=torch.arange(rows, dtype=torch.int32) * 7 + 3,
        positions=torch.full((rows,), context - 1, dtype=torch.int32),
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        full_blocks=table, window_blocks=table, window_first_block=torch.zeros(rows, dtype=torch.int32),
        logits_rows=torch.arange(rows, dtype=torch.int32),
    )  # fmt: skip


@pytest.fixture
def model(make_engine: Callable[..., Path]) -> GraphedModel:
    graphed = GraphedModel(load_model(make_engine()))
    graphed.allocate_kv(BLOCKS, BLOCKS, 16)
    for layer in range(graphed.config.num_layers):
        for part in graphed.model.kv(layer):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(layer)))
    return graphed


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (200, 200), (249, 256)])
def test_batches_are_padded_to_few_sizes(rows: int, padded: int) -> None:
    assert padded_rows(rows) == padded


@pytest.mark.parametrize(("blocks", "width"), [(1, 32), (8, 32), (33, 64), (64, 64), (129, 256)])
def test_tables_are_padded_to_powers_of_two(blocks: int, width: int) -> None:
    assert padded_width(blocks) == width


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_padding_changes_no_logits(model: GraphedModel, rows: int) -> None:
    batch = decode_batch(rows)
    want = model.model.forward(batch)
    assert torch.equal(model.forward(batch), want)
    graphs = model.graphs
    assert graphs is not None
    assert torch.equal(graphs.run_again()[:rows], want)
    assert graphs.last_work is None


def test_padding_writes_no_keys(model: GraphedModel) -> None:
    before = [part.clone() for layer in range(3) for part in model.model.kv(layer)]
    batch = decode_batch(3)
    model.decode(batch, [0.0] * 3, [0.0] * 3)
    used = set(batch.full_blocks.flatten().tolist())
    others = [block for block in range(BLOCKS) if block not in used]
    for old, new in zip(before, (part for layer in range(3) for part in model.model.kv(layer)), strict=True):
        assert torch.equal(old[others], new[others])


def test_tokens_are_those_of_the_logits(model: GraphedModel) -> None:
    batch = decode_batch(4)
    logits = model.forward(batch).clone()
    shares = [0.1, 0.5, 0.9, 0.99]
    tokens = model.decode(batch, [0.0, 1.0, 0.5, 2.0], shares)
    assert tokens[0] == int(logits[0].argmax())
    for row, temperature in ((1, 1.0), (2, 0.5), (3, 2.0)):
        running = (logits[row].double() / temperature).softmax(-1).cumsum(-1)
        want = int(torch.searchsorted(running, shares[row]))
        assert abs(tokens[row] - want) <= 1 and abs(float(running[tokens[row]]) - shares[row]) < 0.2


def test_a_shape_is_made_once(model: GraphedModel) -> None:
    graphs = model.graphs
    assert graphs is not None
    for rows in (3, 4, 3):
        model.decode(decode_batch(rows), [0.0] * rows, [0.0] * rows)
    assert len(graphs) == 1
    graphs.prepare(2, 3)
    assert len(graphs) == 2
    model.allocate_kv(BLOCKS, BLOCKS, 16)
    assert model.graphs is not graphs


def test_warming_makes_every_size(model: GraphedModel) -> None:
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert len(graph_sizes(256)) == 35 and graph_sizes(9999) == graph_sizes(256)
    assert model.warm(20) == 6
    assert model.graphs is not None and len(model.graphs) == 6
    model.decode(decode_batch(5), [0.0] * 5, [0.0] * 5)
    assert len(model.graphs) == 6


def test_a_prompt_is_no_decode_step() -> None:
    batch = decode_batch(2)
    assert is_decode(batch)
    assert not is_decode(replace(batch, logits_rows=ints([1])))
    prompt = replace(
        batch, token_ids=ints([1, 2, 3]), positions=ints([18, 19, 19]), query_start=ints([0, 2, 3]),
    )  # fmt: skip
    assert not is_decode(prompt)


def test_buffers_refuse_more_than_they_hold() -> None:
    buffers = StepBuffers(4, 8, 3, CPU)
    with pytest.raises(ValueError, match="5 sequences of 8 blocks; there is memory for 4 and 4 of 8"):
        buffers.shape(GraphShape(5, 5, 8))
    with pytest.raises(ValueError, match="16 blocks"):
        buffers.shape(GraphShape(1, 1, 16))
    with pytest.raises(ValueError):
        buffers.shape(GraphShape(2, 2, 8)).fill(decode_batch(3), Draws.greedy(3), 0)


def draws(temperature: list[float], share: list[float], source: list[int] | None = None) -> Draws:
    return Draws(
        np.array(temperature, np.float32),
        np.array(share, np.float32),
        None if source is None else np.array(source, np.int32),
    )


def test_rows_that_are_left_become_padding() -> None:
    shape = StepBuffers(2, 8, 3, CPU).shape(GraphShape(2, 2, 8))
    shape.fill(decode_batch(2), draws([0.7, 0.7], [0.1, 0.1]), 0)
    shape.fill(decode_batch(1), draws([0.5], [0.25]), 1)
    assert shape.batch.query_start.tolist() == [0, 1, 1]
    assert shape.batch.context_lens.tolist() == [20, 0]
    assert shape.batch.full_blocks[0].tolist() == [0, 1] + [-1] * 6
    assert shape.batch.full_blocks[1].tolist() == [-1] * 8
    assert shape.temperature.tolist() == [0.5, 0.0] and shape.share.tolist() == [0.25, 0.0]


def test_tokens_come_from_the_host_or_from_the_step_before() -> None:
    buffers = StepBuffers(4, 8, 3, CPU)
    buffers.drawn.copy_(ints([100, 101, 102, 103]))
    shape = buffers.shape(GraphShape(4, 4, 8))
    shape.fill(decode_batch(3), draws([0.0] * 3, [0.0] * 3, [2, -1, 0]), 0)
    assert shape.batch.token_ids.tolist()[:3] == [102, 10, 100]


def test_a_step_launched_ahead_gives_what_it_gives_in_series(model: GraphedModel) -> None:
    """Rows change their places, one leaves, one comes from the host; then a mixed step behind a graph."""
    first, second = decode_batch(3), decode_batch(3, context=21)
    tokens = model.launch(first, draws([0.0, 1.0, 0.0], [0.0, 0.4, 0.0])).tokens()
    order = [2, 0]
    ids = [tokens[2], tokens[0], 9]
    pick = lambda table: torch.cat((table[order], ints([[8, 9]])))  # noqa: E731
    second.full_blocks, second.window_blocks = pick(second.full_blocks), pick(second.window_blocks)
    second.token_ids = ints(ids)
    chosen = draws([0.0, 0.0, 1.0], [0.0, 0.0, 0.5])
    want = model.launch(second, chosen).tokens()
    mixed = replace(
        second, token_ids=ints([want[1], 4, 5, want[0]]), positions=ints([21, 21, 22, 21]),
        query_start=ints([0, 1, 3, 4]), context_lens=ints([22, 23, 22]), logits_rows=ints([0, 2, 3]),
        full_blocks=second.full_blocks[[1, 2, 0]], window_blocks=second.window_blocks[[1, 2, 0]],
    )  # fmt: skip
    last = model.launch(mixed, chosen).tokens()

    launched = model.launch(first, draws([0.0, 1.0, 0.0], [0.0, 0.4, 0.0]))
    second.token_ids = ints([0, 0, 9])
    ahead = model.launch(second, replace(chosen, source=np.array([2, 0, -1], np.int32)))
    assert launched.tokens() == tokens
    mixed.token_ids = ints([0, 4, 5, 0])
    further = model.launch(mixed, replace(chosen, source=np.array([1, -1, -1, 0], np.int32)))
    assert ahead.tokens() == want
    assert further.tokens() == last


def test_a_row_that_is_not_finite_feeds_a_token_that_exists(model: GraphedModel) -> None:
    batch = decode_batch(2)
    _, v = model.model.kv(0)
    kept = v[batch.full_blocks[1, 0]].clone()
    v[batch.full_blocks[1, 0]] = float("nan")
    first = model.launch(batch, draws([1.0, 0.0], [0.5, 0.0]))
    second = model.launch(decode_batch(2, context=21), draws([0.0] * 2, [0.0] * 2, [0, 1]))
    v[batch.full_blocks[1, 0]] = kept
    assert first.tokens()[1] == second.tokens()[1] == NOT_FINITE and first.tokens()[0] >= 0


def test_a_step_that_draws_nothing_has_no_tokens(model: GraphedModel) -> None:
    batch = replace(decode_batch(2), logits_rows=ints([]))
    assert model.launch(batch, Draws.greedy(0)).tokens() == []


def test_a_step_before_any_is_an_error() -> None:
    graphs = StepGraphs(lambda batch: torch.zeros(len(batch.token_ids), 10), 10, 32, 3, CPU)
    with pytest.raises(RuntimeError, match="no step has run"):
        graphs.run_again()


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.randn(4, 700)
    logits[1, 5], logits[2, 6], logits[3, 7] = float("nan"), float("inf"), float("-inf")
    tokens = sample(logits, torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.full((4,), 0.3)).tolist()
    assert tokens[1] == tokens[2] == NOT_FINITE
    assert tokens[0] >= 0 and tokens[3] >= 0 and tokens[3] != 7


@pytest.mark.parametrize("width", [1, 200, 256, 700])
def test_columns_pass_the_share(width: int) -> None:
    weights = torch.rand(50, width, generator=torch.Generator().manual_seed(width))
    weights[:, ::3] = 0
    if width == 1:
        weights[:] = 1
    share = torch.rand(50, 1, generator=torch.Generator().manual_seed(1))
    share[0], share[1] = 0, 1 - 2**-24
    running = weights.double().cumsum(-1)
    got = columns(weights, share)
    assert bool((weights.gather(1, got) > 0).all()), "a column of no weight was drawn"
    target = share.double() * running[:, -1:]
    slack = 1e-5 * running[:, -1:]
    assert bool((running.gather(1, got) >= target - slack).all())
    assert bool((running.gather(1, got) - weights.double().gather(1, got) <= target + slack).all())
