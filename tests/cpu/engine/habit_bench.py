"""An engine over a tiny model that reads everything back from its paged KV cache, and drafters for it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Items
from typing import Any, cast

import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.engine.guides import GuideError
from gptoss_trt.runtime.engine.messages import Error, Finished, Guide, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.length import StepCost
from gptoss_trt.runtime.engine.speculation.speculator import Speculator
from gptoss_trt.runtime.model import GptOssModel, GraphedModel, StepBatch

VOCABULARY, WINDOW = 40, 12
OPTIONS = EngineOptions(block_tokens=4, max_batch=8, step_tokens=24, max_queue=64, device="cpu")
FREE = StepCost(((1, 1.0), (1000, 1.0)))


class HabitModel:
    """Logits depend mostly on the last two tokens, so texts repeat themselves, and a little on all tokens in the cache,
    so a key of a rejected draft that was read would show in the log-probabilities."""

    config = ModelConfig(2, 8, 8, 2, 1, 1, 1, 8, VOCABULARY, ("sliding_attention", "full_attention"), WINDOW, 200)
    device = torch.device("cpu")
    tap = None

    def __init__(self, seed: int = 3, spread: float = 4.0) -> None:
        self.steps: list[tuple[int, int]] = []  # sequences, tokens
        self.failing: set[int] = set()
        self.table = torch.randn((997, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * spread

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return 8 * block_tokens, 8 * block_tokens

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.full = torch.full((full_blocks, block_tokens), -1)
        self.window = torch.full((window_blocks, block_tokens), -1)

    def forward(self, batch: StepBatch, *, ends_only: bool = False) -> torch.Tensor:
        self.steps.append((len(batch.context_lens), len(batch.token_ids)))
        places = [
            (s, t)
            for s in range(len(batch.context_lens))
            for t in range(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        ]
        for s, t in places:
            block, offset = divmod(int(batch.positions[t]), self.block_tokens)
            first = int(batch.window_first_block[s])
            self.full[batch.full_blocks[s, block], offset] = batch.token_ids[t]
            self.window[batch.window_blocks[s, block - first], offset] = batch.token_ids[t]
        out = torch.zeros((len(batch.token_ids), VOCABULARY))
        for s, t in places:
            if t in batch.logits_rows:
                out[t] = self._row(batch, s, int(batch.positions[t]))
        return out[batch.logits_rows.long()]

    def _row(self, batch: StepBatch, s: int, position: int) -> torch.Tensor:
        seen = [self._read(self.full, batch.full_blocks[s], 0, p) for p in range(position + 1)]
        first = int(batch.window_first_block[s])
        near = range(max(0, position - WINDOW + 1), position + 1)
        assert seen[near.start :] == [self._read(self.window, batch.window_blocks[s], first, p) for p in near]
        if seen[-1] in self.failing:
            return torch.full((VOCABULARY,), math.nan)
        number = 7
        for token in seen:
            number = (number * 31 + token + 1) % 997
        habit = (seen[-1] * 41 + (seen[-2] if position else 0)) % 997
        return self.table[habit] + 0.05 * self.table[number]

    def _read(self, pool: torch.Tensor, table: torch.Tensor, first: int, position: int) -> int:
        block = int(table[position // self.block_tokens - first])
        assert block >= 0
        return int(pool[block, position % self.block_tokens])


class Knowing:
    """Drafts the tokens of known answers, some of them wrong."""

    def __init__(self, answers: dict[tuple[Any, ...], list[int]], wrong: float) -> None:
        self.answers, self.wrong, self.random = answers, wrong, random.Random(1)

    def draft(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._one(sequence, count) for sequence, count in wanted]

    def _one(self, sequence: Sequence, count: int) -> list[int]:
        answer = self.answers.get((sequence.request.submit.request_id, sequence.index), [])
        right = answer[sequence.output_tokens : sequence.output_tokens + count]
        return [self.random.randrange(VOCABULARY) if self.random.random() < self.wrong else t for t in right]


class EvenCompiler:
    """Guides that allow even tokens only, and count what they accept."""

    failure = ""

    def compile(self, guides: tuple[Guide, ...]) -> EvenCompiler:
        if guides[0].grammar != "even":
            raise GuideError("unknown")
        return EvenCompiler()

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def mask(self, logits: torch.Tensor) -> None:
        logits[1::2] = -math.inf

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self.accepted.append(token)


class Bench:
    """An engine, its answers and ends. `graphed`: steps as on a GPU, ahead of the host and drawn by the model."""

    def __init__(
        self, options: EngineOptions = OPTIONS, *, kv_bytes: int = 20_000, graphed: bool = False, **more: Any
    ) -> None:
        self.model = HabitModel()
        model = GraphedModel(cast(GptOssModel, self.model)) if graphed else self.model
        self.core = ModelCore(model, options, kv_bytes=kv_bytes, guide_compiler=EvenCompiler(), **more)
        self.ids: dict[tuple[Any, ...], list[int]] = {}
        self.logprobs: dict[tuple[Any, ...], list[Any]] = {}
        self.ends: dict[tuple[Any, ...], Finished | Error] = {}

    def speculate(self, drafter: Any, most: int = 5) -> Bench:
        self.core._scheduler._speculator = Speculator(drafter, most, FREE)
        return self

    def submit(self, submit: Submit) -> None:
        self.core.submit((1, submit.request_id), submit, 1)

    def run(self, steps: int = 2000) -> Bench:
        for _ in range(steps):
            if not self.core.has_work():
                break
            for (_, name), event in self.core.step():
                if isinstance(event, Tokens):
                    assert event.logprobs is None or len(event.logprobs) == len(event.token_ids)
                    self.ids.setdefault((name, event.sequence), []).extend(event.token_ids)
                    self.logprobs.setdefault((name, event.sequence), []).extend(event.logprobs or ())
                else:
                    self.ends[name, getattr(event, "sequence", None)] = event
        return self

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.core.stats()["counters"]
        return counters
