"""A built engine with random weights: tokens alone and among others, and the whole process around it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore, load_core
from gptoss_trt.runtime.engine.options import EngineOptions

GREEDY = Sampling(temperature=0.0)
OPTIONS = EngineOptions(threads=1, kv_bytes=8 << 20, max_batch=8, step_tokens=96, device="cpu")
ROUNDING = 0.05  # of logits that spread over some units: sums in another order, rounded to bf16 between operators


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    write_checkpoint(folder / "checkpoint", small_config(num_layers=4))
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions())
    return folder / "engine"


def prompts(count: int) -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 200, (count,), generator=generator).tolist()
    return {f"p{i}": tuple(torch.randint(0, 290, (n,), generator=generator).tolist()) for i, n in enumerate(lengths)}


def tokens_of(core: ModelCore, names: Iterable[str]) -> dict[str, list[tuple[int, dict[int, float]]]]:
    """Greedy tokens of each prompt with the log-probabilities of the 20 best."""
    answers: dict[str, list[tuple[int, dict[int, float]]]] = {}
    for name in names:
        core.submit((1, name), Submit(name, prompts(12)[name], 20, sampling=GREEDY, logprobs=20), 1)
    while core.has_work():
        for (_, name), event in core.step():
            assert not isinstance(event, Error), event
            if isinstance(event, Tokens):
                assert event.logprobs is not None
                answers.setdefault(name, []).append((event.token_ids[0], dict(event.logprobs[0].top)))
    return answers


def test_greedy_tokens_are_the_same_alone_and_among_others(engine_dir: Path) -> None:
    together = tokens_of(load_core(engine_dir, OPTIONS), prompts(12))
    fresh = load_core(engine_dir, EngineOptions(**{**vars(OPTIONS), "prefix_cache": False}))
    for name in prompts(12):
        alone = tokens_of(fresh, [name])[name]
        for position, ((token, best), (other, _)) in enumerate(zip(alone, together[name], strict=True)):
            if token != other:
                margin = best[token] - best[other]
                assert margin < ROUNDING, f"{name}: token {position} is {token} alone, {other} together: {margin=}"
                print(f"{name}: first difference at token {position}, margin {margin:.2e}")
                break


def test_a_repeated_prompt_gives_the_same_tokens(engine_dir: Path) -> None:
    core = load_core(engine_dir, OPTIONS)
    name = max(prompts(12), key=lambda name: len(prompts(12)[name]))
    first = tokens_of(core, [name])[name]
    again = tokens_of(core, [name])[name]
    assert core.stats()["kv"]["full"]["reused"] > 0
    assert [token for token, _ in first] == [token for token, _ in again]


def test_the_process_serves_a_built_engine(engine_dir: Path, tmp_path: Path) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client = EngineClient(engine_dir, state_dir=tmp_path, options=OPTIONS, idle_timeout_s=0.5)
    with contextlib.closing(client):
        client.wait_ready(60)
        client.submit(Submit("r", prompts(12)["p1"], 20, sampling=GREEDY), events.put)
        ids = []
        while not isinstance(event := events.get(timeout=30), Finished):
            assert isinstance(event, Tokens), event
            ids += event.token_ids
        assert ids == [token for token, _ in tokens_of(load_core(engine_dir, OPTIONS), ["p1"])["p1"]]
        stats = client.stats()
        assert (
            stats["kv"]["full"]["tokens_per"] == OPTIONS.resolved("cpu").block_tokens and stats["requests"]["max"] == 8
        )
        client.submit(Submit("bad", (1, 320), 5), events.put)
        error = events.get(timeout=5)
        assert isinstance(error, Error) and error.code == "INVALID_ARGUMENT" and "320" in error.message


def test_a_damaged_engine_says_what_is_wrong(engine_dir: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text((engine_dir / "manifest.json").read_text())
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    client = EngineClient(damaged, state_dir=tmp_path / "state", options=OPTIONS, idle_timeout_s=0.5)
    with contextlib.closing(client):
        client.submit(Submit("r", (1,), 5), events.put)
        error = events.get(timeout=30)
        assert isinstance(error, Error) and error.code == "UNAVAILABLE" and "rank0.safetensors" in error.message
