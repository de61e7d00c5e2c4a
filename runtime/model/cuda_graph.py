"""Decode steps as CUDA graphs: forward pass and drawing of tokens, one graph a shape, replayed from static buffers.

Invariant: a graph's shape is (padded batch, padded width of the block table); padding changes no real row, and a replay
gives what the same step run eagerly gives. On a CPU the same steps run without capture. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.draw import draw_tokens
from gptoss_trt.runtime.model.step_buffers import StepBuffers

Forward = Callable[[StepBatch], torch.Tensor]

SMALL_BATCHES = (1, 2, 4, 8)
BATCH_STEP = 8  # from 8 rows on
MAX_ROWS = 256
MIN_WIDTH = 32  # blocks of the narrowest table: parts without keys cost little, another graph a stall
WARM_UPS = 2  # eager runs before a capture: kernels are compiled, libraries take their workspaces


def padded_rows(rows: int) -> int:
    """The batch size of the graph that serves `rows` sequences: 1, 2, 4, 8, then steps of 8."""
    return next((size for size in SMALL_BATCHES if rows <= size), -(-rows // BATCH_STEP) * BATCH_STEP)


def padded_width(blocks: int) -> int:
    """The width of the block table of the graph that serves `blocks` blocks a sequence: a power of two."""
    return max(MIN_WIDTH, 1 << (blocks - 1).bit_length())


def graph_sizes(most: int) -> list[int]:
    """Every batch size that has a graph of its own, up to the one that serves `most` sequences."""
    return sorted({padded_rows(rows) for rows in range(1, min(most, MAX_ROWS) + 1)})


def is_decode(batch: StepBatch) -> bool:
    """Whether a batch in host memory is what a graph can run: one new token a sequence, a row of logits for each."""
    sequences = len(batch.context_lens)
    return (
        0 < sequences <= MAX_ROWS
        and len(batch.token_ids) == len(batch.logits_rows) == sequences
        and bool((batch.query_start.diff() == 1).all())
    )


@dataclass
class _Graph:
    """One shape: whether it ends with tokens, its buffers, the captured work (None on a CPU), its output and a pinned
    place for the tokens."""

    draws: bool
    buffers: StepBuffers
    work: torch.cuda.CUDAGraph | None
    output: torch.Tensor
    host: torch.Tensor


class DecodeGraphs:
    """Runs decode steps of `forward`, a function of device batches whose logits are fp32 [R, vocabulary].

    `window_width`: window blocks that one decoding sequence holds at most.
    """

    def __init__(self, forward: Forward, vocabulary: int, window_width: int, device: torch.device) -> None:
        self._forward = forward
        self._vocabulary = vocabulary
        self._window_width = window_width
        self._device = device
        self._graphs: dict[tuple[bool, int, int], _Graph] = {}
        self._last: _Graph | None = None
        self._logits: torch.Tensor | None = None  # where graphs that end with logits put them
        self._pool: Any = None  # one memory pool for all graphs: none runs beside another
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def decode(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> list[int]:
        """The next token of each sequence of a decode batch in host memory, as draw_tokens chooses it."""
        graph = self._run(True, batch, temperature, share)
        graph.host.copy_(graph.output, non_blocking=True)
        self._wait()
        return graph.host[: len(batch.context_lens)].tolist()

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Logits fp32 [R, vocabulary] of a decode batch in host memory; the next call overwrites them."""
        zeros = [0.0] * len(batch.context_lens)
        graph = self._run(False, batch, zeros, zeros)
        self._wait()  # the host's buffers are free for the next step
        return graph.output[: len(batch.context_lens)]

    @torch.inference_mode()
    def prepare(self, rows: int, blocks: int, *, draws: bool = True) -> None:
        """Captures the graph for up to `rows` sequences of up to `blocks` blocks, unless it is there."""
        self._graph(draws, padded_rows(rows), padded_width(blocks))

    @torch.inference_mode()
    def run_again(self) -> torch.Tensor:
        """The last step once more, eagerly, with the inputs that still are in its buffers: tokens int32 [padded R] or
        logits [padded R, vocabulary], as that step gave. For measuring and comparing."""
        graph = self._last_graph()
        return self._step(graph.draws, graph.buffers)

    @property
    def last_work(self) -> torch.cuda.CUDAGraph | None:
        """The graph of the last step, to be replayed with the inputs that still are in its buffers; None on a CPU."""
        return self._last_graph().work

    def _last_graph(self) -> _Graph:
        if self._last is None:
            raise RuntimeError("no decode step has run yet")
        return self._last

    def _run(self, draws: bool, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> _Graph:
        rows, width = padded_rows(len(batch.context_lens)), padded_width(batch.full_blocks.shape[1])
        graph = self._graph(draws, rows, width)
        graph.buffers.fill(batch, temperature, share)
        if graph.work is None:
            graph.output = self._step(draws, graph.buffers)
        else:
            graph.work.replay()
        self._last = graph
        return graph

    def _graph(self, draws: bool, rows: int, width: int) -> _Graph:
        key = (draws, rows, width)
        if key not in self._graphs:
            buffers = StepBuffers(rows, width, self._window_width, self._device)
            if not draws and self._logits is None:
                self._logits = torch.empty((MAX_ROWS, self._vocabulary), dtype=torch.float32, device=self._device)
            pinned = self._device.type == "cuda"
            host = torch.empty(rows, dtype=torch.int32, pin_memory=pinned)
            work, output = self._capture(draws, buffers)
            self._graphs[key] = _Graph(draws, buffers, work, output, host)
        return self._graphs[key]

    def _step(self, draws: bool, buffers: StepBuffers) -> torch.Tensor:
        logits = self._forward(buffers.batch)
        if draws:
            return draw_tokens(logits, buffers.temperature, buffers.share)
        assert self._logits is not None
        return self._logits[: buffers.rows].copy_(logits)

    def _capture(self, draws: bool, buffers: StepBuffers) -> tuple[torch.cuda.CUDAGraph | None, torch.Tensor]:
        if self._stream is None:
            return None, torch.empty(0)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                self._step(draws, buffers)  # all rows are padding: nothing is written to the cache
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = self._step(draws, buffers)
        self._pool = graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph, output

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
