"""The engine directory's manifest as typed data: what an engine is, and nothing about how it is made or run.

Invariant: a manifest that `Manifest.from_json` accepts is complete and consistent; every unknown or malformed key is an
error that names it. Standard library only, so that every package may import it. Knows the names, shapes and dtypes of
the weight files (`expected_tensors`) and opens none of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
RANDOM_SEED = "random_seed"  # provenance of an engine without files: its weights are made at load
BLOCK = 128  # rows and columns of one FP8 scale block, channels of one activation group
MXFP4_GROUP = 32  # values that share one MXFP4 scale byte
HARMONY_VOCAB_SIZE = 201088  # rows of the embedding in every gpt-oss checkpoint
HARMONY_STOP_IDS = (200002, 199999, 200012)  # return, endoftext, call: generation_config.json of the checkpoints

Experts = Literal["mxfp4", "fp8_block128"]
Dense = Literal["bf16", "fp8_block128"]
Kv = Literal["bf16", "fp8"]
HScale = Literal["block128", "block64", "static"]
H_GROUPS = {"block128": 128, "block64": 64, "static": 0}  # channels that share a scale; 0: one scale of 2^-3 for all
WeightLayout = Literal["plain", "sm90_v1"]
LayerType = Literal["sliding_attention", "full_attention"]
PARALLEL_SIZES = (1, 2, 4, 8)


class SpecError(ValueError):
    """A manifest, configuration or mapping that cannot be used; the text names the value and the limit."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture's numbers, one canonical name for each configuration key. Sizes are counts, not bytes."""

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
    h_scale: HScale = "static"
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


def _file_entry(name: str, entry: Any) -> FileEntry:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise SpecError(f"files[{name!r}] lies outside the engine directory")
    built: FileEntry = _build(FileEntry, entry, f"files[{name!r}]")
    return built


def _check_numbers(model: ModelConfig) -> None:
    """Raises SpecError for a number that no model can have."""
    for name, value in vars(model).items():
        low = 0 if name.endswith("token_id") else 1
        if isinstance(value, int) and value < low:
            raise SpecError(f"model.{name} is {value}; it must be at least {low}")
        if isinstance(value, float) and not 0 < value < math.inf:
            raise SpecError(f"model.{name} is {value}; it must be a finite number above 0")
    if len(model.layer_types) != model.num_layers:
        raise SpecError(f"model.layer_types has {len(model.layer_types)} entries for {model.num_layers} layers")
    if model.experts_per_token > model.num_experts:
        raise SpecError(f"model.experts_per_token is {model.experts_per_token}, of {model.num_experts} experts")
    if model.num_heads % model.num_kv_heads:
        raise SpecError(f"model.num_heads is {model.num_heads}, no multiple of num_kv_heads, {model.num_kv_heads}")


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
        if not isinstance(raw["files"], dict):
            raise SpecError(f"manifest.files is {type(raw['files']).__name__}, not an object")
        for name in ("provenance", "exactness"):
            if not isinstance(raw.get(name, {}), dict):
                raise SpecError(f"manifest.{name} is {type(raw[name]).__name__}, not an object")
        seed = raw.get("provenance", {}).get(RANDOM_SEED, 0)
        if type(seed) is not int or seed < 0:
            raise SpecError(f"manifest.provenance.{RANDOM_SEED} is {seed!r}, not a whole number of at least 0")
        values["files"] = {name: _file_entry(name, entry) for name, entry in raw["files"].items()}
        _check_numbers(values["model"])
        return cls(**values)

    @classmethod
    def read(cls, engine_dir: Path) -> Manifest:
        """Reads `engine_dir/manifest.json`. Raises SpecError when it is absent or unusable."""
        path = engine_dir / MANIFEST_NAME
        if not path.is_file():
            raise SpecError(f"{engine_dir} is not an engine directory: {MANIFEST_NAME} is missing")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SpecError(f"{path} is not UTF-8: {error}") from error
        return cls.from_json(text)


@dataclass(frozen=True)
class RankShare:
    """What one rank holds: half-open ranges over the unsharded model, and whether it is the one rank of its group that
    adds the bias of the attention output or of the experts' second product (the others' files hold zeros there)."""

    q_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    vocab: tuple[int, int]
    experts: tuple[int, int]
    intermediates: tuple[int, int]
    adds_attention_bias: bool
    adds_expert_bias: bool


def rank_file(rank: int) -> str:
    """Name of a rank's weight file inside the engine directory."""
    return f"rank{rank}.safetensors"


def rank_share(config: ModelConfig, mapping: ParallelMapping, rank: int) -> RankShare:
    """The share of rank `rank` = dp_rank * tp + tp_rank: attention and vocabulary by tp_rank; experts by EP group
    rank // expert_tp, and inside the group the intermediates by rank % expert_tp.

    Raises SpecError, with the numbers, where the model is too small for the mapping or does not divide by it.
    """
    if not 0 <= rank < mapping.world:
        raise SpecError(f"rank {rank} is outside the world of {mapping.world} ranks")
    tp_rank, group, part = rank % mapping.tp, rank // mapping.expert_tp, rank % mapping.expert_tp
    kv = _even_cut(config.num_kv_heads, mapping.tp, tp_rank, f"tp {mapping.tp} does not divide {{}} KV heads")
    queries = config.num_heads // config.num_kv_heads
    return RankShare(
        q_heads=(kv[0] * queries, kv[1] * queries),
        kv_heads=kv,
        vocab=_block_cut(config.vocab_size, mapping.tp, tp_rank, "vocabulary rows"),
        experts=_even_cut(config.num_experts, mapping.ep, group, f"ep {mapping.ep} does not divide {{}} experts"),
        intermediates=_block_cut(config.intermediate_size, mapping.expert_tp, part, "expert intermediates"),
        adds_attention_bias=tp_rank == 0,
        adds_expert_bias=part == 0,
    )


def qkv_segments(config: ModelConfig, mapping: ParallelMapping) -> tuple[int, int, int]:
    """Rows of q, k and v in a rank's qkv weight. With dense = fp8_block128 scale blocks begin anew at each of them, so
    that a rank whose k has 64 rows (TP8) keeps the scale of the unsharded block that they came from."""
    return config.q_size // mapping.tp, config.kv_size // mapping.tp, config.kv_size // mapping.tp


def check_mapping(config: ModelConfig, formats: Formats, mapping: ParallelMapping) -> None:
    """Raises SpecError, naming the sizes, unless every rank of the mapping gets its share in these formats."""
    for rank in range(mapping.world):
        rank_share(config, mapping, rank)
    if formats.dense == "fp8_block128" and mapping.tp > 1:
        for what, rows in zip(("q", "k and v"), qkv_segments(config, mapping), strict=False):
            if rows % BLOCK and BLOCK % rows:
                raise SpecError(
                    f"dense fp8_block128 under tp {mapping.tp} leaves {rows} rows of {what} to a rank: "
                    f"not a multiple or a divisor of {BLOCK}"
                )


TensorTable = dict[str, tuple[tuple[int, ...], str]]


def expected_tensors(config: ModelConfig, formats: Formats, mapping: ParallelMapping, rank: int) -> TensorTable:
    """Every tensor of `rank{rank}.safetensors` in file order: name -> (shape, dtype), dtype in the words of safetensors
    (BF16, U8, F8_E4M3, F32). The one table from which writer, verifier and loader work.

    Raises SpecError as `check_mapping` does, and for a weight layout other than plain, whose table its packer owns.
    """
    if formats.weight_layout != "plain":
        raise SpecError(f"the tensor table describes weight_layout 'plain', not {formats.weight_layout!r}")
    check_mapping(config, formats, mapping)
    share = rank_share(config, mapping, rank)
    hidden, vocab = config.hidden_size, share.vocab[1] - share.vocab[0]
    q_rows, kv_rows, _ = segments = qkv_segments(config, mapping)
    table: TensorTable = {"embedding.weight": ((vocab, hidden), "BF16")}
    for layer in range(config.num_layers):
        attention, moe = f"layers.{layer}.attention", f"layers.{layer}.moe"
        table[f"{attention}.norm.weight"] = ((hidden,), "BF16")
        table |= _dense(f"{attention}.qkv", segments, hidden, formats)
        table[f"{attention}.qkv.bias"] = ((q_rows + 2 * kv_rows,), "BF16")
        table[f"{attention}.sinks"] = ((share.q_heads[1] - share.q_heads[0],), "BF16")
        table |= _dense(f"{attention}.out", (hidden,), q_rows, formats)
        table[f"{attention}.out.bias"] = ((hidden,), "BF16")
        if formats.kv == "fp8":
            table |= {f"{attention}.{name}_scale": ((1,), "F32") for name in "kv"}
        table[f"{moe}.norm.weight"] = ((hidden,), "BF16")
        table[f"{moe}.router.weight"] = ((config.num_experts, hidden), "BF16")
        table[f"{moe}.router.bias"] = ((config.num_experts,), "BF16")
        experts, width = share.experts[1] - share.experts[0], share.intermediates[1] - share.intermediates[0]
        table |= _experts(f"{moe}.gate_up", experts, 2 * width, hidden, formats)
        table |= _experts(f"{moe}.down", experts, hidden, width, formats)
    table["norm.weight"] = ((hidden,), "BF16")
    return table | _dense("lm_head", (vocab,), hidden, formats)


def _dense(stem: str, segments: tuple[int, ...], columns: int, formats: Formats) -> TensorTable:
    rows = sum(segments)
    if formats.dense == "bf16":
        return {f"{stem}.weight": ((rows, columns), "BF16")}
    scale_rows = sum(_blocks(segment) for segment in segments)
    return {
        f"{stem}.weight": ((rows, columns), "F8_E4M3"),
        f"{stem}.weight_scale": ((scale_rows, _blocks(columns)), "F32"),
    }


def _experts(stem: str, experts: int, rows: int, columns: int, formats: Formats) -> TensorTable:
    table: TensorTable
    if formats.experts == "mxfp4":
        groups = columns // MXFP4_GROUP
        table = {
            f"{stem}.blocks": ((experts, rows, groups, MXFP4_GROUP // 2), "U8"),
            f"{stem}.scales": ((experts, rows, groups), "U8"),
        }
    else:
        table = {
            f"{stem}.weight": ((experts, rows, columns), "F8_E4M3"),
            f"{stem}.weight_scale": ((experts, _blocks(rows), _blocks(columns)), "F32"),
        }
    return table | {f"{stem}.bias": ((experts, rows), "BF16")}


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _even_cut(total: int, ways: int, part: int, refusal: str) -> tuple[int, int]:
    if total % ways:
        raise SpecError(refusal.format(total))
    return part * (total // ways), (part + 1) * (total // ways)


def _block_cut(total: int, ways: int, part: int, what: str) -> tuple[int, int]:
    """Cut at multiples of 128, the first parts one block longer where they cannot be equal, the tail in the last."""
    whole, longer = divmod(_blocks(total), ways)
    if not whole:
        raise SpecError(f"{total} {what} are {_blocks(total)} cuts of {BLOCK}, too few for {ways} ranks")
    first = part * whole + min(part, longer)
    last = first + whole + (part < longer)
    return first * BLOCK, min(last * BLOCK, total)


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
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise SpecError(f"{where}.{name} is {value!r}, which is no {hints[name]}")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a field's type: int, float, str, a Literal of words, or a tuple of one of them."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in arguments
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    return type(value) is hint or (hint is float and type(value) is int)
