"""Steps of prompts as graphs on the GPU: a graph gives what its padded step run eagerly gives, padding touches no other
keys, tokens are fed from step to step, memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_engine_on_cuda import assert_rows_agree, on_card

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.runtime.model import GptOssModel, GraphedModel, StepBatch
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import GraphShape
from gptoss_trt.runtime.model.loader import random_weights

LAYERS, BLOCKS, WINDOW = 2, 900, 128


@pytest.fixture(
    scope="module",
    params=[("bf16", False), ("fp8_block128", False), ("bf16", True), ("fp8_block128", True)],
    ids=["bf16", "fp8", "bf16-ends", "fp8-ends"],
)
def model(request: pytest.FixtureRequest) -> GraphedModel:
    """Two full-width layers of the 20b model, a cache of random numbers; all tokens in the last layer or the last."""
    dense, ends_only = request.param
    device = torch.device("cuda")
    weights = random_weights(model_config("gpt-oss-20b", LAYERS), Formats(dense=dense), 1, device)
    made = GraphedModel(GptOssModel(weights, device))
    made.ends_only = ends_only
    made.allocate_kv(BLOCKS, BLOCKS, 64)
    for part in cache(made):
        part.normal_()
    return made


def cache(model: GraphedModel) -> list[torch.Tensor]:
    return [part for layer in range(LAYERS) for part in model.model.kv(layer)]


def batch_of(
    counts: Sequence[int],
    before: Sequence[int],
    wanted: Sequence[int] | None = None,
    begins: Sequence[int] | None = None,
) -> StepBatch:
    """`counts` new tokens for sequences that have `before` keys each, on shuffled blocks of their own or those from
    `begins` on; logits of the last token of the sequences `wanted` (default: all)."""
    generator = torch.Generator().manual_seed(len(counts) + counts[0])
    starts = np.cumsum([0, *counts])
    ends = [b + c for b, c in zip(before, counts, strict=True)]
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    if begins is None:
        tables = [[free.pop() for _ in range(-(-end // 64))] for end in ends]
    else:
        tables = [[begin + n for n in range(-(-end // 64))] for begin, end in zip(begins, ends, strict=True)]
    firsts = [max(b - WINDOW + 1, 0) // 64 for b in before]

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def table(rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        return ints([[*row, *[-1] * (width - len(row))] for row in rows])

    return StepBatch(
        token_ids=torch.randint(0, 201088, (int(starts[-1]),), generator=generator, dtype=torch.int32),
        positions=ints(np.concatenate([np.arange(b, end) for b, end in zip(before, ends, strict=True)])),
        query_start=ints(starts),
        context_lens=ints(ends),
        full_blocks=table(tables),
        window_blocks=table([blocks[first:] for blocks, first in zip(tables, firsts, strict=True)]),
        window_first_block=ints(firsts),
        logits_rows=ints([int(starts[s + 1]) - 1 for s in (range(len(counts)) if wanted is None else wanted)]),
    )


def by_hand(batch: StepBatch, shape: GraphShape) -> StepBatch:
    """The batch with the padding of `shape`, but for the width of its window table."""

    def more(values: torch.Tensor, size: int, fill: int = 0) -> torch.Tensor:
        out = values.new_full((size, *values.shape[1:]), fill)
        out[: len(values)] = values
        return out

    sequences = shape.sequences
    full = torch.nn.functional.pad(batch.full_blocks, (0, shape.width - batch.full_blocks.shape[1]), value=-1)
    return StepBatch(
        token_ids=more(batch.token_ids, shape.tokens),
        positions=more(batch.positions, shape.tokens),
        query_start=more(batch.query_start, sequences + 1, int(batch.query_start[-1])),
        context_lens=more(batch.context_lens, sequences),
        full_blocks=more(full, sequences, -1),
        window_blocks=more(batch.window_blocks, sequences, -1),
        window_first_block=more(batch.window_first_block, sequences),
        logits_rows=more(batch.logits_rows, sequences),
    )


STEPS = [
    batch_of([1000], [0]),
    batch_of([5], [0]),
    batch_of([300, 17, 400], [0, 0, 0]),
    batch_of([500], [3000]),  # a chunk behind cached keys
    batch_of([1, 1, 200, 1], [700, 5, 130, 64]),  # among sequences that decode
    batch_of([*[1] * 20, 90], [*range(100, 120), 0]),
    batch_of([*[1] * 70, 30], [*range(100, 170), 0]),
    batch_of([1, 300, 40], [100, 0, 200], [0, 2]),  # a prompt that is not at its end yet
    batch_of([2500, 1], [0, 900]),
    batch_of([8100, 1], [64, 900]),  # a nearly full step
]


@pytest.mark.parametrize("batch", STEPS)
def test_a_graph_gives_what_its_padded_step_gives(model: GraphedModel, batch: StepBatch) -> None:
    graphs, rows = model.graphs, len(batch.logits_rows)
    assert graphs is not None
    shape = graphs.shape_for(batch)
    assert shape is not None and not shape.decodes
    kept = [part.clone() for part in cache(model)]

    def restore() -> None:
        for part, old in zip(cache(model), kept, strict=True):
            part.copy_(old)

    draws = Draws(np.arange(rows, dtype=np.float32) % 2, np.linspace(0.01, 0.99, rows, dtype=np.float32))
    tokens = model.launch(batch, draws).tokens()
    logits = graphs.run_again()[:rows].clone()  # the eager step, with the graph's inputs
    assert torch.equal(model.forward(batch), logits)
    written = [part.clone() for part in cache(model)]
    for row in range(0, rows, 2):
        assert tokens[row] == int(logits[row].argmax())
    restore()
    assert model.launch(batch, draws).tokens() == tokens
    assert_same(cache(model), written)
    restore()
    assert torch.equal(model.model.forward(on_card(by_hand(batch, shape)), ends_only=model.ends_only)[:rows], logits)
    assert_same(cache(model), written)
    for ends_only in (True, False):
        restore()
        there = model.model.forward(on_card(batch), ends_only=ends_only)
        assert_rows_agree(logits, there)  # another shape, and so another plan
    own = set(batch.full_blocks.flatten().tolist())
    others = torch.tensor([block for block in range(BLOCKS) if block not in own], device="cuda")
    for old, new in zip(kept, written, strict=True):
        assert torch.equal(old[others], new[others]) and not torch.equal(old, new)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_steps_launched_ahead_give_what_they_give_in_series(model: GraphedModel) -> None:
    """A prompt, a mixed step that takes its token, a decode step that takes both, a step too large for a graph."""
    prompt, mixed = batch_of([200], [0], begins=[0]), batch_of([1, 300], [200, 0], begins=[0, 100])
    decode, large = batch_of([1, 1], [300, 201], begins=[100, 0]), batch_of([1, 5000], [301, 0], begins=[100, 200])

    def draws(rows: int, source: list[int] | None = None) -> Draws:
        given = None if source is None else np.array(source, np.int32)
        return Draws(np.full(rows, 0.8, np.float32), np.linspace(0.1, 0.9, rows, dtype=np.float32), given)

    want = [model.launch(prompt, draws(1)).tokens()]
    for later, ids in ((mixed, [0]), (decode, [1, 0]), (large, [0])):
        later.token_ids[: len(ids)] = torch.tensor([want[-1][i] for i in ids], dtype=torch.int32)
        want.append(model.launch(later, draws(2)).tokens())
    for _ in range(3):
        for later, count in ((mixed, 1), (decode, 2), (large, 1)):
            later.token_ids[:count] = 0
        handles = [model.launch(prompt, draws(1)), model.launch(mixed, draws(2, [0, *[-1] * 300]))]
        got = [handles[0].tokens()]
        handles.append(model.launch(decode, draws(2, [1, 0])))
        got.append(handles[1].tokens())
        handles.append(model.launch(large, draws(2, [0, *[-1] * 5000])))
        assert [*got, *(handle.tokens() for handle in handles[2:])] == want


def test_an_unfinished_prompt_draws_nothing(model: GraphedModel) -> None:
    assert model.launch(batch_of([128], [0], []), Draws.greedy(0)).tokens() == []


@pytest.mark.parametrize("ends_only", [False, True])
def test_a_part_of_a_prompt_runs_without_a_graph(model: GraphedModel, ends_only: bool) -> None:
    moved = model._moved(batch_of([300], [0], wanted=[]))
    assert model.model.forward(moved, ends_only=ends_only).shape == (0, model.config.vocab_size)
    torch.cuda.synchronize()


def test_memory_of_all_graphs_is_bounded(model: GraphedModel) -> None:
    model.warm(8, 128)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = model.warm(64, 4096)
    torch.cuda.empty_cache()
    grown = torch.cuda.memory_reserved() - before
    assert graphs >= 40 + 11
    assert grown < 3 << 30, f"{graphs} graphs hold {grown >> 20} MiB"
