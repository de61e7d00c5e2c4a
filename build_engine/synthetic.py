"""Random gpt-oss checkpoints of any size in every layout, for tests and benchmarks.

Invariant: one seed is one model: its expert weights are MXFP4 values and its FP8 scales powers of two, so all layouts
of a seed hold the same numbers. Tensors are made while they are written, one expert at a time. Must not be imported by
what ships to serve.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from gptoss_trt.build_engine.checkpoint import MODELOPT_CONFIG
from gptoss_trt.build_engine.model_config import CONFIG_NAME, GENERATION_NAME
from gptoss_trt.build_engine.names import Expected, Layout, expected_keys
from gptoss_trt.build_engine.safetensors_file import TensorWriter
from gptoss_trt.build_engine.spec import LayerType, ModelConfig
from gptoss_trt.reference import fp8_block, mxfp4

INDEX_NAME = "model.safetensors.index.json"
_CHUNK_ROWS = 4096  # rows of a matrix made at a time
_SCALE_BYTES = (118, 124)  # exponents -9..-4: weights of about the size that training gives


def small_config(**changes: Any) -> ModelConfig:
    """A tiny configuration with the oddities that matter: no size a multiple of 128, hidden != intermediate."""
    layers = int(changes.get("num_layers", 2))
    kinds: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
    base = ModelConfig(
        num_layers=layers, hidden_size=160, intermediate_size=224, num_experts=8, experts_per_token=4, num_heads=8,
        num_kv_heads=2, head_dim=32, vocab_size=320, layer_types=tuple(kinds[layer % 2] for layer in range(layers)),
        eos_token_id=302, pad_token_id=299, stop_token_ids=(302, 299, 312),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    *,
    layout: Layout = "hf_mxfp4",
    seed: int = 0,
    shards: int = 1,
    rope_form: Literal["rope_scaling", "rope_parameters"] = "rope_scaling",
    scale_bytes: tuple[int, int] = _SCALE_BYTES,
) -> Path:
    """Writes a checkpoint folder and returns it: the configuration files and `shards` safetensors files, with an index
    when there are several. `scale_bytes`: the range [low, high) of the MXFP4 scale bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_configs(folder, config, layout, rope_form)
    expected = [one for one in expected_keys(config, layout).values() if _is_written(one, layout)]
    per_file = -(-len(expected) // shards)
    files = [expected[first : first + per_file] for first in range(0, len(expected), per_file)]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= {one.key: name for one in part}
        _write_file(folder / name, part, _Values(config, layout, seed, scale_bytes))
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return folder


def _is_written(one: Expected, layout: Layout) -> bool:
    """modelopt leaves the router, embedding and lm head alone."""
    return layout != "modelopt_fp8" or not one.canonical.startswith("lm_head.") or one.canonical == "lm_head.weight"


def _write_file(path: Path, part: list[Expected], values: _Values) -> None:
    table = {one.key: (values.shape(one), values.dtype(one)) for one in part}
    writer = TensorWriter(path, table)
    for one in part:
        first = 0
        for piece in values.pieces(one):
            writer.write(one.key, piece, first)
            first += piece.numel()
    writer.close()


class _Values:
    """The numbers of a synthetic model: each canonical tensor from a generator seeded by seed and name."""

    def __init__(self, config: ModelConfig, layout: Layout, seed: int, scale_bytes: tuple[int, int]) -> None:
        self._config, self._layout, self._seed, self._scale_bytes = config, layout, seed, scale_bytes

    def shape(self, one: Expected) -> tuple[int, ...]:
        return () if one.shape is None else one.shape

    def dtype(self, one: Expected) -> str:
        if one.canonical.endswith(("_scale", "blocks", "scales")):
            return one.dtypes[0]
        fp8 = self._layout == "modelopt_fp8" and "F8_E4M3" in one.dtypes and one.canonical != "lm_head.weight"
        return "F8_E4M3" if fp8 else "BF16"

    def pieces(self, one: Expected) -> Any:
        """Yields the tensor in consecutive pieces of memory order."""
        name = one.canonical
        words = name.split(".")
        if one.shape is None:
            yield torch.tensor(self._scalar(name))
        elif words[-2] in ("gate_up", "down") and words[-1] != "bias":
            for expert in range(self._config.num_experts):
                yield self._expert(name, expert)
        elif name.endswith(("q.weight", "k.weight", "v.weight", "qkv.weight", "qkv.bias")):
            yield self._attention_rows(name)
        else:
            yield from self._plain(name, one.shape, self.dtype(one))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))

    def _scalar(self, name: str) -> float:
        if name.endswith("weight_scale"):
            return 2.0 ** self._fp8_exponent(name)
        return 0.5 if name.endswith("input_scale") else 0.25

    def _fp8_exponent(self, name: str) -> int:
        return self._scale_bytes[0] - mxfp4.EXPONENT_BIAS if ".moe." in name else -10

    def _packed(self, stem: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """u8 blocks [N, K/32, 16] and scales [N, K/32] of one expert."""
        config = self._config
        rows, columns = (
            (2 * config.intermediate_size, config.hidden_size)
            if stem.endswith("gate_up")
            else (config.hidden_size, config.intermediate_size)
        )
        generator = self._generator(f"{stem}.{expert}")
        groups = (rows, columns // mxfp4.GROUP)
        blocks = torch.randint(0, 256, (*groups, mxfp4.GROUP_BYTES), generator=generator, dtype=torch.uint8)
        return blocks, torch.randint(*self._scale_bytes, groups, generator=generator, dtype=torch.uint8)

    def _expert(self, name: str, expert: int) -> torch.Tensor:
        stem, word = name.rsplit(".", 1)
        blocks, scales = self._packed(stem, expert)
        if word in ("blocks", "scales"):
            return blocks if word == "blocks" else scales
        values = mxfp4.decode(blocks, scales).T.contiguous()
        if self._layout == "modelopt_fp8":
            return (values / 2.0 ** self._fp8_exponent(name)).to(fp8_block.E4M3)
        return values.to(torch.bfloat16)

    def _attention_rows(self, name: str) -> torch.Tensor:
        """q, k and v from one generator each, so that the fused and the separate layouts agree."""
        stem, part, word = name.rsplit(".", 2)
        config = self._config
        rows = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        pieces = []
        for letter in part if part == "qkv" else (part,):
            shape = (rows[letter], config.hidden_size) if word == "weight" else (rows[letter],)
            pieces.append(self._normal(f"{stem}.{letter}.{word}", shape))
        values = torch.cat(pieces)
        if self._layout == "modelopt_fp8" and word == "weight":
            return (values.float() / 2.0 ** self._fp8_exponent(name)).to(fp8_block.E4M3)
        return values

    def _plain(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        if name.endswith((".q.bias", ".k.bias", ".v.bias")) or len(shape) == 1:
            yield self._normal(name, shape)
            return
        for start in range(0, shape[0], _CHUNK_ROWS):
            rows = min(_CHUNK_ROWS, shape[0] - start)
            values = self._normal(f"{name}.{start}" if start else name, (rows, *shape[1:]))
            if dtype == "F8_E4M3":
                yield (values.float() / 2.0 ** self._fp8_exponent(name)).to(fp8_block.E4M3)
            else:
                yield values

    def _normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """bf16 numbers of a plausible size for the tensor; dense matrices are e4m3 values so that FP8 layouts agree."""
        spread, centre = self._distribution(name, shape)
        values = torch.randn(shape, generator=self._generator(name)) * spread + centre
        if len(shape) == 2 and ".attention." in name:
            step = 2.0 ** self._fp8_exponent(name)
            return ((values / step).to(fp8_block.E4M3).float() * step).to(torch.bfloat16)
        return values.to(torch.bfloat16)

    def _distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        if name.endswith("sinks"):
            return 0.5, 3.0
        if "norm" in name:
            return 0.1, 1.0
        if "bias" in name:
            return 0.2, 0.0
        return (1.0 if "embedding" in name else 1 / math.sqrt(shape[-1])), 0.0


def _write_configs(folder: Path, config: ModelConfig, layout: Layout, rope_form: str) -> None:
    make: Callable[[ModelConfig, str], dict[str, Any]] = openai_config if layout == "openai" else hugging_face_config
    raw = make(config, rope_form)
    if layout == "hf_mxfp4":
        raw["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=1), encoding="utf-8")
    if layout != "openai":
        generation = {"eos_token_id": list(config.stop_token_ids), "pad_token_id": config.pad_token_id}
        (folder / GENERATION_NAME).write_text(json.dumps(generation, indent=1), encoding="utf-8")
    if layout == "modelopt_fp8":
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*router*"]}
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.35.0"}, "quantization": quantization})
        (folder / MODELOPT_CONFIG).write_text(text, encoding="utf-8")


def hugging_face_config(config: ModelConfig, rope_form: str = "rope_scaling") -> dict[str, Any]:
    """`config.json` as transformers writes it: its older form with rope_scaling, its newer one with rope_parameters."""
    rope: dict[str, Any] = {
        "rope_type": "yarn", "factor": config.rope_scaling_factor, "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow, "original_max_position_embeddings": config.initial_context,
        "truncate": False,
    }  # fmt: skip
    theta = {"rope_theta": config.rope_theta}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_hidden_layers": config.num_layers,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        **_shared_sizes(config),
        **({"rope_parameters": rope | theta} if rope_form == "rope_parameters" else {"rope_scaling": rope} | theta),
    }


def openai_config(config: ModelConfig, _rope_form: str = "") -> dict[str, Any]:
    """`original/config.json` as OpenAI writes it; it has no layer types, epsilon or token ids."""
    return {
        "num_hidden_layers": config.num_layers,
        "num_experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "initial_context_length": config.initial_context,
        "rope_theta": config.rope_theta,
        "rope_scaling_factor": config.rope_scaling_factor,
        "rope_ntk_alpha": config.rope_beta_slow,
        "rope_ntk_beta": config.rope_beta_fast,
        **_shared_sizes(config),
    }


def _shared_sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
    }
