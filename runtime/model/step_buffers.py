"""What decode steps read: one block of device memory for every shape of step, filled from the host by one copy.

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

ALIGNMENT = 32  # int32 words: 128 bytes
HOST_SETS = 2
_FLOATS = ("temperature", "share")
_VECTORS = ("token_ids", "source", "positions", "context_lens", "window_first_block", *_FLOATS)


class StepBuffers:
    """Memory for steps of at most `rows` sequences and tables of `full_width` and `window_width` blocks."""

    def __init__(self, rows: int, full_width: int, window_width: int, device: torch.device) -> None:
        self.rows = rows
        self.full_width = full_width
        self.window_width = window_width
        total = sum(_aligned(size) for size in _sizes(rows, full_width, window_width).values())
        self.memory = torch.zeros(total, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int32, device=device)  # by the step before, never negative
        self.fed = torch.zeros(rows, dtype=torch.int32, device=device)
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.host = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(HOST_SETS)]
        self.landing = torch.zeros((HOST_SETS, rows), dtype=torch.int32, pin_memory=pinned)

    def shape(self, rows: int, full_width: int) -> StepShape:
        """The views of steps of `rows` sequences whose full tables have `full_width` blocks.

        Raises ValueError for more than there is memory for.
        """
        if rows > self.rows or full_width > self.full_width:
            raise ValueError(
                f"a step of {rows} sequences of {full_width} blocks; there is memory for {self.rows} of "
                f"{self.full_width}"
            )
        return StepShape(self, rows, full_width)


class StepShape:
    """A decode batch of `rows` sequences in the memory of `buffers`, with what draws tokens."""

    def __init__(self, buffers: StepBuffers, rows: int, full_width: int) -> None:
        self.rows = rows
        self._buffers = buffers
        sizes = _sizes(rows, full_width, buffers.window_width)
        places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            places[name] = slice(end, end + size)
            end += _aligned(size)
        tables = {"full_blocks": (rows, full_width), "window_blocks": (rows, buffers.window_width)}
        there = {name: buffers.memory[place].view(tables.get(name, (-1,))) for name, place in places.items()}
        self.temperature, self.share = (there[name].view(torch.float32) for name in _FLOATS)
        self.turn = there["turn"]
        self._memory, self._blocks = buffers.memory[:end], [host[:end] for host in buffers.host]
        self._host = [
            {name: _numpy(host[place], name, tables.get(name)) for name, place in places.items()}
            for host in buffers.host
        ]
        self._source_at = places["source"].start
        self._starts = np.arange(rows + 1, dtype=np.int32)
        self.batch = StepBatch(
            token_ids=buffers.fed[:rows],
            positions=there["positions"],
            query_start=there["query_start"],
            context_lens=there["context_lens"],
            full_blocks=there["full_blocks"],
            window_blocks=there["window_blocks"],
            window_first_block=there["window_first_block"],
            logits_rows=buffers.order[:rows],
        )

    def clear(self) -> None:
        """All rows become padding, on the device too."""
        empty = torch.empty(0, dtype=torch.int32)
        table = torch.empty((0, 0), dtype=torch.int32)
        none = StepBatch(empty, empty, torch.zeros(1, dtype=torch.int32), empty, table, table, empty, empty)
        self.fill(none, Draws.greedy(0), 0)

    def fill(self, batch: StepBatch, draws: Draws, chosen: int) -> None:
        """Copies a decode batch in host memory, at most `rows` sequences of one token each, into host block `chosen`,
        starts its way to the device and takes the tokens there that the step before draws. The step that read this
        block last must have ended."""
        real = len(batch.context_lens)
        fields = self._host[chosen]
        for name in ("token_ids", "positions", "context_lens", "window_first_block"):
            _fill(fields[name], getattr(batch, name).numpy(), real)
        _fill(fields["temperature"], draws.temperature, real)
        _fill(fields["share"], draws.share, real)
        fields["source"][:] = -1
        if draws.source is not None:
            fields["source"][:real] = draws.source
        fields["turn"][:] = chosen
        np.minimum(self._starts, real, out=fields["query_start"])
        for name in ("full_blocks", "window_blocks"):
            table, field = getattr(batch, name).numpy(), fields[name]
            width = table.shape[1]
            field[:real, :width] = table
            if width < field.shape[1]:
                field[:real, width:] = -1
            if real < self.rows:
                field[real:] = -1
        ops.feed(self._blocks[chosen], self._buffers.drawn, self._source_at, self._memory, self.batch.token_ids)


def _sizes(rows: int, full_width: int, window_width: int) -> dict[str, int]:
    vectors = dict.fromkeys(_VECTORS, rows)
    return vectors | {
        "turn": 1,
        "query_start": rows + 1,
        "window_blocks": rows * window_width,
        "full_blocks": rows * full_width,
    }


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _numpy(part: torch.Tensor, name: str, table: tuple[int, int] | None) -> NDArray[np.generic]:
    values = part.numpy()
    if name in _FLOATS:
        return values.view(np.float32)
    return values if table is None else values.reshape(table)


def _fill(field: NDArray[np.generic], values: NDArray[np.generic], real: int) -> None:
    field[:real] = values
    if real < len(field):
        field[real:] = 0
