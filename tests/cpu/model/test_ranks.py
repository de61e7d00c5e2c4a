"""Several ranks in one process, as threads: any mapping's logits are the single rank's within rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptoss_trt.build_engine.spec import ParallelMapping
from gptoss_trt.runtime.model import GptOssModel, Groups, layers, load_model
from gptoss_trt.runtime.model.loader import load_weights

_WIDE = {"num_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_kv_heads": 8, "vocab_size": 1024}


class _PartialAlone:
    """One rank that rounds where several do: partial results stay fp32 until the (empty) sum."""

    size = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


def _single(engine: Path, ids: list[int], scheduler: Any) -> torch.Tensor:
    device = torch.device("cpu")
    groups = Groups(_PartialAlone(), _PartialAlone())
    table = scheduler(GptOssModel(load_weights(engine, 0, device, 1), device, groups))
    prompt = table.step({"a": ids}, rows="all")
    return torch.cat((prompt, table.step({"a": [3]})))


def _run(
    engine: Path, ranks: int, ids: list[int], scheduler: Any, thread_groups: Callable[..., Any], rows: str = "all"
) -> list[torch.Tensor]:
    attention, experts = thread_groups(ranks), thread_groups(ranks)
    logits: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            model = load_model(engine, rank=rank, groups=Groups(attention[rank], experts[rank]))
            table = scheduler(model)
            prompt = table.step({"a": ids}, rows=rows)
            logits[rank] = torch.cat((prompt, table.step({"a": [3]})))
        except BaseException as error:  # a thread's error must reach the test
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors
    return logits


@pytest.mark.parametrize("mapping", [(2, 1), (2, 2), (4, 2), (8, 8)], ids=lambda m: f"tp{m[0]}ep{m[1]}")
def test_ranks_agree_with_one(
    mapping: tuple[int, int], make_engine: Callable[..., Path], scheduler: Any, thread_groups: Callable[..., Any]
) -> None:
    ids = torch.randint(0, 1024, (140,), generator=torch.Generator().manual_seed(1)).tolist()
    single = _single(make_engine(_WIDE), ids, scheduler)
    tp, ep = mapping
    several = _run(make_engine(_WIDE, mapping=ParallelMapping(tp=tp, ep=ep)), tp, ids, scheduler, thread_groups)
    for other in several[1:]:
        assert torch.equal(other, several[0])
    assert several[0].shape == single.shape
    error = (several[0] - single).norm(dim=1) / single.norm(dim=1)
    assert error.sort().values[10] < 1e-6  # sums in another order
    assert error.max() < 0.2  # from the first bf16 that rounds to the other side on, FP8 codes differ too


@pytest.mark.parametrize("dense", ["bf16", "fp8_block128"])
def test_ranks_whose_last_layer_asks_for_last_tokens(
    dense: str, make_engine: Callable[..., Path], scheduler: Any, thread_groups: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each rank's part of q, k and v in two products gives what one gives."""
    engine = make_engine(_WIDE, mapping=ParallelMapping(tp=4, ep=2), dense=dense)
    forward = GptOssModel.forward
    monkeypatch.setattr(GptOssModel, "forward", lambda self, batch: forward(self, batch, ends_only=True))
    ids = torch.randint(0, 1024, (140,), generator=torch.Generator().manual_seed(2)).tolist()
    got = []
    for least in (1000, 2):
        monkeypatch.setattr(layers, "ENDS_APART_TOKENS", least)
        got.append(_run(engine, 4, ids, scheduler, thread_groups, rows="last"))
    for ours, theirs in zip(*got, strict=True):
        assert len(ours) == 2 and torch.equal(ours, theirs)
