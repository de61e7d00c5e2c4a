"""Speculation on a built engine with random weights: greedy and seeded tokens are those without it, up to rounding."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from array import array
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.core import EngineCore, EngineLoadError
from gptoss_trt.runtime.engine.messages import IDS, Error, Event, Finished, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import load_core
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.verify import drafted, one_token_rows
from gptoss_trt.runtime.engine.step_plan import Work
from gptoss_trt.runtime.engine.steps import assemble
from gptoss_trt.runtime.engine.table_rows import TableRows
from gptoss_trt.runtime.model import load_model

OPTIONS = EngineOptions(threads=1, kv_bytes=8 << 20, max_batch=8, step_tokens=96, device="cpu")
ROUNDING = 0.05  # of logits that spread over some units: sums in another order, rounded to bf16 between operators


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a smaller draft engine, and one of another vocabulary."""
    folder = tmp_path_factory.mktemp("built")
    shapes: dict[str, dict[str, int]] = {"target": {"num_layers": 4}, "small": {"num_layers": 2}}
    shapes["other"] = {"num_layers": 2, "vocab_size": 256}
    for name, shape in shapes.items():
        write_checkpoint(folder / f"{name}-checkpoint", small_config(**shape))
        build_engine(folder / f"{name}-checkpoint", folder / name, BuildOptions())
    return {name: folder / name for name in shapes}


def submits() -> list[Submit]:
    generator = torch.Generator().manual_seed(4)
    out = []
    for number in range(6):
        stem = torch.randint(0, 290, (9,), generator=generator).tolist()
        sampling = Sampling(temperature=0.0) if number % 2 else Sampling(temperature=0.6, top_p=0.9, seed=number)
        out.append(Submit(f"r{number}", tuple((stem * 20)[: 20 + 29 * number]), 24, sampling=sampling, logprobs=20))
    return out


def answers(core: EngineCore) -> dict[str, list[tuple[int, dict[int, float]]]]:
    """Tokens of each request with the log-probabilities of the 20 best."""
    got: dict[str, list[tuple[int, dict[int, float]]]] = {}
    for submit in submits():
        core.submit((1, submit.request_id), submit, 1)
    while core.has_work():
        for (_, name), event in core.step():
            assert not isinstance(event, Error), event
            if isinstance(event, Tokens):
                assert event.logprobs is not None and len(event.logprobs) == len(event.token_ids)
                got.setdefault(name, []).extend(
                    (token, dict(entry.top)) for token, entry in zip(event.token_ids, event.logprobs, strict=True)
                )
            elif isinstance(event, Finished):
                assert event.usage.completion_tokens == 24
    return got


@pytest.mark.parametrize("how", ["ngram", "small draft engine", "itself as draft engine"])
def test_tokens_are_those_without_speculation(engines: dict[str, Path], how: str) -> None:
    draft = {"ngram": "", "small draft engine": str(engines["small"])}.get(how, str(engines["target"]))
    options = dataclasses.replace(OPTIONS, speculation="draft" if draft else "ngram", draft_engine=draft)
    core = load_core(engines["target"], options)
    speculator = core._core._scheduler._speculator  # type: ignore[attr-defined]
    assert (speculator.pass_cost > 0.4) == bool(draft)
    speculator.pass_cost = 0.0
    usual, got = answers(load_core(engines["target"], OPTIONS)), answers(core)
    for submit in submits():
        name, greedy = submit.request_id, submit.sampling.temperature == 0.0
        pairs = zip(usual[name], got[name], strict=True)
        first = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        if first is not None:
            place, (token, best), (other, _) = first
            assert greedy, f"{name}: sampled token {place} is {token}, {other} with speculation"
            assert best[token] - best[other] < ROUNDING, f"{name}: token {place} is {token}, {other} with speculation"
    counters = core.stats()["counters"]
    assert counters["draft_tokens"] > 0
    if how == "itself as draft engine":
        assert counters["accepted_draft_tokens"] > 0.9 * counters["draft_tokens"]


def test_a_draft_engine_of_another_vocabulary_is_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    def load(draft: Path) -> None:
        load_core(engines["target"], dataclasses.replace(OPTIONS, speculation="draft", draft_engine=str(draft)))

    with pytest.raises(EngineLoadError) as refused:
        load(engines["other"])
    text = str(refused.value)
    assert all(part in text for part in (str(engines["other"]), str(engines["target"]), "256", "320"))
    with pytest.raises(EngineLoadError, match="cannot be loaded"):
        load(tmp_path / "absent")


def test_a_step_of_several_tokens_equals_one_of_a_row_each(engines: dict[str, Path]) -> None:
    """The form that decode graphs run, windows and block borders included."""
    model = load_model(engines["target"])
    window, block_tokens = model.config.sliding_window, 16
    for context in (5, block_tokens - 2, window - 1, window + 14, 3 * window + 1):
        model.allocate_kv(64, 64, block_tokens)
        works = []
        for number in range(2):
            tokens = torch.randint(0, 290, (context,), generator=torch.Generator().manual_seed(number)).tolist()
            request = Request((0, "r"), Submit("r", tuple(tokens[:2]), 500), 0, 0, 0, b"")
            sequence = Sequence(request, 0, array(IDS, tokens))
            last = -(-(context + 4) // block_tokens)
            sequence.table.full = sequence.table.window = list(range(number * 20, number * 20 + last))
            model.forward(assemble([Work(sequence, 0, context, 0)], TableRows(block_tokens, window), "cpu"))
            first = max(0, context - 1 - window + 1) // block_tokens
            sequence.computed, sequence.table.window_first = context - 1, first
            sequence.table.window = sequence.table.window[first:]
            draft = (7, 8, 9, 10)[: 4 - 2 * number]
            works.append(Work(sequence, context - 1, 1 + len(draft), 1 + len(draft), draft))
        with drafted(works):
            batch = assemble(works, TableRows(block_tokens, window), "cpu")
        assert batch.token_ids.tolist()[1:5] == [7, 8, 9, 10]
        rows = one_token_rows(batch, block_tokens, window)
        assert rows.query_start.tolist() == list(range(9)) and rows.window_blocks.shape[1] <= -(-(window - 1) // 16) + 1
        torch.testing.assert_close(model.forward(rows), model.forward(batch), atol=ROUNDING, rtol=0)
        assert [len(work.sequence.tokens) for work in works] == [context, context]


def test_the_process_speculates_and_says_what_came_of_it(engines: dict[str, Path], tmp_path: Path) -> None:
    """The way of `--engine-option speculation=ngram`: usage feeds the wire's acceptance_rate, stats the metrics."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    options = dataclasses.replace(OPTIONS, speculation="ngram", draft_tokens=3)
    client = EngineClient(engines["target"], state_dir=tmp_path, options=options, idle_timeout_s=0.5)
    with contextlib.closing(client):
        client.wait_ready(60)
        submit = dataclasses.replace(submits()[5], max_tokens=60, logprobs=None)
        client.submit(submit, events.put)
        ids: list[int] = []
        while not isinstance(event := events.get(timeout=30), Finished):
            assert isinstance(event, Tokens) and len(event.token_ids) <= 4, event
            ids += event.token_ids
        usage, counters = event.usage, client.stats()["counters"]
    assert len(ids) == usage.completion_tokens == 60
    assert 0 < usage.accepted_draft_tokens <= usage.draft_tokens
    assert (counters["draft_tokens"], counters["accepted_draft_tokens"]) == (
        usage.draft_tokens,
        usage.accepted_draft_tokens,
    )


def test_a_process_without_its_draft_engine_says_so(engines: dict[str, Path], tmp_path: Path) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    options = dataclasses.replace(OPTIONS, speculation="draft", draft_engine=str(tmp_path / "absent"))
    client = EngineClient(engines["target"], state_dir=tmp_path / "state", options=options, idle_timeout_s=0.5)
    with contextlib.closing(client):
        client.submit(submits()[0], events.put)
        error = events.get(timeout=30)
    assert isinstance(error, Error) and error.code == "UNAVAILABLE" and str(tmp_path / "absent") in error.message
