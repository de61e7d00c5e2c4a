"""Measures one cell: decode steps of a full batch at a context, or a prompt from submission to its first token.

The whole engine core runs: validation, scheduler, block tables, batches, model, sampler; the socket does not. In a
decode cell the prompts' keys and values are random numbers put into the cache, and the steps that would compute them
are answered with random logits. Invariant: every measured step is the engine's own. Must not know how results are kept.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gptoss_trt.build_engine.spec import Formats, ModelConfig
from gptoss_trt.ops.gpu_clock import median_ms
from gptoss_trt.runtime.bench.bound import decode_seconds, prefill_seconds
from gptoss_trt.runtime.bench.observe import mean_distinct_experts
from gptoss_trt.runtime.bench.record import Cell
from gptoss_trt.runtime.engine.cache_size import CacheShape
from gptoss_trt.runtime.engine.messages import IDS, Error, IdArray, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.cuda_graph import Launched
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import is_decode
from gptoss_trt.runtime.model.graphed import GraphedModel
from gptoss_trt.runtime.model.model import GptOssModel

STEP_TOKENS = 8192  # of one step, so that a prompt up to that length is one chunk
WARM_STEPS = 5  # decode steps at full batch before the measured ones
REPLAYS = 20


@dataclass(frozen=True)
class Effort:
    """How often things are measured: decode steps, prompts before the measured ones, measured prompts."""

    steps: int
    warm_prompts: int
    prompts: int


FULL = Effort(steps=100, warm_prompts=10, prompts=20)
QUICK = Effort(steps=20, warm_prompts=2, prompts=5)


class BenchModel:
    """A graphed model whose cache begins full of random numbers; `pretend` answers prompts without computing them."""

    def __init__(self, inner: GraphedModel) -> None:
        self.inner = inner
        self.pretend = False

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return self.inner.kv_block_bytes(block_tokens)

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        self.inner.allocate_kv(full_blocks, window_blocks, block_tokens)
        if self.pretend:
            for layer in range(self.config.num_layers):
                for part in self.inner.model.kv(layer):
                    for block in torch.split(part, 4096):
                        block.copy_(torch.randn(block.shape, device=block.device, dtype=torch.bfloat16))

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.pretend and not is_decode(batch):
            return self._made_up(batch)
        return self.inner.forward(batch)

    @property
    def most_draws(self) -> int:
        return self.inner.most_draws

    def launch(self, batch: StepBatch, draws: Draws) -> Launched:
        if self.pretend and not is_decode(batch):
            return self.inner.launch_with(self._made_up(batch), draws)
        return self.inner.launch(batch, draws)

    def _made_up(self, batch: StepBatch) -> torch.Tensor:
        return torch.randn((len(batch.logits_rows), self.config.vocab_size), device=self.inner.model.device)


class Bench:
    """Cells of one model in one set of formats; `device` is where the model is."""

    def __init__(
        self,
        model: GraphedModel,
        formats: Formats,
        block_tokens: int,
        effort: Effort,
        seed: int,
        *,
        run_ahead: bool = True,
    ) -> None:
        self._model = BenchModel(model)
        self._formats = formats
        self._block_tokens = block_tokens
        self._effort = effort
        self._run_ahead = run_ahead
        self._generator = torch.Generator().manual_seed(seed)

    def decode(self, context: int, batch: int) -> Cell:
        """Mean wall time from one step's tokens to the next's, `batch` sequences from `context` tokens on, growing by
        one a step; running ahead, each call brings one step's tokens while the next runs."""
        steps = self._effort.steps
        self._model.pretend = True
        # The first prompts decode while the last are still read: their answers must outlast that.
        answer = -(-batch * context // STEP_TOKENS) + WARM_STEPS + steps + 2
        core = self._core(batch, context + answer)
        for number in range(batch):
            self._submit(core, number, context, answer)
        while core.stats()["inflight"]["generation_requests"] < batch:
            for _, event in core.step():
                _check_prompt(event, context)
        for _ in range(WARM_STEPS):
            core.step()
        began = time.perf_counter()
        for _ in range(steps):
            _check(core.step(), batch)
        ms = (time.perf_counter() - began) * 1e3 / steps
        graphs = self._model.inner.graphs
        assert graphs is not None
        with _layer_by_layer(self._model.inner.model):
            distinct = mean_distinct_experts(graphs.run_again)
        work, device = graphs.last_work, self._model.inner.model.device
        graph_ms = None if work is None else median_ms(device, work.replay, REPLAYS)
        bound_ms = decode_seconds(self._model.config, self._formats, batch, context) * 1e3
        notes = {"steps": steps, "kv_fill": "random", "measured_at": "engine core", "run_ahead": self._run_ahead}
        return Cell("decode", context, batch, ms, bound_ms, graph_ms, distinct, notes)

    def prefill(self, tokens: int) -> Cell:
        """Median wall time from the submission of a prompt of `tokens` tokens to its first token."""
        self._model.pretend = False
        core = self._core(1, tokens + 1)
        spans = []
        for number in range(self._effort.warm_prompts + self._effort.prompts):
            spans.append(self._prompt_ms(core, number, tokens))
        measured = sorted(spans[-self._effort.prompts :])
        bound_ms = prefill_seconds(self._model.config, self._formats, tokens) * 1e3
        notes = {"repeats": len(measured), "best_ms": round(measured[0], 4), "measured_at": "engine core"}
        graphs, graph_ms = self._model.inner.graphs, None
        assert graphs is not None
        if graphs.prompt_shape(tokens, 1) is None:
            distinct = mean_distinct_experts(lambda: self._prompt_ms(core, 0, tokens))
        else:  # the step was a graph, which routes out of sight
            distinct = mean_distinct_experts(graphs.run_again)
            if graphs.last_work is not None:
                graph_ms = median_ms(self._model.inner.model.device, graphs.last_work.replay, REPLAYS)
        return Cell("prefill", tokens, tokens, measured[len(measured) // 2], bound_ms, graph_ms, distinct, notes)

    def _prompt_ms(self, core: ModelCore, number: int, tokens: int) -> float:
        submit = self._prompt(number, tokens, 1)
        began = time.perf_counter()
        core.submit((0, submit.request_id), submit, time.time_ns())
        while core.has_work():
            events = core.step()
            for _, event in events:
                _check_prompt(event, tokens)
                if isinstance(event, Tokens):
                    ms = (time.perf_counter() - began) * 1e3
        return ms

    def _core(self, batch: int, tokens_each: int) -> ModelCore:
        """An engine core whose cache holds `batch` sequences of `tokens_each` tokens."""
        device = self._model.inner.model.device.type
        options = EngineOptions(
            block_tokens=self._block_tokens, max_batch=batch, step_tokens=max(STEP_TOKENS, batch), prefix_cache=False,
            run_ahead=self._run_ahead,
        )  # fmt: skip
        shape = CacheShape(
            self._model.kv_block_bytes(self._block_tokens), self._block_tokens, self._model.config.sliding_window,
            batch, options.step_tokens, self._model.config.max_context, options.prefix_cache,
        )  # fmt: skip
        blocks = batch * (-(-tokens_each // self._block_tokens) + 1) + batch  # the scheduler spares one for each
        return ModelCore(self._model, options, kv_bytes=shape.bytes_for(blocks + 8), device=device)

    def _submit(self, core: ModelCore, number: int, tokens: int, answer: int) -> None:
        submit = self._prompt(number, tokens, answer)
        core.submit((0, submit.request_id), submit, time.time_ns())

    def _prompt(self, number: int, tokens: int, answer: int) -> Submit:
        """A request for `answer` tokens at temperature 1 behind another random prompt each time."""
        (ids,) = random_prompts(self._model.config.vocab_size, 1, tokens, self._generator)
        return Submit(f"bench-{number}", ids, answer, sampling=Sampling(temperature=1.0, seed=number))


def random_prompts(vocabulary: int, count: int, tokens: int, generator: torch.Generator) -> list[IdArray]:
    """`count` prompts of `tokens` tokens each, as an engine takes them without converting them."""
    ids = torch.randint(0, vocabulary, (count, tokens), generator=generator, dtype=torch.int32)
    return [array(IDS, row.numpy().tobytes()) for row in ids]


@contextlib.contextmanager
def _layer_by_layer(model: GptOssModel) -> Iterator[None]:
    """In here no step is one launch, which routes out of sight."""
    one_token, model.one_token = model.one_token, None
    try:
        yield
    finally:
        model.one_token = one_token


def _check_prompt(event: object, tokens: int) -> None:
    """Raises RuntimeError where it is the end of a prompt of so many tokens that was refused or failed."""
    if isinstance(event, Error):
        raise RuntimeError(f"prompt of {tokens} tokens: {event.code}: {event.message}")


def _check(events: Sequence[tuple[object, object]], batch: int) -> None:
    """Raises RuntimeError unless a step gave every sequence one token."""
    errors = [event for _, event in events if isinstance(event, Error)]
    tokens = sum(isinstance(event, Tokens) for _, event in events)
    if errors or tokens != batch:
        raise RuntimeError(f"a step gave {tokens} tokens to {batch} sequences; errors: {errors}")
