"""Writes cut pieces of converted weights into the files of all ranks.

Invariant: a piece goes to every rank whose cut holds some of it, at its place in the rank's tensor; nothing is written
outside the table of `expected_tensors`. Must not read checkpoints or choose formats.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gptoss_trt.build_engine import shard
from gptoss_trt.build_engine.convert import Parts
from gptoss_trt.build_engine.safetensors_file import TensorWriter
from gptoss_trt.build_engine.shard import Cut, Span
from gptoss_trt.build_engine.spec import (
    BLOCK,
    MXFP4_GROUP,
    FileEntry,
    Formats,
    ModelConfig,
    ParallelMapping,
    expected_tensors,
)
from gptoss_trt.build_engine.spec import rank_file as file_of


class EngineFiles:
    """The weight files of all ranks of an engine under construction. Safe to use from several threads."""

    def __init__(self, folder: Path, config: ModelConfig, formats: Formats, mapping: ParallelMapping) -> None:
        """Creates every rank's file at its full length. Raises OSError, and SpecError as `expected_tensors` does."""
        self._config = config
        self._shares = shard.shares(config, mapping)
        self._tables = [expected_tensors(config, formats, mapping, rank) for rank in range(mapping.world)]
        self._writers: list[TensorWriter] = []
        try:
            for rank, table in enumerate(self._tables):
                self._writers.append(TensorWriter(folder / file_of(rank), table, hashed=True))
        except OSError:
            self.abandon()
            raise

    @property
    def bytes(self) -> int:
        return sum(writer.bytes for writer in self._writers)

    def write_dense(self, prefix: str, stem: str, parts: Parts, chunk: Span | None = None) -> None:
        """A weight outside the experts, `prefix` + `stem` + each part's word.

        `chunk`: the rows of the unsharded weight that the parts hold (borders at multiples of 128); all by default.
        """
        for share, table, writer in zip(self._shares, self._tables, self._writers, strict=True):
            for word, value in parts.items():
                name = f"{prefix}{stem}.{word}" if word else prefix + stem
                weight = f"{stem}.weight" if word == "weight_scale" else f"{stem}.{word}" if word else stem
                cut = shard.cut_attention_and_dense(weight, self._config, share)
                if chunk is None:
                    writer.write(name, _take(value, cut, word))
                else:
                    _write_chunk(writer, name, value, cut, chunk, row_elements=table[name][0][1], word=word)

    def write_expert(self, prefix: str, stem: str, parts: Parts, expert: int) -> None:
        """One expert's weight: `prefix` + `stem` ("gate_up", "down") + each part's word."""
        for share, writer in zip(self._shares, self._writers, strict=True):
            if share.experts[0] <= expert < share.experts[1]:
                cut = shard.cut_expert(f"{stem}.weight", self._config, share)
                for word, value in parts.items():
                    piece = _take(value, cut, word)
                    writer.write(f"{prefix}{stem}.{word}", piece, (expert - share.experts[0]) * piece.numel())

    def write_expert_bias(self, prefix: str, stem: str, bias: torch.Tensor) -> None:
        """All experts' biases [E, N]."""
        for share, writer in zip(self._shares, self._writers, strict=True):
            cut = shard.cut_expert(f"{stem}.bias", self._config, share)
            piece = bias[share.experts[0] : share.experts[1], cut.rows[0][0] : cut.rows[0][1]]
            writer.write(f"{prefix}{stem}.bias", torch.zeros_like(piece) if cut.zero else piece)

    def write_scalar(self, name: str, value: torch.Tensor) -> None:
        """A number that every rank keeps."""
        for writer in self._writers:
            writer.write(name, value)

    def close(self) -> dict[str, FileEntry]:
        """Forces all files to disk; their lengths and hashes. Raises CheckpointError when a tensor is incomplete."""
        for writer in self._writers:
            writer.close()
        return {writer.path.name: FileEntry(writer.bytes, writer.digest()) for writer in self._writers}

    def abandon(self) -> None:
        for writer in self._writers:
            writer.abandon()


def _write_chunk(
    writer: TensorWriter, name: str, value: torch.Tensor, cut: Cut, chunk: Span, *, row_elements: int, word: str
) -> None:
    found = shard.local_rows(cut.rows[0], chunk)
    if found is None:
        return
    (start, stop), first = found
    if word == "weight_scale":
        start, stop, first = start // BLOCK, -(-stop // BLOCK), first // BLOCK
        begin = chunk[0] // BLOCK
    else:
        begin = chunk[0]
    writer.write(name, value[start - begin : stop - begin], first * row_elements)


def _take(value: torch.Tensor, cut: Cut, word: str) -> torch.Tensor:
    """The cut of a whole weight's part, in the part's own units: elements, MXFP4 groups or 128 x 128 blocks."""
    if cut.zero:
        return torch.zeros_like(value)
    rows, columns = cut.rows, cut.columns
    if word == "weight_scale":
        rows, columns = cut.scale_rows(), cut.scale_columns()
    elif word in ("blocks", "scales"):
        columns = (columns[0] // MXFP4_GROUP, columns[1] // MXFP4_GROUP)
    raw = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    piece = raw[rows[0][0] : rows[0][1]] if len(rows) == 1 else torch.cat([raw[first:last] for first, last in rows])
    if piece.ndim > 1:
        piece = piece[:, columns[0] : columns[1]]
    return piece.contiguous().view(value.dtype)
