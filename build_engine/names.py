"""The names of gpt-oss tensors: one canonical name each, and what every checkpoint layout calls it.

Invariant: this table is the only place where a checkpoint's key is spelled; keys that it does not produce are unknown.
Must not open files. To support another layout, add its column here and its reading to sources.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gptoss_trt.build_engine.spec import MXFP4_GROUP, ModelConfig

Layout = Literal["openai", "hf_mxfp4", "hf_bf16", "modelopt_fp8"]
LAYOUTS: dict[Layout, str] = {
    "openai": "OpenAI original/, experts in MXFP4",
    "hf_mxfp4": "Hugging Face, experts in MXFP4",
    "hf_bf16": "Hugging Face, experts in BF16 (input x output)",
    "modelopt_fp8": "nvidia-modelopt export of the Hugging Face form, weights in FP8 (e4m3) with weight_scale",
}
_HF_LAYOUTS: tuple[Layout, ...] = ("hf_mxfp4", "hf_bf16", "modelopt_fp8")
_BF16_STORED: tuple[Layout, ...] = ("hf_bf16", "modelopt_fp8")
VALUES = ("BF16", "F16", "F32")  # dtypes of plain weights; the engine rounds them to bf16
MAYBE_FP8 = (*VALUES, "F8_E4M3")


@dataclass(frozen=True)
class Row:
    """A canonical name, the key in OpenAI's and in Hugging Face's layouts ({n}: layer), the shape in the words of
    `sizes`, accepted dtypes, the layouts that have it, and whether a checkpoint may leave it out.

    A shape of None is any: the scales of modelopt differ by its algorithm and are checked where they are applied.
    """

    canonical: str
    openai: str
    hugging_face: str
    shape: tuple[str, ...] | None
    dtypes: tuple[str, ...] = VALUES
    layouts: tuple[Layout, ...] = ("openai", *_HF_LAYOUTS)
    optional: bool = False


@dataclass(frozen=True)
class Expected:
    """One tensor that a checkpoint has: canonical name, key, shape (None: any), dtypes, may it be left out."""

    canonical: str
    key: str
    shape: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    optional: bool


def sizes(config: ModelConfig) -> dict[str, int]:
    """The letters of the table's shapes."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        "V": config.vocab_size, "H": hidden, "I": intermediate, "2I": 2 * intermediate, "E": config.num_experts,
        "A": config.num_heads, "Q": config.q_size, "KV": config.kv_size, "QKV": config.qkv_size,
        "H/32": hidden // MXFP4_GROUP, "I/32": intermediate // MXFP4_GROUP, "16": MXFP4_GROUP // 2,
    }  # fmt: skip


def _attention() -> Iterator[Row]:
    theirs, hf = "block.{n}.attn", "model.layers.{n}.self_attn"
    yield Row("attention.norm.weight", f"{theirs}.norm.scale", "model.layers.{n}.input_layernorm.weight", ("H",))
    yield Row("attention.qkv.weight", f"{theirs}.qkv.weight", "", ("QKV", "H"), layouts=("openai",))
    yield Row("attention.qkv.bias", f"{theirs}.qkv.bias", "", ("QKV",), layouts=("openai",))
    for part, size in (("q", "Q"), ("k", "KV"), ("v", "KV")):
        projection = f"{hf}.{part}_proj"
        yield Row(f"attention.{part}.weight", "", f"{projection}.weight", (size, "H"), MAYBE_FP8, _HF_LAYOUTS)
        yield Row(f"attention.{part}.bias", "", f"{projection}.bias", (size,), layouts=_HF_LAYOUTS)
        yield from _modelopt_scales(f"attention.{part}", f"{projection}.")
    for part in "kv":  # FP8 KV cache scales, a scalar each
        key = f"{hf}.{part}_proj.{part}_scale"
        yield Row(f"attention.{part}_scale", "", key, None, ("F32",), ("modelopt_fp8",), optional=True)
    yield Row("attention.sinks", f"{theirs}.sinks", f"{hf}.sinks", ("A",))
    yield Row("attention.out.weight", f"{theirs}.out.weight", f"{hf}.o_proj.weight", ("H", "Q"), MAYBE_FP8)
    yield Row("attention.out.bias", f"{theirs}.out.bias", f"{hf}.o_proj.bias", ("H",))
    yield from _modelopt_scales("attention.out", f"{hf}.o_proj.")


def _moe() -> Iterator[Row]:
    theirs, hf = "block.{n}.mlp", "model.layers.{n}.mlp"
    norm = "model.layers.{n}.post_attention_layernorm.weight"
    yield Row("moe.norm.weight", f"{theirs}.norm.scale", norm, ("H",))
    yield Row("moe.router.weight", f"{theirs}.gate.weight", f"{hf}.router.weight", ("E", "H"))
    yield Row("moe.router.bias", f"{theirs}.gate.bias", f"{hf}.router.bias", ("E",))
    for stem, number, out, inside in (("gate_up", 1, "2I", "H"), ("down", 2, "H", "I")):
        key = f"{hf}.experts.{stem}_proj"
        packed: tuple[Layout, ...] = ("openai", "hf_mxfp4")
        groups = f"{inside}/32"
        openai = f"{theirs}.mlp{number}_weight"
        yield Row(f"moe.{stem}.blocks", f"{openai}.blocks", f"{key}_blocks", ("E", out, groups, "16"), ("U8",), packed)
        yield Row(f"moe.{stem}.scales", f"{openai}.scales", f"{key}_scales", ("E", out, groups), ("U8",), packed)
        yield Row(f"moe.{stem}.weight", "", key, ("E", inside, out), MAYBE_FP8, _BF16_STORED)
        yield from _modelopt_scales(f"moe.{stem}", f"{key}_")
        yield Row(f"moe.{stem}.bias", f"{theirs}.mlp{number}_bias", f"{key}_bias", ("E", out))


def _modelopt_scales(canonical: str, prefix: str) -> Iterator[Row]:
    """weight_scale belongs to an e4m3 weight; input_scale (a static activation scale) has no use in an engine."""
    for kind in ("weight_scale", "input_scale"):
        yield Row(f"{canonical}.{kind}", "", prefix + kind, None, ("F32", "BF16"), ("modelopt_fp8",), optional=True)


GLOBAL_ROWS = (
    Row("embedding.weight", "embedding.weight", "model.embed_tokens.weight", ("V", "H")),
    Row("norm.weight", "norm.scale", "model.norm.weight", ("H",)),
    Row("lm_head.weight", "unembedding.weight", "lm_head.weight", ("V", "H"), MAYBE_FP8),
    *_modelopt_scales("lm_head", "lm_head."),
)
LAYER_ROWS = (*_attention(), *_moe())


def key_of(row: Row, layout: Layout, layer: int | None = None) -> str:
    """The checkpoint's key of a row in a layout."""
    pattern = row.openai if layout == "openai" else row.hugging_face
    return pattern if layer is None else pattern.replace("{n}", str(layer))


def expected_keys(config: ModelConfig, layout: Layout) -> dict[str, Expected]:
    """Canonical name -> what a checkpoint of this configuration and layout has under it."""
    letters = sizes(config)
    result: dict[str, Expected] = {}

    def add(row: Row, prefix: str, layer: int | None) -> None:
        if layout in row.layouts:
            shape = None if row.shape is None else tuple(letters[letter] for letter in row.shape)
            key = key_of(row, layout, layer)
            result[prefix + row.canonical] = Expected(prefix + row.canonical, key, shape, row.dtypes, row.optional)

    for row in GLOBAL_ROWS:
        add(row, "", None)
    for layer in range(config.num_layers):
        for row in LAYER_ROWS:
            add(row, f"layers.{layer}.", layer)
    return result


def layouts_of(keys: set[str]) -> list[Layout]:
    """The layouts whose marks stand among the keys, by looking at them: OpenAI's embedding; Hugging Face's embedding
    with MXFP4 blocks, with weight scales, or with neither."""
    found: list[Layout] = []
    if GLOBAL_ROWS[0].openai in keys:
        found.append("openai")
    if GLOBAL_ROWS[0].hugging_face in keys:
        marks: tuple[tuple[str, Layout], ...] = (("_blocks", "hf_mxfp4"), ("weight_scale", "modelopt_fp8"))
        found.append(next((name for end, name in marks if any(key.endswith(end) for key in keys)), "hf_bf16"))
    return found
