"""The forward pass of one token in one launch, for a whole model of the published widths on a Hopper GPU.

Invariant: it gives what the layers give, but for the order of sums; a model that it does not suit has none. Must not
know requests or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gptoss_trt.build_engine.spec import Manifest, ModelConfig
from gptoss_trt.ops.decode_one import (
    CHANNELS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOP_K,
    DecodeOne,
    LayerTensors,
    Whole,
    unsuited,
)
from gptoss_trt.runtime.model.batch import StepBatch
from gptoss_trt.runtime.model.layers import Attention, Dense, Experts, Norm


def unsuited_model(manifest: Manifest, device: torch.device, block_tokens: int, ranks: int, layout: str) -> str | None:
    """Why one launch cannot serve this model here, or None."""
    config, formats = manifest.model, manifest.formats
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if ranks > 1:
        return f"the model is cut among {ranks} ranks"
    if (formats.experts, formats.kv, formats.h_scale) != ("mxfp4", "bf16", "static"):
        return f"experts {formats.experts}, kv {formats.kv}, h_scale {formats.h_scale}"
    if layout != "sm90_v1":
        return f"experts in layout {layout}"
    if _widths(config) != (HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CHANNELS, TOP_K):
        return f"widths {_widths(config)}"
    return unsuited(device, config.num_experts, config.num_layers, block_tokens)


def _widths(config: ModelConfig) -> tuple[int, ...]:
    return (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.experts_per_token,
    )


def layer_tensors(
    attention: Attention, experts: Experts, kv: tuple[torch.Tensor, torch.Tensor], window: int
) -> LayerTensors:
    """One layer's tensors. Raises ValueError for a product without a bias."""
    qkv, out = attention.qkv, attention.out
    if qkv.bias is None or out.bias is None or experts.down_bias is None:
        raise ValueError("a bias that is left to another rank")
    return LayerTensors(
        attention_norm=attention.norm.weight,
        qkv_weight=qkv.weight,
        qkv_scale=qkv.scale,
        qkv_bias=qkv.bias,
        sinks=attention.sinks,
        out_weight=out.weight,
        out_scale=out.scale,
        out_bias=out.bias,
        moe_norm=experts.norm.weight,
        router_weight=experts.router[0],
        router_bias=experts.router[1],
        gate_up_weight=experts.gate_up_weight,
        gate_up_bias=experts.gate_up_bias,
        down_weight=experts.down_weight,
        down_bias=experts.down_bias,
        k_cache=kv[0],
        v_cache=kv[1],
        window=window,
    )


def whole(config: ModelConfig, embedding: torch.Tensor, norm: Norm, lm_head: Dense, cos_sin: torch.Tensor) -> Whole:
    """What the layers share."""
    return Whole(
        embedding=embedding,
        final_norm=norm.weight,
        lm_head=lm_head.weight,
        lm_head_scale=lm_head.scale,
        cos_sin=cos_sin,
        eps=config.rms_norm_eps,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        scale=config.head_dim**-0.5,
    )


class OneToken:
    """`layers` and `whole` hold the model's tensors."""

    def __init__(self, layers: Sequence[LayerTensors], whole: Whole) -> None:
        self._run = DecodeOne(layers, whole)

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """Logits fp32 [1, vocabulary] of a batch of one sequence with one new token, on the device."""
        return self._run(
            batch.token_ids,
            batch.positions,
            batch.context_lens,
            batch.full_blocks,
            batch.window_blocks,
            batch.window_first_block,
        )
