"""Graphs of prompts and mixed steps on a CPU, where the same steps run without capture: which graph serves a step, its
padding, what it leaves for the step behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptoss_trt.ops import dispatch, ops
from gptoss_trt.runtime.model import GraphedModel, StepBatch, layers, load_model
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import (
    MAX_ROWS,
    MOST_PADDED,
    MOST_PROMPT_TOKENS,
    GraphShape,
    is_ends_only,
    padded_tokens,
    prompt_size,
    prompt_sizes,
)
from gptoss_trt.runtime.model.step_buffers import StepBuffers
from gptoss_trt.runtime.model.taps import FeatureTap

CPU = torch.device("cpu")
BLOCKS, BLOCK_TOKENS, WIDTH = 40, 16, 8


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(counts: Sequence[int], before: Sequence[int], wanted: Sequence[int] | None = None) -> StepBatch:
    """`counts` new tokens for sequences that have `before` keys each, on blocks of their own; logits of the last token
    of the sequences `wanted` (default: all)."""
    sequences = len(counts)
    starts = np.cumsum([0, *counts])
    table = torch.arange(sequences * WIDTH, dtype=torch.int32).reshape(sequences, WIDTH)
    positions = np.concatenate([np.arange(b, b + c) for b, c in zip(before, counts, strict=True)])
    return StepBatch(
        token_ids=ints([(7 * i + 3) % 100 for i in range(starts[-1])]),
        positions=ints(positions),
        query_start=ints(starts),
        context_lens=ints([b + c for b, c in zip(before, counts, strict=True)]),
        full_blocks=table,
        window_blocks=table,
        window_first_block=torch.zeros(sequences, dtype=torch.int32),
        logits_rows=ints([int(starts[s + 1]) - 1 for s in (range(sequences) if wanted is None else wanted)]),
    )


@pytest.fixture(params=["all", "ends", "ends-apart"])
def model(
    request: pytest.FixtureRequest, make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> GraphedModel:
    """With "ends-apart" queries of last tokens have a product of their own in steps of any size."""
    if request.param == "ends-apart":
        monkeypatch.setattr(layers, "ENDS_APART_TOKENS", 1)
    graphed = GraphedModel(load_model(make_engine()))
    graphed.ends_only = request.param != "all"
    graphed.allocate_kv(BLOCKS, BLOCKS, BLOCK_TOKENS)
    fill_cache(graphed)
    return graphed


def fill_cache(model: GraphedModel) -> None:
    for layer in range(model.config.num_layers):
        for part in model.model.kv(layer):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(layer)))


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [(1, 128), (128, 128), (129, 256), (1000, 1024), (1025, 1280), (4000, 4096), (4096, 4096), (8100, 8192)],
)
def test_tokens_are_padded_to_few_sizes(tokens: int, padded: int) -> None:
    assert padded_tokens(tokens) == padded


@pytest.mark.parametrize(
    ("tokens", "sequences", "size"),
    [
        (2, 1, (128, 8)),
        (8, 8, (128, 8)),
        (1024, 1, (1024, 8)),
        (1024, 9, (1024, 64)),
        (70, 64, (128, 64)),
        (70, 65, (384, 256)),  # as many tokens as sequences would be a decode step
        (4096, 256, (4096, 256)),
        (4097, 1, None),  # padding would cost more than the graph gains
        (8063, 1, None),
        (8064, 1, (8192, 8)),
        (8192, 9, (8192, 64)),
        (8193, 1, None),
        (300, 257, None),
        (3, 0, None),
    ],
)
def test_which_graph_serves_a_step(tokens: int, sequences: int, size: tuple[int, int] | None) -> None:
    assert prompt_size(tokens, sequences) == size


def test_no_size_looks_like_a_decode_step() -> None:
    for sequences in range(1, MAX_ROWS + 1):
        for tokens in range(sequences, MOST_PROMPT_TOKENS + 1, 61):
            size = prompt_size(tokens, sequences)
            assert size is not None or tokens > MOST_PADDED
            assert size is None or (size[0] >= tokens and size[1] >= sequences and size[0] > size[1])


def test_sizes_to_warm_serve_what_they_are_for() -> None:
    assert prompt_sizes(300, 1) == [(384, 8), (256, 8), (128, 8)]
    assert prompt_sizes(2048, 32)[:3] == [(2048, 64), (2048, 8), (1792, 64)]
    assert prompt_sizes(0, 32) == []
    assert prompt_sizes(8192, 1)[:3] == [(8192, 8), (4096, 8), (3840, 8)]
    assert prompt_sizes(8063, 1)[0] == (4096, 8)
    for most, number in ((1, 12), (32, 24), (256, 34)):
        made = prompt_sizes(2048, most)
        wanted = {prompt_size(tokens, count) for count in range(1, most + 1) for tokens in range(count, 2049, 3)}
        assert wanted == set(made) and len(made) == number


def test_warming_makes_them(model: GraphedModel) -> None:
    assert model.warm(2, 300) == 2 + 3
    graphs = model.graphs
    assert graphs is not None
    model.forward(batch_of([100, 100], [0, 0]))
    assert len(graphs) == 5
    graphs.prepare_prompts(5000, 1)  # none serves it
    assert len(graphs) == 5


STEPS = [
    batch_of([37], [0]),  # a prompt
    batch_of([30, 41], [0, 0]),
    batch_of([20], [50]),  # a chunk behind cached keys
    batch_of([1, 1, 25, 1], [60, 5, 3, 99]),  # among sequences that decode
    batch_of([1, 30, 9], [10, 0, 20], [0, 2]),  # a prompt that is not at its end yet
    batch_of([1, 1], [10, 20], [1]),
]


def by_hand(batch: StepBatch, tokens: int, sequences: int) -> StepBatch:
    """The batch with padding to so many tokens and sequences."""

    def more(values: torch.Tensor, size: int, fill: int = 0) -> torch.Tensor:
        out = values.new_full((size, *values.shape[1:]), fill)
        out[: len(values)] = values
        return out

    return StepBatch(
        token_ids=more(batch.token_ids, tokens),
        positions=more(batch.positions, tokens),
        query_start=more(batch.query_start, sequences + 1, int(batch.query_start[-1])),
        context_lens=more(batch.context_lens, sequences),
        full_blocks=more(batch.full_blocks, sequences, -1),
        window_blocks=more(batch.window_blocks, sequences, -1),
        window_first_block=more(batch.window_first_block, sequences),
        logits_rows=more(batch.logits_rows, sequences),
    )


@pytest.mark.parametrize("batch", STEPS)
def test_padding_changes_no_logits(model: GraphedModel, batch: StepBatch) -> None:
    rows = len(batch.logits_rows)
    plain = model.model.forward(batch)
    got = model.forward(batch).clone()
    graphs = model.graphs
    assert graphs is not None and len(graphs) == 1
    assert graphs.shape_for(batch) == GraphShape(128, 8, 64)
    assert torch.equal(graphs.run_again()[:rows], got)
    assert torch.equal(model.model.forward(by_hand(batch, 128, 8), ends_only=model.ends_only)[:rows], got)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", STEPS)
def test_padding_writes_no_keys(model: GraphedModel, batch: StepBatch) -> None:
    model.model.forward(batch)
    want = [part.clone() for layer in range(model.config.num_layers) for part in model.model.kv(layer)]
    fill_cache(model)
    model.forward(batch)
    for layer in range(model.config.num_layers):
        for part in model.model.kv(layer):
            torch.testing.assert_close(part, want.pop(0), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", STEPS)
def test_a_last_layer_of_last_tokens_gives_the_same(model: GraphedModel, batch: StepBatch) -> None:
    assert is_ends_only(batch)
    want = model.model.forward(batch)
    keys = [part.clone() for part in model.model.kv(2)]
    fill_cache(model)
    assert torch.equal(model.model.forward(batch, ends_only=True), want)
    for part, key in zip(model.model.kv(2), keys, strict=True):
        assert torch.equal(part, key)


@pytest.mark.parametrize("last", ["window", "full"])
@pytest.mark.parametrize("options", [{}, {"dense": "fp8_block128"}, {"dense": "fp8_block128", "kv": "fp8"}])
def test_queries_of_last_tokens_alone(
    options: dict[str, str], last: str, make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer asks for keys and values of all tokens, and for queries of the last ones; bits stay."""
    model = load_model(make_engine({"num_layers": 2 if last == "full" else 3}, **options))
    config, batch = model.config, batch_of([1, 30, 9], [10, 0, 20], [0, 2])
    keys_values = 2 * config.num_kv_heads * config.head_dim
    products: list[tuple[int, ...]] = []
    if "dense" in options:
        product, rows_of = "dense_fp8_rope_kv_append", lambda call: (len(call[2]), call[6])
    else:
        product, rows_of = "rope_kv_append", lambda call: (call[0].shape[1], call[1])
    real = getattr(ops, product)

    def counted(*call: Any) -> None:
        rows, positions = rows_of(call)
        products.append((len(positions), rows))
        real(*call)

    monkeypatch.setattr(ops, product, counted)
    results = []
    for least in (41, 40):
        monkeypatch.setattr(layers, "ENDS_APART_TOKENS", least)
        model.allocate_kv(BLOCKS, BLOCKS, BLOCK_TOKENS)
        products.clear()
        results.append((model.forward(batch, ends_only=True), *model.kv(config.num_layers - 1)))
    whole = keys_values + config.num_heads * config.head_dim
    assert products == [*[(40, whole)] * (config.num_layers - 1), (40, keys_values), (3, whole)]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and bool(want.view(torch.uint8).any())


def test_a_step_of_padding_alone_runs(model: GraphedModel) -> None:
    """What a graph is captured with."""
    shape = StepBuffers(8, 8, 8, CPU, prompt_tokens=128, prompt_window=8).shape(GraphShape(128, 8, 8))
    shape.clear()
    before = [part.clone() for part in model.model.kv(2)]
    assert model.model.forward(shape.batch, ends_only=True).shape == (8, model.config.vocab_size)
    assert all(map(torch.equal, before, model.model.kv(2)))


def test_batches_that_want_more_than_last_tokens() -> None:
    batch = batch_of([1, 30, 9], [10, 0, 20], [0, 2])
    assert not is_ends_only(replace(batch, logits_rows=ints([0, 29])))
    assert not is_ends_only(replace(batch, query_start=ints([0, 1, 1, 40])))
    assert is_ends_only(replace(batch, logits_rows=ints([])))


def test_a_smaller_step_leaves_nothing_of_a_larger_one(model: GraphedModel) -> None:
    small = batch_of([20], [50])
    want = model.forward(small).clone()
    model.forward(batch_of([1, 30, 20], [10, 0, 20]))
    fill_cache(model)
    assert torch.equal(model.forward(small), want)


def draws(rows: int, source: Sequence[int] | None = None) -> Draws:
    return Draws(
        np.full(rows, 0.8, np.float32),
        np.linspace(0.1, 0.9, rows, dtype=np.float32),
        None if source is None else np.array(source, np.int32),
    )


def test_tokens_are_fed_from_step_to_step(model: GraphedModel) -> None:
    """A prompt, a mixed step that takes its token, a decode step that takes both, in series and launched ahead."""
    prompt, mixed, decode = batch_of([20], [0]), batch_of([1, 30], [20, 0]), batch_of([1, 1], [30, 21])
    decode.full_blocks, decode.window_blocks = mixed.full_blocks.flip(0), mixed.window_blocks.flip(0)
    want = [model.launch(prompt, draws(1)).tokens()]
    mixed.token_ids[0] = want[0][0]
    want.append(model.launch(mixed, draws(2)).tokens())
    decode.token_ids = ints(want[1]).flip(0)
    want.append(model.launch(decode, draws(2)).tokens())
    for _ in range(2):
        mixed.token_ids[0] = 0
        handles = [model.launch(prompt, draws(1)), model.launch(mixed, draws(2, [0, *[-1] * 30]))]
        got = [handles[0].tokens()]
        decode.token_ids = ints([0, 0])
        handles.append(model.launch(decode, draws(2, [1, 0])))
        assert [*got, *(handle.tokens() for handle in handles[1:])] == want


def test_a_step_of_prompts_without_logits_draws_nothing(model: GraphedModel) -> None:
    assert model.launch(batch_of([30], [0], []), Draws.greedy(0)).tokens() == []
    assert model.graphs is not None and len(model.graphs) == 1


@pytest.mark.parametrize("ends_only", [False, True])
def test_a_part_of_a_prompt_asks_no_op_for_nothing(
    model: GraphedModel, monkeypatch: pytest.MonkeyPatch, ends_only: bool
) -> None:
    """Kernels may refuse tensors of no rows."""

    def refuses(*_: object) -> None:
        raise AssertionError("the end of the model ran")

    monkeypatch.setattr(model.model, "_final_norm", refuses)
    logits = model.model.forward(batch_of([30], [0], []), ends_only=ends_only)
    assert logits.shape == (0, model.config.vocab_size) and logits.dtype == torch.float32


def test_steps_too_large_run_without_a_graph(make_engine: Callable[..., Path]) -> None:
    model = GraphedModel(load_model(make_engine()))
    model.allocate_kv(BLOCKS, BLOCKS, BLOCK_TOKENS)
    graphs = model.graphs
    assert graphs is not None
    every = replace(batch_of([30], [0]), logits_rows=torch.arange(30, dtype=torch.int32))
    assert graphs.shape_for(every) is None, "a row of logits for each token of a prompt"
    assert torch.equal(model.forward(every), model.model.forward(every)) and len(graphs) == 0
    with pytest.raises(ValueError, match="no graph serves a step of 30 tokens, 1 sequences and 30 rows"):
        graphs.logits(every)
    assert graphs.prompt_shape(MOST_PROMPT_TOKENS + 1, 1) is None


def test_a_tap_bounds_the_padding(make_engine: Callable[..., Path]) -> None:
    model = GraphedModel(load_model(make_engine()))
    model.model.tap = FeatureTap((1,), 300, model.config.hidden_size, CPU)
    model.allocate_kv(BLOCKS, BLOCKS, BLOCK_TOKENS)
    graphs = model.graphs
    assert graphs is not None
    assert graphs.prompt_shape(256, 1) is not None and graphs.prompt_shape(257, 1) is None
    model.forward(batch_of([37], [0]))
    taken = model.model.tap.features[:37].clone()
    model.model.forward(batch_of([37], [0]))
    torch.testing.assert_close(model.model.tap.features[:37], taken, rtol=2e-2, atol=2e-2)


def test_with_results_that_do_not_depend_on_the_batch_there_are_none(
    make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_invariant", lambda: True)
    model = GraphedModel(load_model(make_engine()))
    model.allocate_kv(BLOCKS, BLOCKS, BLOCK_TOKENS)
    assert model.graphs is not None and model.graphs.shape_for(batch_of([37], [0])) is None
    assert model.warm(1, 2048) == 1


def test_buffers_hold_both_kinds_of_step() -> None:
    buffers = StepBuffers(4, 8, 3, CPU, prompt_tokens=64, prompt_window=6)
    shape = buffers.shape(GraphShape(64, 4, 8))
    assert shape.batch.window_blocks.shape == (4, 6) and shape.batch.full_blocks.shape == (4, 8)
    assert buffers.shape(GraphShape(4, 4, 8)).batch.window_blocks.shape == (4, 3)
    for wrong in (GraphShape(65, 4, 8), GraphShape(64, 5, 8), GraphShape(64, 4, 16)):
        with pytest.raises(ValueError, match="there is memory for 64 and 4 of 8"):
            buffers.shape(wrong)
    buffers.drawn.copy_(ints([50, 51, 52, 53]))
    batch = batch_of([1, 5], [3, 0], [0])
    batch.window_blocks = batch.window_blocks[:, :5]
    shape.fill(batch, draws(1, [2, -1, -1, -1, -1, -1]), 1)
    assert shape.batch.token_ids[:7].tolist() == [52, *batch.token_ids[1:].tolist(), 0]
    assert shape.batch.query_start.tolist() == [0, 1, 6, 6, 6]
    assert shape.batch.context_lens.tolist() == [4, 5, 0, 0] and shape.batch.logits_rows.tolist() == [0, 0, 0, 0]
    assert shape.batch.full_blocks[1].tolist() == list(range(8, 16)) and int(shape.batch.full_blocks[2:].max()) == -1
    known = replace(batch_of([2, 3], [3, 0], [0]), window_blocks=batch.window_blocks)
    shape.fill(known, draws(1), 0)  # no token of the step before: copies
    assert shape.batch.token_ids.tolist() == [3, 10, 17, 24, 31] + [0] * 59
    assert shape.batch.positions[:6].tolist() == [3, 4, 0, 1, 2, 0] and int(shape.turn) == 0
    assert shape.batch.query_start.tolist() == [0, 2, 5, 5, 5]
    for too_large in (replace(batch_of([60, 5], [0, 0]), window_blocks=batch.window_blocks), batch_of([1, 5], [3, 0])):
        with pytest.raises(ValueError):
            shape.fill(too_large, draws(2), 0)
