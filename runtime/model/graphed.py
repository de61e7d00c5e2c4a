"""A model that takes its batches in host memory and runs steps that are not too large as graphs, with the drawing of
tokens inside.

Invariant: it gives the logits of the model it holds. Must not know requests or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.ops import dispatch
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.cuda_graph import Launched, StepGraphs
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import MAX_ROWS, MOST_PROMPT_TOKENS, graph_sizes, is_ends_only, prompt_sizes
from gptoss_trt.runtime.model.model import GptOssModel
from gptoss_trt.runtime.model.step_buffers import ALIGNMENT


class GraphedModel:
    """`model` behind graphs. `allocate_kv` comes before the first step and drops the graphs captured before.

    With `ends_only`, set before that, the last layer of a step of prompts computes one token a sequence where no logits
    of others are wanted (see GptOssModel.forward)."""

    def __init__(self, model: GptOssModel) -> None:
        self.model = model
        self.ends_only = True
        self.graphs: StepGraphs | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return self.model.kv_block_bytes(block_tokens)

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # a step may be under way that nobody waits for
        self.graphs = None  # they read the old pools
        self.model.allocate_kv(full_blocks, window_blocks, block_tokens)
        full = min(full_blocks, -(-self.config.max_context // block_tokens))
        prompt_tokens = self._most_prompt_tokens()
        self.graphs = StepGraphs(
            self.model.forward, self.config.vocab_size, full, self._window_blocks(1, block_tokens), self.model.device,
            prompt_tokens=prompt_tokens, prompt_window=self._window_blocks(prompt_tokens, block_tokens),
            ends_only=self.ends_only,
        )  # fmt: skip

    def _most_prompt_tokens(self) -> int:
        """Of a step of prompts that is a graph; 0 where all of them run eagerly. With results that do not depend on the
        batch each token reads its keys in parts by the width of the table, and a graph's is the widest."""
        if dispatch.is_invariant():
            return 0
        return MOST_PROMPT_TOKENS if self.model.tap is None else min(MOST_PROMPT_TOKENS, self.model.tap.tokens)

    def _window_blocks(self, tokens: int, block_tokens: int) -> int:
        """Blocks of the window pool that a sequence with so many new tokens sees or writes at most."""
        return -(-(self.config.sliding_window - 2 + tokens) // block_tokens) + 1

    def warm(self, most: int, step_tokens: int = 0) -> int:
        """Makes the graphs of every batch size up to `most` sequences of MIN_WIDTH blocks each, so that no request of
        ordinary length waits for one, and those of steps of prompts of up to `step_tokens` tokens; others are made when
        they come. Returns their number."""
        graphs = self._made()
        for tokens, sequences in prompt_sizes(step_tokens, most):
            graphs.prepare_prompts(tokens, sequences)  # the largest first: the others find their memory
        for rows in graph_sizes(most):
            graphs.prepare(rows, 1)
        return len(graphs)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits fp32 [R, vocab] on the model's device of a batch in host memory; the next call may overwrite them."""
        graphs = self._made()
        shape = graphs.shape_for(batch)
        if shape is not None:
            return graphs.logits(batch, shape)
        with graphs.eagerly():
            return self.model.forward(self._moved(batch), ends_only=self._leaves_out(batch))

    @property
    def most_draws(self) -> int:
        """Tokens that one launched step may draw."""
        return MAX_ROWS

    def launch(self, batch: StepBatch, draws: Draws) -> Launched:
        """Starts a step whose batch lies in host memory; it ends with a token for each row of its logits, at most
        `most_draws` (the op `sample`; -1: the logits are not finite). Tokens may come from the step launched before
        it."""
        graphs = self._made()
        shape = graphs.shape_for(batch)
        if shape is not None:
            return graphs.launch(batch, draws, shape)
        with graphs.eagerly():
            moved = self._moved(batch)
            if draws.source is not None:
                graphs.feed(moved.token_ids, draws.source)
            logits = self.model.forward(moved, ends_only=self._leaves_out(batch))
        return graphs.draw(logits, draws)

    def launch_with(self, logits: torch.Tensor, draws: Draws) -> Launched:
        """The end of a launched step whose logits, fp32 [R, vocabulary] on the model's device, come from elsewhere."""
        return self._made().draw(logits, draws)

    def decode(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> list[int]:
        """The next tokens of a decode batch in host memory (-1: its logits are not finite)."""
        return self._made().decode(batch, temperature, share)

    def _moved(self, batch: StepBatch) -> StepBatch:
        """The batch on the model's device, by one copy that the host does not wait for."""
        if self.model.device.type == "cpu":
            return batch
        parts = [getattr(batch, field.name) for field in fields(StepBatch)]
        firsts, end = [], 0
        for part in parts:
            firsts.append(end)
            end += -(-part.numel() // ALIGNMENT) * ALIGNMENT
        packed = torch.empty(end, dtype=torch.int32, pin_memory=True)
        for first, part in zip(firsts, parts, strict=True):
            packed[first : first + part.numel()] = part.reshape(-1)
        there = packed.to(self.model.device, non_blocking=True)
        return StepBatch(
            *(there[first : first + part.numel()].view(part.shape) for first, part in zip(firsts, parts, strict=True))
        )

    def _leaves_out(self, batch: StepBatch) -> bool:
        """Whether the last layer leaves tokens out: there are more than sequences, and no logits of others wanted."""
        return self.ends_only and len(batch.token_ids) > len(batch.context_lens) and is_ends_only(batch)

    def _made(self) -> StepGraphs:
        if self.graphs is None:
            raise RuntimeError("allocate_kv comes before the first step")
        return self.graphs
