"""The engine directory's manifest as typed data: what an engine is, and nothing about how it is made or run.

Invariant: a manifest that `Manifest.from_json` accepts is complete and consistent; every unknown or malformed key is an
error that names it. Standard library only, so that every package may import it. Knows no tensors and opens no weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
BLOCK = 128  # rows and columns of one FP8 scale block, channels of one activation group
MXFP4_GROUP = 32  # values that share one MXFP4 scale byte
HARMONY_STOP_IDS = (200002, 199999, 200012)  # return, endoftext, call: generation_config.json of the checkpoints

Experts = Literal["mxfp4", "fp8_block128"]
Dense = Literal["bf16", "fp8_block128"]
Kv = Literal["bf16", "fp8"]
HScale = Literal["block128", "block64", "static"]
WeightLayout = Literal["plain", "sm90_v1"]
LayerType = Literal["sliding_attention", "full_attention"]
PARALLEL_SIZES = (1, 2, 4, 8)


class SpecError(ValueError):
    """A manifest, configuration or mapping that cannot be used; the text names the value and the limit."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture's numbers (MODEL configuration keys under one canonical name each). Sizes are counts, not bytes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int = 128
    max_context: int = 131072
    initial_context: int = 4096  # positions before YaRN stretches them
    rope_theta: float = 150000.0
    rope_scaling_factor: float = 32.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    rms_norm_eps: float = 1e-5
    pad_token_id: int = 199999
    eos_token_id: int = 200002
    stop_token_ids: tuple[int, ...] = HARMONY_STOP_IDS

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def window(self, layer: int) -> int:
        """Keys that layer `layer` sees, the token itself included; 0 means all of them."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0


@dataclass(frozen=True)
class Formats:
    """Number formats of an engine, the same words on the command line, in the manifest and in result lines."""

    experts: Experts = "mxfp4"
    dense: Dense = "bf16"
    kv: Kv = "bf16"
    h_scale: HScale = "block128"
    weight_layout: WeightLayout = "plain"

    def __post_init__(self) -> None:
        for name, words in (
            ("experts", Experts),
            ("dense", Dense),
            ("kv", Kv),
            ("h_scale", HScale),
            ("weight_layout", WeightLayout),
        ):
            value, allowed = getattr(self, name), get_args(words)
            if value not in allowed:
                raise SpecError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


@dataclass(frozen=True)
class ParallelMapping:
    """World = tp x dp ranks. Attention is cut tp ways inside each DP group; experts are spread over ep groups of the
    world and each expert is cut world / ep ways at multiples of 128 intermediates."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp"):
            value = getattr(self, name)
            if value not in PARALLEL_SIZES:
                raise SpecError(f"{name} is {value}; allowed: {', '.join(map(str, PARALLEL_SIZES))}")
        if self.world % self.ep:
            raise SpecError(
                f"ep {self.ep} does not divide the world of tp {self.tp} x dp {self.dp} = {self.world} ranks"
            )

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ways that each expert's intermediates are cut."""
        return self.world // self.ep


@dataclass(frozen=True)
class FileEntry:
    """One file of the engine directory: its length and the hash of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`: all that a reader must know before it opens a weight file."""

    model: ModelConfig
    formats: Formats
    mapping: ParallelMapping
    files: Mapping[str, FileEntry]
    provenance: Mapping[str, Any] = field(default_factory=dict)  # checkpoint layout, its config hash, our version, date
    exactness: Mapping[str, Any] = field(default_factory=dict)  # blocks exact, blocks not, largest spread, where
    abi_version: int = 1
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses and checks a manifest. Raises SpecError for bad JSON, another schema, unknown or missing keys."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecError(f"{MANIFEST_NAME} is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise SpecError(f"{MANIFEST_NAME} holds {type(raw).__name__}, not an object")
        version = raw.get("schema_version")
        if version != SCHEMA_VERSION:
            raise SpecError(f"schema_version is {version!r}; this build reads {SCHEMA_VERSION}")
        parts = {"model": ModelConfig, "formats": Formats, "mapping": ParallelMapping}
        values: dict[str, Any] = dict(_known_keys(cls, raw, "manifest"))
        for name, part in parts.items():
            values[name] = _build(part, raw.get(name), name)
        values["files"] = {name: _build(FileEntry, entry, f"files[{name!r}]") for name, entry in raw["files"].items()}
        return cls(**values)

    @classmethod
    def read(cls, engine_dir: Path) -> Manifest:
        """Reads `engine_dir/manifest.json`. Raises SpecError when it is absent or unusable."""
        path = engine_dir / MANIFEST_NAME
        if not path.is_file():
            raise SpecError(f"{engine_dir} is not an engine directory: {MANIFEST_NAME} is missing")
        return cls.from_json(path.read_text(encoding="utf-8"))


def _known_keys(cls: type, raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SpecError(f"{where} is {type(raw).__name__}, not an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(raw) - set(fields))
    missing = sorted(
        n
        for n, f in fields.items()
        if n not in raw and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise SpecError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    return raw


def _build(cls: type, raw: Any, where: str) -> Any:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in _known_keys(cls, raw, where).items()}
    return cls(**values)
