"""What captured steps read: one block of device memory for every shape of step, filled from the host by one copy.

Invariant: the tensors of a shape never move, so a captured graph may read them; rows behind the real ones are padding
as ops/schemas.py says (no block, context 0, not counted). There are two blocks of host memory, so that a step's inputs
may be written while the step before still reads its own, and two rows of `landing`, where steps that end with tokens
leave them in turn; `turn` says which. Must not know how a step runs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gptoss_trt.ops import ops
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.draw import Draws
from gptoss_trt.runtime.model.graph_shapes import GraphShape

ALIGNMENT = 32  # int32 words: 128 bytes
HOST_SETS = 2
_FLOATS = ("temperature", "share")


class StepBuffers:
    """Memory for steps of at most `rows` sequences and tables of `full_width` and `window_width` blocks; with
    `prompt_tokens` for steps of prompts of that many tokens too, whose window tables have `prompt_window` blocks."""

    def __init__(
        self,
        rows: int,
        full_width: int,
        window_width: int,
        device: torch.device,
        *,
        prompt_tokens: int = 0,
        prompt_window: int = 0,
    ) -> None:
        self.rows = rows
        self.prompt_tokens = prompt_tokens
        self.full_width = full_width
        self.window_width = window_width
        self.prompt_window = prompt_window
        largest = [GraphShape(rows, rows, full_width)]
        if prompt_tokens:
            largest.append(GraphShape(prompt_tokens, rows, full_width))
        total = max(sum(map(_aligned, self.sizes(shape).values())) for shape in largest)
        self.memory = torch.zeros(total, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int32, device=device)  # by the step before, never negative
        self.fed = torch.zeros(max(rows, prompt_tokens), dtype=torch.int32, device=device)
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.host = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_SETS)]
        self.landing = torch.zeros((HOST_SETS, rows), dtype=torch.int32, pin_memory=pinned)

    def shape(self, shape: GraphShape) -> StepShape:
        """The views of steps of this shape. Raises ValueError for more than there is memory for."""
        most = self.rows if shape.decodes else self.prompt_tokens
        if shape.sequences > self.rows or shape.width > self.full_width or shape.tokens > most:
            raise ValueError(
                f"a step of {shape.tokens} tokens and {shape.sequences} sequences of {shape.width} blocks; there is "
                f"memory for {most} and {self.rows} of {self.full_width}"
            )
        return StepShape(self, shape)

    def sizes(self, shape: GraphShape) -> dict[str, int]:
        """Words of each part of a step's memory, in its order."""
        tokens, sequences = shape.tokens, shape.sequences
        parts = dict.fromkeys(("token_ids", "source", "positions"), tokens)
        parts |= dict.fromkeys(("context_lens", "window_first_block", *_FLOATS), sequences)
        parts |= {"turn": 1, "query_start": sequences + 1}
        if not shape.decodes:
            parts["logits_rows"] = sequences
        window = self.window_width if shape.decodes else self.prompt_window
        return parts | {"window_blocks": sequences * window, "full_blocks": sequences * shape.width}


class StepShape:
    """A batch of one shape in the memory of `buffers`, with what draws tokens."""

    def __init__(self, buffers: StepBuffers, shape: GraphShape) -> None:
        self.rows = shape.sequences
        self.decodes = shape.decodes
        self._buffers = buffers
        sizes = buffers.sizes(shape)
        places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            places[name] = slice(end, end + size)
            end += _aligned(size)
        tables = {name: (self.rows, sizes[name] // self.rows) for name in ("full_blocks", "window_blocks")}
        there = {name: buffers.memory[place].view(tables.get(name, (-1,))) for name, place in places.items()}
        self.temperature, self.share = (there[name].view(torch.float32) for name in _FLOATS)
        self.turn = there["turn"]
        self._memory, self._blocks = buffers.memory[:end], [host[:end] for host in buffers.host]
        self._host = [
            {name: _numpy(host[place], name, tables.get(name)) for name, place in places.items()}
            for host in buffers.host
        ]
        self._source_at = places["source"].start
        self._ids = [host[places["token_ids"]] for host in buffers.host]
        self.batch = StepBatch(
            token_ids=buffers.fed[: shape.tokens],
            positions=there["positions"],
            query_start=there["query_start"],
            context_lens=there["context_lens"],
            full_blocks=there["full_blocks"],
            window_blocks=there["window_blocks"],
            window_first_block=there["window_first_block"],
            logits_rows=buffers.order[: self.rows] if shape.decodes else there["logits_rows"],
        )

    def clear(self) -> None:
        """All rows become padding, on the device too."""
        empty = torch.empty(0, dtype=torch.int32)
        table = torch.empty((0, 0), dtype=torch.int32)
        none = StepBatch(empty, empty, torch.zeros(1, dtype=torch.int32), empty, table, table, empty, empty)
        self.fill(none, Draws.greedy(0), 0)

    def fill(self, batch: StepBatch, draws: Draws, chosen: int) -> None:
        """Copies a batch in host memory, which this shape has room for, into host block `chosen`, starts its way to the
        device and takes the tokens there that the step before draws. The step that read this block last must have
        ended."""
        fields = self._host[chosen]
        for name in ("token_ids", "positions", "context_lens", "window_first_block"):
            _fill(fields[name], getattr(batch, name).numpy())
        if "logits_rows" in fields:
            _fill(fields["logits_rows"], batch.logits_rows.numpy())
        _fill(fields["temperature"], draws.temperature)
        _fill(fields["share"], draws.share)
        fields["source"][:] = -1
        if draws.source is not None:
            fields["source"][: len(draws.source)] = draws.source
        fields["turn"][:] = chosen
        starts = batch.query_start.numpy()
        _fill(fields["query_start"], starts, starts[-1])
        for name in ("full_blocks", "window_blocks"):
            _fill_table(fields[name], getattr(batch, name).numpy())
        if self.decodes or draws.source is not None:
            ops.feed(self._blocks[chosen], self._buffers.drawn, self._source_at, self._memory, self.batch.token_ids)
        else:  # a step of known tokens: few follow another at once, most have the host to wait for
            self._memory.copy_(self._blocks[chosen], non_blocking=True)
            self.batch.token_ids.copy_(self._ids[chosen], non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _numpy(part: torch.Tensor, name: str, table: tuple[int, int] | None) -> NDArray[np.generic]:
    values = part.numpy()
    if name in _FLOATS:
        return values.view(np.float32)
    return values if table is None else values.reshape(table)


def _fill(field: NDArray[np.generic], values: NDArray[np.generic], padding: int = 0) -> None:
    real = len(values)
    field[:real] = values
    if real < len(field):
        field[real:] = padding


def _fill_table(field: NDArray[np.generic], table: NDArray[np.generic]) -> None:
    real, width = table.shape
    field[:real, :width] = table
    if width < field.shape[1]:
        field[:real, width:] = -1
    if real < len(field):
        field[real:] = -1
