"""Reads one canonical weight at a time from any checkpoint layout, in the orientation of an engine: [outputs, inputs].

Invariant: numbers pass unchanged; what comes back is either plain values or the checkpoint's own packed form. Must not
round, quantise or cut for ranks.

An nvidia-modelopt FP8 export is the Hugging Face BF16 layout in which a quantised matrix is e4m3 and has a
`weight_scale` beside it (`..._proj.weight_scale`; for the experts `gate_up_proj_weight_scale`), real = stored x scale:
one number (FP8), one an output (FP8_PER_CHANNEL_PER_TOKEN), or one a 128 x 128 block (FP8_PB), the experts' also one an
expert. `input_scale` is a static activation scale, `k_scale` and `v_scale` belong to an FP8 KV cache.
hf_quant_config.json names the algorithm and the modules left alone (router, lm head).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_trt.build_engine.checkpoint import Checkpoint
from gptoss_trt.build_engine.safetensors_file import CheckpointError, TensorReader
from gptoss_trt.reference import fp8_block


@dataclass(frozen=True)
class Plain:
    """Values [N, K] or [N] in bf16, f16 or f32."""

    values: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """MXFP4 of one expert: u8 blocks [N, K/32, 16], u8 scales [N, K/32]."""

    blocks: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Fp8:
    """e4m3 weight [N, K] and f32 scale [ceil(N/128), ceil(K/128)]."""

    weight: torch.Tensor
    scale: torch.Tensor


class Source:
    """A checkpoint as canonical weights. Safe to use from several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._reader = TensorReader()

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def close(self) -> None:
        self._reader.close()

    def has(self, canonical: str) -> bool:
        return canonical in self.checkpoint.tensors

    def read(self, canonical: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor as it is stored."""
        return self._reader.read(self.checkpoint.keys[canonical], self.checkpoint.tensors[canonical], start, stop)

    def vector(self, canonical: str) -> torch.Tensor:
        """A whole tensor of plain values, the bias of qkv put together where q, k and v are apart."""
        if canonical.endswith(".qkv.bias") and not self.has(canonical):
            stem = canonical.removesuffix("qkv.bias")
            return torch.cat([self.read(f"{stem}{part}.bias") for part in "qkv"])
        return self.read(canonical)

    def dense(self, stem: str, start: int = 0, stop: int | None = None) -> list[Plain | Fp8]:
        """Rows [start, stop) of `{stem}.weight`; q, k and v as three segments. `start` is a multiple of 128."""
        if stem.endswith(".qkv"):
            return self._qkv(stem.removesuffix("qkv"))
        return [self._matrix(stem, start, stop)]

    def _qkv(self, prefix: str) -> list[Plain | Fp8]:
        if not self.has(f"{prefix}qkv.weight"):
            return [self._matrix(f"{prefix}{part}", 0, None) for part in "qkv"]
        config = self.checkpoint.config
        rows = self.read(f"{prefix}qkv.weight").split([config.q_size, config.kv_size, config.kv_size])  # type: ignore[no-untyped-call]
        return [Plain(part) for part in rows]

    def _matrix(self, stem: str, start: int, stop: int | None) -> Plain | Fp8:
        values = self.read(f"{stem}.weight", start, stop)
        if values.dtype != fp8_block.E4M3:
            return Plain(values)
        rows = self.checkpoint.tensors[f"{stem}.weight"].shape[0]
        scale = self._weight_scale(stem)
        if scale.numel() == rows != 1 and scale.numel() != _grid_size(rows, values.shape[1]):
            per_row = scale.reshape(rows, 1)[start : start + values.shape[0]]
            return Plain(values.float() * per_row)
        grid = self._grid(stem, scale, rows, values.shape[1])
        first = start // fp8_block.BLOCK
        return Fp8(values, grid[first : first + -(-values.shape[0] // fp8_block.BLOCK)])

    def expert(self, stem: str, expert: int) -> Packed | Plain | Fp8:
        """One expert's `{stem}` weight, [outputs, inputs] in every layout (BF16 and FP8 are stored input x output)."""
        if self.has(f"{stem}.blocks"):
            blocks = self.read(f"{stem}.blocks", expert, expert + 1)[0]
            return Packed(blocks, self.read(f"{stem}.scales", expert, expert + 1)[0])
        values = self.read(f"{stem}.weight", expert, expert + 1)[0].T.contiguous()
        if values.dtype != fp8_block.E4M3:
            return Plain(values)
        scale = self._weight_scale(stem)
        if scale.ndim and scale.shape[0] == self.checkpoint.config.num_experts and scale.numel() > 1:
            scale = scale[expert]
        rows, columns = values.shape
        if scale.numel() == rows != 1 and scale.numel() != _grid_size(rows, columns):
            return Plain(values.float() * scale.reshape(rows, 1))
        if scale.numel() > 1:
            scale = scale.reshape(-1, -(-rows // fp8_block.BLOCK)).T.contiguous()
        return Fp8(values, self._grid(stem, scale, rows, columns))

    def _weight_scale(self, stem: str) -> torch.Tensor:
        name = f"{stem}.weight_scale"
        if not self.has(name):
            weight = self.checkpoint.tensors[f"{stem}.weight"]
            key = self.checkpoint.keys[f"{stem}.weight"]
            raise CheckpointError(f"{weight.path}: tensor {key} is {weight.dtype} and has no weight_scale")
        scale = self.read(name).float()
        if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()):
            entry = self.checkpoint.tensors[name]
            raise CheckpointError(
                f"{entry.path}: tensor {self.checkpoint.keys[name]} holds a scale that is not positive"
            )
        return scale

    def _grid(self, stem: str, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """One scale per 128 x 128 block from a scalar or from modelopt's [N/128, K/128] or [N/128, 1, K/128, 1]."""
        shape = (-(-rows // fp8_block.BLOCK), -(-columns // fp8_block.BLOCK))
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(shape).contiguous()
        if scale.numel() == shape[0] * shape[1]:
            return scale.reshape(shape)
        entry, key = self.checkpoint.tensors[f"{stem}.weight_scale"], self.checkpoint.keys[f"{stem}.weight_scale"]
        raise CheckpointError(
            f"{entry.path}: tensor {key} of shape {list(entry.shape)} is no scale "
            f"for a weight of [{rows}, {columns}]: expected one number, [{rows}] or {list(shape)}"
        )


def _grid_size(rows: int, columns: int) -> int:
    return -(-rows // fp8_block.BLOCK) * -(-columns // fp8_block.BLOCK)
