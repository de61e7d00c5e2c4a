"""A model that takes its batches in host memory and runs decode steps as graphs, with the drawing of tokens inside.

Invariant: it gives the logits of the model it holds. Must not know requests or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.cuda_graph import DecodeGraphs, graph_sizes, is_decode
from gptoss_trt.runtime.model.model import GptOssModel


class GraphedModel:
    """`model` behind graphs. `allocate_kv` comes before the first step and drops the graphs captured before."""

    def __init__(self, model: GptOssModel) -> None:
        self.model = model
        self.graphs: DecodeGraphs | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def kv_block_bytes(self, block_tokens: int) -> tuple[int, int]:
        return self.model.kv_block_bytes(block_tokens)

    def allocate_kv(self, full_blocks: int, window_blocks: int, block_tokens: int) -> None:
        self.graphs = None  # they read the old pools
        self.model.allocate_kv(full_blocks, window_blocks, block_tokens)
        widest = -(-(self.config.sliding_window - 1) // block_tokens) + 1
        self.graphs = DecodeGraphs(self.model.forward, self.config.vocab_size, widest, self.model.device)

    def warm(self, most: int) -> int:
        """Makes the graphs of every batch size up to `most` sequences of MIN_WIDTH blocks each, so that no request of
        ordinary length waits for one; longer ones are made when they come. Returns their number."""
        graphs = self._made()
        sizes = graph_sizes(most)
        for rows in sizes:
            graphs.prepare(rows, 1)
        return len(sizes)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits fp32 [R, vocab] on the model's device of a batch in host memory; the next call may overwrite them."""
        if self.graphs is not None and is_decode(batch):
            return self.graphs.logits(batch)
        device = self.model.device
        moved = {field.name: getattr(batch, field.name).to(device, non_blocking=True) for field in fields(StepBatch)}
        return self.model.forward(StepBatch(**moved))

    def decode(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> list[int]:
        """The next tokens of a decode batch in host memory (see draw_tokens; -1: its logits are not finite)."""
        return self._made().decode(batch, temperature, share)

    def _made(self) -> DecodeGraphs:
        if self.graphs is None:
            raise RuntimeError("allocate_kv comes before the first step")
        return self.graphs
