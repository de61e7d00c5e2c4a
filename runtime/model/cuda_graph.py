"""Decode steps as CUDA graphs: forward pass and drawing of tokens, one graph a shape, replayed from static buffers.

Invariant: a graph's shape is (padded batch, padded width of the block table); padding changes no real row, and a replay
gives what the same step run eagerly gives. Two steps may be under way: the second takes tokens of the first on the
device, and the host waits for an event behind the one whose tokens it wants, never for the stream. On a CPU the same
steps run without capture. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gptoss_trt.ops import ops
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.step_buffers import HOST_SETS, StepBuffers, StepShape

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
        and _one_each(batch.query_start.numpy())
    )


def _one_each(starts: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
    return bool((starts[1:] - starts[:-1] == 1).all())


class Launched:
    """Tokens of a step that runs, which it leaves in `host` (int32, pinned on a GPU); `event` lies behind it."""

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._event = event

    def tokens(self) -> list[int]:
        """Waits for the step; a token for each row of logits, NOT_FINITE where they are not finite. To be called before
        the second launch behind this one. Raises RuntimeError ("CUDA error ...") when the device broke."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host.numpy().tolist()
        return tokens


@dataclass
class _Graph:
    """One shape: whether it ends with tokens, its views of the buffers, the captured work (None on a CPU), its
    output."""

    draws: bool
    shape: StepShape
    work: torch.cuda.CUDAGraph | None
    output: torch.Tensor


class DecodeGraphs:
    """Runs decode steps of `forward`, a function of device batches whose logits are fp32 [R, vocabulary].

    `full_width` and `window_width`: blocks of either pool that one decoding sequence holds at most.
    """

    def __init__(
        self, forward: Forward, vocabulary: int, full_width: int, window_width: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._vocabulary = vocabulary
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = StepBuffers(MAX_ROWS, padded_width(full_width), window_width, device)
        self._events = [self._event() for _ in range(HOST_SETS)]  # behind the last step that used each host memory
        self._turn = 0
        self._graphs: dict[tuple[bool, int, int], _Graph] = {}
        self._last: _Graph | None = None
        self._logits: torch.Tensor | None = None  # where graphs that end with logits put them
        self._pool: Any = None  # one memory pool for all graphs: none runs beside another
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def launch(self, batch: StepBatch, draws: Draws) -> Launched:
        """Starts a decode step whose batch lies in host memory; it ends with the next token of each sequence."""
        self._run(True, batch, draws)
        return self._launched(len(batch.context_lens))

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, draws: Draws) -> Launched:
        """Ends a step that ran without a graph: draws from its logits, fp32 [R, vocabulary] on the device."""
        self._next_turn()
        rows = len(logits)
        if rows:
            temperature, share = (self.to_device(torch.from_numpy(part)) for part in (draws.temperature, draws.share))
            landing = self._buffers.landing[self._turn : self._turn + 1]
            ops.sample(logits, temperature, share, None, landing, self._buffers.drawn[:rows])
        return self._launched(rows)

    @torch.inference_mode()
    def feed(self, token_ids: torch.Tensor, source: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Puts tokens that the step before drew into `token_ids` [T] on the device (see Draws.source)."""
        places = np.flatnonzero(source >= 0)
        if len(places):
            where, rows = (self.to_device(torch.from_numpy(part)) for part in (places, source[places]))
            token_ids.index_copy_(0, where, self._buffers.drawn.index_select(0, rows))

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in host memory on the device; the host does not wait for it."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._on_gpu else values.clone()

    def decode(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> list[int]:
        """The next token of each sequence of a decode batch in host memory, as the op `sample` chooses it."""
        draws = Draws(np.array(temperature, np.float32), np.array(share, np.float32))
        return self.launch(batch, draws).tokens()

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Logits fp32 [R, vocabulary] of a decode batch in host memory; the next call overwrites them."""
        rows = len(batch.context_lens)
        graph = self._run(False, batch, Draws.greedy(rows))
        self._launched(0)
        return graph.output[:rows]

    @torch.inference_mode()
    def prepare(self, rows: int, blocks: int, *, draws: bool = True) -> None:
        """Captures the graph for up to `rows` sequences of up to `blocks` blocks, unless it is there."""
        self._graph(draws, padded_rows(rows), padded_width(blocks))

    @torch.inference_mode()
    def run_again(self) -> torch.Tensor:
        """The last step once more, eagerly, with the inputs that still are in its buffers: tokens int32 [padded R] or
        logits [padded R, vocabulary], as that step gave. For measuring and comparing."""
        graph = self._last_graph()
        output = self._step(graph.draws, graph.shape)
        return output[int(graph.shape.turn)].clone() if graph.draws else output  # reading it waits for the step

    @property
    def last_work(self) -> torch.cuda.CUDAGraph | None:
        """The graph of the last step, to be replayed with the inputs that still are in its buffers; None on a CPU."""
        return self._last_graph().work

    def _last_graph(self) -> _Graph:
        if self._last is None:
            raise RuntimeError("no decode step has run yet")
        return self._last

    def _run(self, ends_with_tokens: bool, batch: StepBatch, draws: Draws) -> _Graph:
        rows, width = padded_rows(len(batch.context_lens)), padded_width(batch.full_blocks.shape[1])
        graph = self._graph(ends_with_tokens, rows, width)
        self._next_turn()
        graph.shape.fill(batch, draws, self._turn)
        if graph.work is None:
            graph.output = self._step(ends_with_tokens, graph.shape)
        else:
            graph.work.replay()
        self._last = graph
        return graph

    def _graph(self, draws: bool, rows: int, width: int) -> _Graph:
        key = (draws, rows, width)
        if key not in self._graphs:
            shape = self._buffers.shape(rows, width)
            if not draws and self._logits is None:
                self._logits = torch.empty((MAX_ROWS, self._vocabulary), dtype=torch.float32, device=self._device)
            self._graphs[key] = _Graph(draws, shape, *self._capture(draws, shape))
        return self._graphs[key]

    def _step(self, draws: bool, shape: StepShape) -> torch.Tensor:
        logits = self._forward(shape.batch)
        if draws:
            buffers, rows = self._buffers, shape.rows
            ops.sample(logits, shape.temperature, shape.share, shape.turn, buffers.landing, buffers.drawn[:rows])
            return buffers.landing[:, :rows]
        assert self._logits is not None
        return self._logits[: shape.rows].copy_(logits)

    def _capture(self, draws: bool, shape: StepShape) -> tuple[torch.cuda.CUDAGraph | None, torch.Tensor]:
        if self._stream is None:
            return None, torch.empty(0)
        torch.cuda.current_stream(self._device).synchronize()  # a step under way reads the buffers
        drawn, landing = self._buffers.drawn.clone(), self._buffers.landing.clone()
        shape.clear()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                self._step(draws, shape)  # all rows are padding: nothing is written to the cache
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = self._step(draws, shape)
        self._pool = graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.current_stream(self._device).synchronize()
        self._buffers.drawn.copy_(drawn)  # a step may follow that takes its tokens there
        self._buffers.landing.copy_(landing)  # and some may not have been taken by the host
        return graph, output

    # -- what the host shares with the device --------------------------------------------------------------------------

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]

    def _next_turn(self) -> None:
        """Takes the other set of host memory, once the step before the last has left it."""
        self._turn = (self._turn + 1) % HOST_SETS
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()

    def _launched(self, rows: int) -> Launched:
        """The step whose work was just handed to the device, with the tokens that it leaves for `rows` rows."""
        event = self._events[self._turn]
        if event is not None:
            event.record()
        return Launched(self._buffers.landing[self._turn, :rows], event)
