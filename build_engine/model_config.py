"""Reads a checkpoint's configuration, in Hugging Face's or OpenAI's form, into ModelConfig.

Invariant: a configuration that this build does not implement is refused by the key that says so; no key that changes
the arithmetic is ignored. Must not look at tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS, MXFP4_GROUP, ModelConfig

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
# Values that the arithmetic here has built in; a configuration that says otherwise is another model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_oss",),
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "tie_word_embeddings": (False,),
}
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """`folder/config.json` as a ModelConfig, with the stop ids of generation_config.json where there is one.

    Raises CheckpointError naming the file, the key, its value and what would be right.
    """
    path = folder / CONFIG_NAME
    return parse_config(read_json(path), path, _stop_ids(folder))


def parse_config(raw: Mapping[str, Any], path: Path, stop_ids: tuple[int, ...] = HARMONY_STOP_IDS) -> ModelConfig:
    """A configuration by its keys: `num_local_experts` marks Hugging Face's form, `num_experts` OpenAI's."""
    reader = _Reader(raw, path)
    if "num_local_experts" in raw:
        values = _hugging_face(reader)
    elif "num_experts" in raw:
        values = _openai(reader)
    else:
        raise CheckpointError(f"{path}: neither num_local_experts (Hugging Face) nor num_experts (OpenAI) is there")
    for key, field in _SIZES.items():
        values[field] = reader.positive(key)
    values["swiglu_limit"] = reader.number("swiglu_limit", 7.0)
    config = ModelConfig(**values, stop_token_ids=stop_ids)
    _check_sizes(config, path)
    return config


class _Reader:
    """Typed access to a configuration's keys; every error names file, key and value."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def fail(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {value!r}; {wanted}")

    def positive(self, key: str) -> int:
        value = self.raw.get(key)
        if type(value) is not int or value < 1:
            raise self.fail(key, value, "expected a positive integer")
        return value

    def token(self, key: str, default: int) -> int:
        value = self.raw.get(key)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            raise self.fail(key, value, "expected a token id")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
            raise self.fail(key, value, "expected a positive number")
        return float(value)

    def section(self, key: str) -> _Reader:
        value = self.raw[key]
        if not isinstance(value, dict):
            raise self.fail(key, value, "expected an object")
        return _Reader(value, Path(f"{self.path}: {key}"))


def _hugging_face(reader: _Reader) -> dict[str, Any]:
    raw = reader.raw
    for key, allowed in _FIXED.items():
        if key in raw and raw[key] not in allowed:
            raise reader.fail(key, raw[key], f"this build implements {allowed[0]!r} only")
    layers = reader.positive("num_hidden_layers")
    kinds = _alternating(layers) if raw.get("layer_types") is None else raw["layer_types"]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise reader.fail("layer_types", kinds, f"expected {layers} of {', '.join(known)}")
    return {
        **_hugging_face_rope(reader),
        "num_experts": reader.positive("num_local_experts"),
        "experts_per_token": reader.positive(
            "num_experts_per_tok" if "num_experts_per_tok" in raw else "experts_per_token"
        ),
        "layer_types": tuple(kinds),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-5),
        "eos_token_id": reader.token("eos_token_id", 200002),
        "pad_token_id": reader.token("pad_token_id", 199999),
    }


def _hugging_face_rope(reader: _Reader) -> dict[str, Any]:
    """`rope_parameters` holds theta too (newer transformers); `rope_scaling` leaves it beside."""
    raw = reader.raw
    section = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if not raw.get(section):
        raise reader.fail("rope_scaling", None, "expected YaRN's numbers there or in rope_parameters")
    rope = reader.section(section)
    kind = rope.raw.get("rope_type", rope.raw.get("type"))
    if kind != "yarn":
        raise rope.fail("rope_type", kind, "this build implements 'yarn' only")
    if rope.raw.get("truncate", False):
        raise rope.fail("truncate", True, "gpt-oss leaves YaRN's correction range unrounded (false)")
    theta = rope if "rope_theta" in rope.raw else reader
    factor = rope.number("factor", 32.0)
    initial = rope.raw.get("original_max_position_embeddings", raw.get("initial_context_length", 4096))
    attention = rope.raw.get("attention_factor")
    if attention is not None and not math.isclose(attention, 0.1 * math.log(factor) + 1, rel_tol=1e-6):
        raise rope.fail("attention_factor", attention, f"this build implements 0.1 ln {factor:g} + 1")
    return {
        "rope_theta": theta.number("rope_theta", 150000.0),
        "rope_scaling_factor": factor,
        "rope_beta_fast": rope.number("beta_fast", 32.0),
        "rope_beta_slow": rope.number("beta_slow", 1.0),
        "initial_context": _Reader({"initial": initial}, rope.path).positive("initial"),
        "max_context": reader.positive("max_position_embeddings")
        if "max_position_embeddings" in raw
        else int(initial * factor),
    }


def _openai(reader: _Reader) -> dict[str, Any]:
    initial = reader.positive("initial_context_length")
    factor = reader.number("rope_scaling_factor", 32.0)
    return {
        "num_experts": reader.positive("num_experts"),
        "experts_per_token": reader.positive("experts_per_token"),
        "layer_types": _alternating(reader.positive("num_hidden_layers")),
        "rope_theta": reader.number("rope_theta", 150000.0),
        "rope_scaling_factor": factor,
        "rope_beta_fast": reader.number("rope_ntk_beta", 32.0),
        "rope_beta_slow": reader.number("rope_ntk_alpha", 1.0),
        "initial_context": initial,
        "max_context": int(initial * factor),
    }


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(layers))


def _stop_ids(folder: Path) -> tuple[int, ...]:
    path = folder / GENERATION_NAME
    if not path.is_file():
        return HARMONY_STOP_IDS
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; expected a token id or a list of them")
    return tuple(ids)


def _check_sizes(config: ModelConfig, path: Path) -> None:
    checks = (
        (config.hidden_size % MXFP4_GROUP == 0, f"hidden_size {config.hidden_size} is not a multiple of {MXFP4_GROUP}"),
        (
            config.intermediate_size % MXFP4_GROUP == 0,
            f"intermediate_size {config.intermediate_size} is not a multiple of {MXFP4_GROUP}",
        ),
        (
            config.num_heads % config.num_kv_heads == 0,
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}",
        ),
        (config.head_dim % 2 == 0, f"head_dim {config.head_dim} is odd"),
        (
            config.experts_per_token <= config.num_experts,
            f"{config.experts_per_token} experts per token of {config.num_experts}",
        ),
    )
    for passes, text in checks:
        if not passes:
            raise CheckpointError(f"{path}: {text}")
