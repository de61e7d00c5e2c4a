"""Steps as CUDA graphs: forward pass and drawing of tokens, one graph a shape, replayed from static buffers.

Invariant: padding to a graph's shape changes no real row, and a replay gives what the same step run eagerly gives. Two
steps may be under way: the second takes tokens of the first on the device, and the host waits for an event behind the
one whose tokens it wants, never for the stream. On a CPU the same steps run without capture. Must not know requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gptoss_trt.ops import ops
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import (
    MAX_ROWS,
    GraphShape,
    is_decode,
    is_ends_only,
    padded_rows,
    padded_width,
    prompt_size,
)
from gptoss_trt.runtime.model.step_buffers import HOST_SETS, StepBuffers, StepShape


class Forward(Protocol):
    """The forward pass of a batch on the device: logits fp32 [R, vocabulary]."""

    def __call__(self, batch: StepBatch, *, ends_only: bool = False) -> torch.Tensor: ...


WARM_UPS = 1  # eager runs before a capture: kernels are compiled, libraries take their workspaces


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


class _Ends(NamedTuple):
    """What a step leaves."""

    tokens: bool
    logits: bool


@dataclass
class _Graph:
    """One shape: what it ends with, its views of the buffers, the captured work (None on a CPU), its logits, or its
    tokens where it leaves no logits."""

    ends: _Ends
    shape: StepShape
    work: torch.cuda.CUDAGraph | None
    output: torch.Tensor


class StepGraphs:
    """Runs steps of `forward`.

    `full_width` and `window_width`: blocks of either pool that one decoding sequence holds at most. With
    `prompt_tokens` steps of prompts of up to that many tokens with their padding are served too; those see
    `prompt_window` blocks of a window at most.
    """

    def __init__(
        self,
        forward: Forward,
        vocabulary: int,
        full_width: int,
        window_width: int,
        device: torch.device,
        *,
        prompt_tokens: int = 0,
        prompt_window: int = 0,
        ends_only: bool = False,
    ) -> None:
        self._forward = forward
        self._ends_only = ends_only  # of steps of prompts
        self._vocabulary = vocabulary
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = StepBuffers(
            MAX_ROWS, padded_width(full_width), window_width, device,
            prompt_tokens=prompt_tokens, prompt_window=prompt_window,
        )  # fmt: skip
        self._events = [self._event() for _ in range(HOST_SETS)]  # behind the last step that used each host memory
        self._turn = 0
        self._graphs: dict[tuple[_Ends, GraphShape], _Graph] = {}
        self._last: _Graph | None = None
        self._logits: torch.Tensor | None = None  # where graphs that end with logits put them
        self._pool: Any = None  # one memory pool for all graphs: none runs beside another
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(self, batch: StepBatch) -> GraphShape | None:
        """The shape of the graph that serves a batch in host memory, None where none does."""
        sequences = batch.context_lens.numel()
        if is_decode(batch):
            return GraphShape(padded_rows(sequences), padded_rows(sequences), padded_width(batch.full_blocks.shape[1]))
        shape = self.prompt_shape(batch.token_ids.numel(), sequences)
        return shape if shape is not None and is_ends_only(batch) else None

    def prompt_shape(self, tokens: int, sequences: int) -> GraphShape | None:
        """The shape of the graph that serves a step of prompts of which no logits are wanted but of last tokens, None
        where none does."""
        size = prompt_size(tokens, sequences)
        if size is None or size[0] > self._buffers.prompt_tokens:
            return None
        return GraphShape(*size, self._buffers.full_width)

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """A step without a graph runs in here: on the stream of captures, in the same workspaces and memory as the
        eager run ahead of each, behind all that was handed to the current stream, which then goes on behind it."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @torch.inference_mode()
    def launch(self, batch: StepBatch, draws: Draws, shape: GraphShape | None = None) -> Launched:
        """Starts a step whose batch lies in host memory and has a shape; it ends with a token for each row of its
        logits. `shape` is what shape_for gave, where the caller has asked."""
        self._run(True, batch, draws, shape)
        return self._launched(len(batch.logits_rows))

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
    def logits(self, batch: StepBatch, shape: GraphShape | None = None) -> torch.Tensor:
        """Logits fp32 [R, vocabulary] of a batch in host memory that has a shape; the next call overwrites them.
        `shape` as in launch."""
        rows = len(batch.logits_rows)
        graph = self._run(False, batch, Draws.greedy(rows), shape)
        self._launched(0)
        return graph.output[:rows]

    @torch.inference_mode()
    def prepare(self, rows: int, blocks: int, *, draws: bool = True) -> None:
        """Captures the graph for up to `rows` decoding sequences of up to `blocks` blocks, unless it is there."""
        self._graph(draws, GraphShape(padded_rows(rows), padded_rows(rows), padded_width(blocks)))

    @torch.inference_mode()
    def prepare_prompts(self, tokens: int, sequences: int) -> None:
        """Captures the graph for steps of prompts of up to so many tokens and sequences, unless it is there or
        steps of that size have none."""
        shape = self.prompt_shape(tokens, sequences)
        if shape is not None:
            self._graph(True, shape)

    @torch.inference_mode()
    def run_again(self) -> torch.Tensor:
        """The last step once more, eagerly, with the inputs that still are in its buffers: logits [padded R,
        vocabulary] or, where it kept none, tokens int32 [padded R], as that step gave. For measuring and comparing."""
        graph = self._last_graph()
        with self.eagerly():
            output = self._step(graph.ends, graph.shape)
        return output if graph.ends.logits else output[int(graph.shape.turn)].clone()  # reading it waits

    @property
    def last_work(self) -> torch.cuda.CUDAGraph | None:
        """The graph of the last step, to be replayed with the inputs that still are in its buffers; None on a CPU."""
        return self._last_graph().work

    def _last_graph(self) -> _Graph:
        if self._last is None:
            raise RuntimeError("no step has run yet")
        return self._last

    def _run(self, draws_tokens: bool, batch: StepBatch, draws: Draws, shape: GraphShape | None) -> _Graph:
        shape = shape or self.shape_for(batch)
        if shape is None:
            raise ValueError(
                f"no graph serves a step of {len(batch.token_ids)} tokens, {len(batch.context_lens)} sequences and "
                f"{len(batch.logits_rows)} rows of logits"
            )
        graph = self._graph(draws_tokens, shape)
        self._next_turn()
        graph.shape.fill(batch, draws, self._turn)
        if graph.work is None:
            graph.output = self._step(graph.ends, graph.shape)
        else:
            graph.work.replay()
        self._last = graph
        return graph

    def _graph(self, draws: bool, shape: GraphShape) -> _Graph:
        """A step of prompts ends with both, which costs it little; one that decodes with what is asked for."""
        ends = _Ends(draws or not shape.decodes, not draws or not shape.decodes)
        key = (ends, shape)
        if key not in self._graphs:
            if ends.logits and (self._logits is None or len(self._logits) < shape.sequences):
                size = (shape.sequences, self._vocabulary)  # the graphs of fewer sequences keep theirs
                self._logits = torch.empty(size, dtype=torch.float32, device=self._device)
            views = self._buffers.shape(shape)
            self._graphs[key] = _Graph(ends, views, *self._capture(ends, views))
        return self._graphs[key]

    def _step(self, ends: _Ends, shape: StepShape) -> torch.Tensor:
        logits = self._forward(shape.batch, ends_only=self._ends_only and not shape.decodes)
        buffers, rows = self._buffers, shape.rows
        if ends.tokens:
            ops.sample(logits, shape.temperature, shape.share, shape.turn, buffers.landing, buffers.drawn[:rows])
        if not ends.logits:
            return buffers.landing[:, :rows]
        assert self._logits is not None
        return self._logits[:rows].copy_(logits)

    def _capture(self, ends: _Ends, shape: StepShape) -> tuple[torch.cuda.CUDAGraph | None, torch.Tensor]:
        if self._stream is None:
            return None, torch.empty(0)
        torch.cuda.current_stream(self._device).synchronize()  # a step under way reads the buffers
        drawn, landing = self._buffers.drawn.clone(), self._buffers.landing.clone()
        shape.clear()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                self._step(ends, shape)  # all rows are padding: nothing is written to the cache
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = self._step(ends, shape)
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
