"""An engine's weights from a seed, made on the device tensor by tensor when the model asks for them.

MXFP4 nibbles are uniform and group scales 2^-9 to 2^-7; matrices, biases and sinks are N(0, 0.02), norms 1. FP8
storage holds the numbers of the same seed's MXFP4 experts. Invariant: a tensor depends on seed, name and shape only,
and nothing is kept here, so that a layer's packed copy replaces it. Must not know the forward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from gptoss_trt.build_engine.spec import Formats, ModelConfig, ParallelMapping, expected_tensors, qkv_segments
from gptoss_trt.ops.storage import dense_to_fp8, mxfp4_to_fp8

SPREAD = 0.02
SCALE_BYTES = (127 - 9, 127 - 7)  # lowest and highest group scale, 2^-9 and 2^-7
CHUNK = 1 << 28  # numbers drawn at once: a GiB of fp32


class RandomTensors(Mapping[str, torch.Tensor]):
    """The tensors of a one-rank engine by name, a new one at each look."""

    def __init__(self, config: ModelConfig, formats: Formats, seed: int, device: torch.device) -> None:
        self._table = expected_tensors(config, formats, ParallelMapping(), 0)
        self._segments = qkv_segments(config, ParallelMapping())
        self._config, self._seed, self._device = config, seed, device
        self._scales: dict[str, torch.Tensor] = {}  # of an FP8 weight that was just made, until it is asked for

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, word = self._table[name]
        stem, _, part = name.rpartition(".")
        if part == "weight_scale":
            if name not in self._scales:
                self._make_fp8(stem)
            return self._scales.pop(name)
        if word == "F8_E4M3":
            return self._make_fp8(stem)
        if word == "U8":
            low, high = (0, 255) if part == "blocks" else SCALE_BYTES
            return self._bytes(name, shape, low, high)
        if word == "F32" or stem.endswith("norm"):
            return torch.ones(shape, dtype=torch.float32 if word == "F32" else torch.bfloat16, device=self._device)
        return self._normal(name, shape)

    def _make_fp8(self, stem: str) -> torch.Tensor:
        """The e4m3 weight of `stem`; its scales wait in _scales."""
        shape, _ = self._table[f"{stem}.weight"]
        if len(shape) == 3:
            experts, rows, columns = shape
            blocks = self._bytes(f"{stem}.blocks", (experts, rows, columns // 32, 16), 0, 255)
            pair = mxfp4_to_fp8(blocks, self._bytes(f"{stem}.scales", (experts, rows, columns // 32), *SCALE_BYTES))
        else:
            segments = self._segments if stem.endswith("qkv") else shape[:1]
            pair = dense_to_fp8(self._normal(f"{stem}.weight", shape), segments)
        weight, self._scales[f"{stem}.weight_scale"] = pair
        return weight

    def _generator(self, name: str) -> torch.Generator:
        generator = torch.Generator(self._device)
        return generator.manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))

    def _bytes(self, name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(
            low, high + 1, shape, dtype=torch.uint8, device=self._device, generator=self._generator(name)
        )

    def _normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = self._generator(name)
        out = torch.empty(torch.Size(shape).numel(), dtype=torch.bfloat16, device=self._device)
        for part in torch.split(out, CHUNK):
            part.copy_(torch.randn(part.shape, generator=generator, device=self._device).mul_(SPREAD))
        return out.view(shape)
