"""What a decode step of a fixed shape reads: one block of device memory, filled from the host by one copy.

Invariant: the tensors of `batch`, `temperature` and `share` never move, so a captured graph may read them; rows behind
the real ones are padding as ops/schemas.py says (no block, context 0, not counted). Must not know how a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_trt.runtime.model.batch import StepBatch

ALIGNMENT = 32  # int32 words: 128 bytes


class StepBuffers:
    """A decode batch of `rows` sequences, tables of `full_width` and `window_width` blocks, with what draws tokens."""

    def __init__(self, rows: int, full_width: int, window_width: int, device: torch.device) -> None:
        shapes = {
            "token_ids": (rows,),
            "positions": (rows,),
            "query_start": (rows + 1,),
            "context_lens": (rows,),
            "window_first_block": (rows,),
            "logits_rows": (rows,),
            "full_blocks": (rows, full_width),
            "window_blocks": (rows, window_width),
            "temperature": (rows,),
            "share": (rows,),
        }
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())
        self.rows = rows
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._fields: dict[str, torch.Tensor] = {}
        there: dict[str, torch.Tensor] = {}
        first = 0
        for name, shape in shapes.items():
            part = slice(first, first + sizes[name])
            self._fields[name], there[name] = self._host[part].view(shape), self._device[part].view(shape)
            first += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
        for name in ("temperature", "share"):
            self._fields[name] = self._fields[name].view(torch.float32)
        self.temperature, self.share = (there.pop(name).view(torch.float32) for name in ("temperature", "share"))
        self.batch = StepBatch(**there)
        self._fields["logits_rows"].copy_(torch.arange(rows))
        self.clear()

    def clear(self) -> None:
        """All rows become padding, on the device too."""
        empty = torch.empty(0, dtype=torch.int32)
        table = torch.empty((0, 0), dtype=torch.int32)
        self.fill(StepBatch(empty, empty, torch.zeros(1, dtype=torch.int32), empty, table, table, empty, empty), (), ())

    def fill(self, batch: StepBatch, temperature: Sequence[float], share: Sequence[float]) -> None:
        """Copies a decode batch in host memory, at most `rows` sequences of one token each, and starts its way to the
        device. The copy before must have arrived (the step that read it has ended)."""
        real = len(batch.context_lens)
        for name in ("token_ids", "positions", "context_lens", "window_first_block"):
            field = self._fields[name]
            field[:real] = getattr(batch, name)
            field[real:] = 0
        torch.arange(self.rows + 1, out=self._fields["query_start"])
        self._fields["query_start"].clamp_(max=real)
        for name in ("full_blocks", "window_blocks"):
            table, field = getattr(batch, name), self._fields[name]
            field.fill_(-1)
            field[:real, : table.shape[1]] = table
        for name, values in (("temperature", temperature), ("share", share)):
            self._fields[name][:real] = torch.tensor(values, dtype=torch.float32)
            self._fields[name][real:] = 0
        self._device.copy_(self._host, non_blocking=True)
