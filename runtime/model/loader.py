"""Opens a rank's weights: memory-mapped from the engine directory and compared with the manifest before use, or made
from the seed of an engine that has no files.

Invariant: what is returned is exactly the table of `spec.expected_tensors`, no tensor more, less or of another shape or
dtype; on a CPU nothing is copied. Must not know layers or arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gptoss_trt.build_engine.spec import (
    RANDOM_SEED,
    Formats,
    Manifest,
    ModelConfig,
    ParallelMapping,
    RankShare,
    SpecError,
    expected_tensors,
    rank_file,
    rank_share,
)
from gptoss_trt.runtime.model.random_tensors import RandomTensors

HASH_LIMIT_BYTES = 1 << 30  # larger files are hashed by `inspect --verify`, not at every start
_CHUNK_BYTES = 1 << 22
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}


class LoadError(RuntimeError):
    """An engine directory whose files are not what its manifest says; the text names file, tensor and both values."""


@dataclass(frozen=True)
class RankWeights:
    """One rank's part of an engine."""

    manifest: Manifest
    share: RankShare
    tensors: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def load_weights(engine_dir: Path, rank: int, device: torch.device, ranks: int) -> RankWeights:
    """Reads the manifest and maps `rank{rank}.safetensors`; on a GPU copies the tensors there.

    Raises SpecError when the directory, the mapping or the rank cannot be used by `ranks` ranks, LoadError when the
    weight file is absent, has another length or (up to 1 GiB) hash, or holds other tensors than expected. An engine of
    random weights (a manifest with a seed and no files) has them made on `device`.
    """
    manifest = Manifest.read(engine_dir)
    mapping = manifest.mapping
    if mapping.world != ranks:
        raise SpecError(
            f"{engine_dir} was built for {mapping.world} ranks (tp {mapping.tp}, ep {mapping.ep}, dp {mapping.dp}); "
            f"{ranks} {'is' if ranks == 1 else 'are'} running"
        )
    if mapping.dp > 1:
        raise SpecError(f"{engine_dir} was built for dp {mapping.dp}; this version runs dp 1")
    if RANDOM_SEED in manifest.provenance and not manifest.files:
        return random_weights(manifest.model, manifest.formats, manifest.provenance[RANDOM_SEED], device)
    share = rank_share(manifest.model, mapping, rank)
    table = expected_tensors(manifest.model, manifest.formats, mapping, rank)
    path = engine_dir / rank_file(rank)
    _check_file(path, manifest)
    return RankWeights(manifest, share, _map_tensors(path, table, device))


def random_weights(config: ModelConfig, formats: Formats, seed: int, device: torch.device) -> RankWeights:
    """What load_weights returns for an engine of one rank whose weights are made from `seed`."""
    mapping = ParallelMapping()
    manifest = Manifest(config, formats, mapping, {}, provenance={RANDOM_SEED: seed})
    return RankWeights(manifest, rank_share(config, mapping, 0), RandomTensors(config, formats, seed, device))


def _check_file(path: Path, manifest: Manifest) -> None:
    entry = manifest.files.get(path.name)
    if entry is None:
        raise LoadError(f"the manifest lists no {path.name}; it lists {', '.join(sorted(manifest.files))}")
    if not path.is_file():
        raise LoadError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.bytes:
        raise LoadError(f"{path} has {size} bytes, the manifest says {entry.bytes}")
    if size <= HASH_LIMIT_BYTES:
        digest = _sha256(path)
        if digest != entry.sha256:
            raise LoadError(f"{path} has sha256 {digest}, the manifest says {entry.sha256}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _map_tensors(
    path: Path, table: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device
) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            present = set(file.keys())
            if present != set(table):
                missing, unknown = sorted(set(table) - present), sorted(present - set(table))
                raise LoadError(f"{path}: missing tensors {missing}, unknown tensors {unknown}")
            tensors = {name: file.get_tensor(name) for name in table}
    except SafetensorError as error:
        raise LoadError(f"{path} is not a safetensors file: {error}") from error
    for name, (shape, word) in table.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != _DTYPES[word]:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise LoadError(f"{path}: {name} is {dtype} {tuple(tensor.shape)}, expected {word} {shape}")
    return tensors if device.type == "cpu" else {name: tensor.to(device) for name, tensor in tensors.items()}
