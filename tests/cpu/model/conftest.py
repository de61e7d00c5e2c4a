"""Small engines, a tiny scheduler over two KV pools, and simulated ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.model import GptOssModel, StepBatch


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Scheduler:
    """Gives sequences blocks of both pools, in another order for each pool, and frees what a window passed."""

    def __init__(
        self, model: GptOssModel, full_blocks: int = 80, window_blocks: int = 40, block_tokens: int = 16
    ) -> None:
        model.allocate_kv(full_blocks, window_blocks, block_tokens)
        self._model, self._block_tokens = model, block_tokens
        self._free_full, self._free_window = list(range(full_blocks)), list(reversed(range(window_blocks)))
        self._full: dict[str, list[int]] = {}
        self._window: dict[str, list[int]] = {}
        self._first: dict[str, int] = {}
        self.length: dict[str, int] = {}

    def step(self, new: Mapping[str, Sequence[int]], rows: str = "last") -> torch.Tensor:
        """Runs one step with new token ids for some sequences; logits of each one's last token, or of all."""
        for name, ids in new.items():
            self._grow(name, len(ids))
        ends = torch.tensor([len(ids) for ids in new.values()]).cumsum(0).tolist()
        total = ends[-1] if ends else 0
        batch = StepBatch(
            token_ids=_ints([token for ids in new.values() for token in ids]),
            positions=_ints([self.length[s] - len(ids) + i for s, ids in new.items() for i in range(len(ids))]),
            query_start=_ints([0, *ends]),
            context_lens=_ints([self.length[name] for name in new]),
            full_blocks=_table([self._full[name] for name in new]),
            window_blocks=_table([self._window[name] for name in new]),
            window_first_block=_ints([self._first[name] for name in new]),
            logits_rows=_ints([end - 1 for end in ends] if rows == "last" else list(range(total))),
        )
        logits = self._model.forward(batch)
        for name in new:
            self._free_passed(name)
        return logits

    def _grow(self, name: str, count: int) -> None:
        self.length[name] = self.length.get(name, 0) + count
        blocks = -(-self.length[name] // self._block_tokens)
        full, window = self._full.setdefault(name, []), self._window.setdefault(name, [])
        first = self._first.setdefault(name, 0)
        while len(full) < blocks:
            full.append(self._free_full.pop(0))
        while first + len(window) < blocks:
            window.append(self._free_window.pop(0))

    def _free_passed(self, name: str) -> None:
        """Blocks below what the next token's window reaches go back, and come to others at once."""
        needed = max(0, self.length[name] - self._model.config.sliding_window + 1) // self._block_tokens
        while self._first[name] < needed:
            self._free_window.insert(0, self._window[name].pop(0))
            self._first[name] += 1


def _table(rows: list[list[int]]) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    return _ints([row + [-1] * (width - len(row)) for row in rows]).view(len(rows), width)


@pytest.fixture(scope="session")
def scheduler() -> type[Scheduler]:
    return Scheduler


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_engine(config changes, layout=..., **build options): an engine directory, built once for each set."""
    made: dict[str, Path] = {}

    def make(changes: Mapping[str, object] | None = None, layout: str = "hf_mxfp4", **options: object) -> Path:
        key = repr((changes, layout, options))
        if key not in made:
            folder = tmp_path_factory.mktemp("engine")
            config: ModelConfig = small_config(**{"num_layers": 3, "max_context": 4096, **(changes or {})})
            checkpoint = write_checkpoint(folder / "checkpoint", config, layout=layout)
            build_engine(checkpoint, folder / "engine", BuildOptions(**options))
            made[key] = folder / "engine"
        return made[key]

    return make


class ThreadGroup:
    """One rank of a group whose ranks are threads: calls meet at a barrier, sums are in rank order."""

    def __init__(self, rank: int, size: int, shared: dict[int, torch.Tensor], barrier: threading.Barrier) -> None:
        self._rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self._rank] = x.clone()
        self._barrier.wait(timeout=60)
        everyone = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)


@pytest.fixture(scope="session")
def thread_groups() -> Callable[[int], list[ThreadGroup]]:
    def make(size: int) -> list[ThreadGroup]:
        shared: dict[int, torch.Tensor] = {}
        barrier = threading.Barrier(size)
        return [ThreadGroup(rank, size, shared, barrier) for rank in range(size)]

    return make
