"""The packed weights file: what training gives and `expand` takes.

Format: an xz stream of one safetensors file. Tensors, L layers, E experts, U used rows, H hidden, I intermediate:
`used_ids` int32 [U], increasing; `embedding`, `head` bf16 [U, H]; `norm`, `attention_norm`, `moe_norm`, `q`, `k`,
`v`, `out`, `router`, `sinks` and all biases bf16, layers stacked first; `gate`, `up` and `down` as `.blocks` uint8
[L, E, rows, K / 32, 16] (two codes a byte, the first in the low nibble) and `.scales` uint8 [L, E, rows, K / 32]
(exponent + 127). Metadata: `format` = "gptoss-trt demo 1", `embedding_scale` and `head_scale` (of the unused
rows), `seed`.

Invariant: unpacking and rounding again changes nothing. Knows no checkpoint layout.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from gptoss_trt.build_engine.demo.network import EXPERT_MATRICES, HEAD_ROLL, random_rows
from gptoss_trt.build_engine.demo.rounding import GROUP, mxfp4_codes, mxfp4_values
from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE

FORMAT = "gptoss-trt demo 1"
ROW_SEED = 20260
EXPONENT_BIAS = 127
CHUNK_ROWS = 16_384  # rows that are widened to fp32 at a time


class PackError(ValueError):
    """A packed weights file that cannot be used; the text names what is wrong."""


@dataclass(frozen=True)
class Packed:
    """The content of a packed file."""

    used_ids: Tensor
    tensors: dict[str, Tensor]
    embedding_scale: float
    head_scale: float
    seed: int


def _nibbles(codes: Tensor) -> Tensor:
    pairs = codes.reshape(*codes.shape[:-1], -1, GROUP // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _codes(blocks: Tensor) -> Tensor:
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)


def pack_weights(masters: dict[str, Tensor], used_ids: list[int], path: Path) -> int:
    """Writes the packed file and returns its length in bytes. The expert matrices are rounded to MXFP4."""
    tensors: dict[str, Tensor] = {"used_ids": torch.tensor(used_ids, dtype=torch.int32)}
    for name, value in masters.items():
        weight = value.detach().float().cpu()
        if name in EXPERT_MATRICES:
            codes, exponents = mxfp4_codes(weight)
            tensors[f"{name}.blocks"] = _nibbles(codes).contiguous()
            tensors[f"{name}.scales"] = (exponents + EXPONENT_BIAS).to(torch.uint8).contiguous()
        else:
            tensors[name] = weight.to(torch.bfloat16).contiguous()
    scales = {
        f"{name}_scale": repr(masters[name].detach().float().square().mean().sqrt().item())
        for name in ("embedding", "head")
    }
    data = save(tensors, metadata={"format": FORMAT, "seed": str(ROW_SEED), **scales})
    packed = lzma.compress(data, preset=6)
    path.write_bytes(packed)
    return len(packed)


def read_packed(path: Path) -> Packed:
    """Reads a packed file. Raises PackError for anything but this format."""
    import json
    import struct

    try:
        data = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise PackError(f"{path} is not an xz file: {error}") from error
    (length,) = struct.unpack("<Q", data[:8])
    meta = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    if meta.get("format") != FORMAT:
        raise PackError(f"{path} has the format {meta.get('format')!r}; this build reads {FORMAT!r}")
    tensors = load(data)
    used = tensors.pop("used_ids")
    return Packed(used, tensors, float(meta["embedding_scale"]), float(meta["head_scale"]), int(meta["seed"]))


def masters_of(packed: Packed) -> dict[str, Tensor]:
    """fp32 weights of a packed file under the trainer's names."""
    out = {}
    for name, value in packed.tensors.items():
        if name.endswith(".blocks"):
            stem = name.removesuffix(".blocks")
            exponents = packed.tensors[f"{stem}.scales"].int() - EXPONENT_BIAS
            out[stem] = mxfp4_values(_codes(value), exponents)
        elif not name.endswith(".scales"):
            out[name] = value.float()
    return out


def vocabulary_rows(packed: Packed) -> tuple[Tensor, Tensor]:
    """Embedding and head bf16 [VOCABULARY_SIZE, H]: trained rows at their ids, random rows elsewhere."""
    hidden = packed.tensors["norm"].shape[0]
    words = -(-VOCABULARY_SIZE * hidden // 8)
    raw = np.random.PCG64(packed.seed).random_raw(words).astype("<u8").view(np.uint8)[: VOCABULARY_SIZE * hidden]
    bytes_ = torch.from_numpy(raw.reshape(VOCABULARY_SIZE, hidden))
    embedding = torch.empty(VOCABULARY_SIZE, hidden, dtype=torch.bfloat16)
    head = torch.empty_like(embedding)
    for start in range(0, VOCABULARY_SIZE, CHUNK_ROWS):
        rows = random_rows(bytes_[start : start + CHUNK_ROWS])
        embedding[start : start + CHUNK_ROWS] = rows * packed.embedding_scale
        head[start : start + CHUNK_ROWS] = rows.roll(HEAD_ROLL, -1) * packed.head_scale
    used = packed.used_ids.long()
    embedding[used], head[used] = packed.tensors["embedding"], packed.tensors["head"]
    return embedding, head
