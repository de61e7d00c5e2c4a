"""The shapes of gpt-oss at its two sizes, and of a tiny model for any machine, for random engines and benchmarks.

Invariant: standard library only. Must not know weights."""

from __future__ import annotations

import dataclasses

from gptoss_trt.build_engine.spec import HARMONY_VOCAB_SIZE, LayerType, ModelConfig

_KINDS: tuple[LayerType, LayerType] = ("sliding_attention", "full_attention")


def _layers(count: int) -> tuple[LayerType, ...]:
    return tuple(_KINDS[layer % 2] for layer in range(count))


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=2880, intermediate_size=2880, num_experts=experts, experts_per_token=4,
        num_heads=64, num_kv_heads=8, head_dim=64, vocab_size=HARMONY_VOCAB_SIZE, layer_types=_layers(layers),
    )  # fmt: skip


MODELS = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "tiny": ModelConfig(
        num_layers=2, hidden_size=160, intermediate_size=224, num_experts=8, experts_per_token=4, num_heads=8,
        num_kv_heads=2, head_dim=32, vocab_size=320, layer_types=_layers(2), max_context=4096,
        pad_token_id=299, eos_token_id=302, stop_token_ids=(302, 299, 312),
    ),
}  # fmt: skip


def model_config(name: str, layers: int | None = None) -> ModelConfig:
    """A model's configuration, cut to its first `layers` layers (or grown: kinds alternate)."""
    config = MODELS[name]
    return config if layers is None else dataclasses.replace(config, num_layers=layers, layer_types=_layers(layers))
