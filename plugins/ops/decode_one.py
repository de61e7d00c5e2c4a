"""One token through all layers of a gpt-oss model in one launch of libgptoss_trt.so.

Invariant: a step allocates nothing but its logits, so it can be captured in a CUDA graph; the tensors whose addresses
the layer records hold are kept alive here. Must not know how a model is put together: its caller hands over tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from gptoss_trt.ops import library
from gptoss_trt.ops.library import DecodeOneArgs, DecodeOneLayer, DenseFormat

HIDDEN = 2880
HEADS = 64
KV_HEADS = 8
HEAD_DIM = 64
CHANNELS = 2880
TOP_K = 4
MOST_LAYERS = 36
BLOCK_TOKENS = (16, 32, 64)
MULTIPROCESSORS = (128, 135)


@dataclass(frozen=True)
class LayerTensors:
    """A layer's tensors, in the order and shapes of gptoss_trt_decode_one_layer; scales are None with dense bf16."""

    attention_norm: torch.Tensor
    qkv_weight: torch.Tensor
    qkv_scale: torch.Tensor | None
    qkv_bias: torch.Tensor
    sinks: torch.Tensor
    out_weight: torch.Tensor
    out_scale: torch.Tensor | None
    out_bias: torch.Tensor
    moe_norm: torch.Tensor
    router_weight: torch.Tensor
    router_bias: torch.Tensor
    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor
    down_weight: torch.Tensor
    down_bias: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    window: int

    def record(self) -> DecodeOneLayer:
        """The C struct, with addresses."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return DecodeOneLayer(**{name: _address(value) for name, value in values.items()})


@dataclass(frozen=True)
class Whole:
    """What the layers of a model share. `scale` multiplies attention scores; `lm_head_scale` None with dense bf16."""

    embedding: torch.Tensor
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    lm_head_scale: torch.Tensor | None
    cos_sin: torch.Tensor
    eps: float
    limit: float
    alpha: float
    scale: float


class DecodeOne:
    """A model's forward pass of one token."""

    def __init__(self, layers: Sequence[LayerTensors], whole: Whole) -> None:
        """Zeroes a workspace on the layers' device; does not wait for it."""
        self._layers, self._whole = tuple(layers), whole  # their addresses are in the records
        device = whole.embedding.device
        self._records = (DecodeOneLayer * len(layers))(*(layer.record() for layer in layers))
        self._workspace = torch.zeros(library.load().decode_one_workspace(), dtype=torch.uint8, device=device)
        self._args = DecodeOneArgs(
            format=DenseFormat.BF16 if whole.lm_head_scale is None else DenseFormat.FP8,
            num_layers=len(layers),
            experts=len(layers[0].router_bias),
            vocabulary=len(whole.lm_head),
            block_tokens=layers[0].k_cache.shape[2],
            eps=whole.eps,
            limit=whole.limit,
            alpha=whole.alpha,
            scale=whole.scale,
            layers=ctypes.addressof(self._records),
            embedding=whole.embedding.data_ptr(),
            final_norm=whole.final_norm.data_ptr(),
            lm_head=whole.lm_head.data_ptr(),
            lm_head_scale=_address(whole.lm_head_scale),
            cos_sin=whole.cos_sin.data_ptr(),
            workspace=self._workspace.data_ptr(),
            workspace_bytes=self._workspace.numel(),
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context_lens: torch.Tensor,
        full_blocks: torch.Tensor,
        window_blocks: torch.Tensor,
        window_first_block: torch.Tensor,
    ) -> torch.Tensor:
        """Logits fp32 [1, vocabulary]; writes the token's key and value. All int32 on the device: [1], [1], [1],
        [1, blocks], [1, blocks], [1]. Runs on the current stream. Raises LibraryError when the call fails."""
        args, device = self._args, token_ids.device
        logits = torch.empty((1, args.vocabulary), dtype=torch.float32, device=device)
        args.token_ids, args.positions = token_ids.data_ptr(), positions.data_ptr()
        args.context_lens, args.window_first_block = context_lens.data_ptr(), window_first_block.data_ptr()
        args.full_blocks, args.full_width = full_blocks.data_ptr(), full_blocks.shape[1]
        args.window_blocks, args.window_width = window_blocks.data_ptr(), window_blocks.shape[1]
        args.logits = logits.data_ptr()
        with torch.cuda.device(device):
            library.load().decode_one(args, torch.cuda.current_stream(device).cuda_stream)
        return logits


def unsuited(device: torch.device, experts: int, layers: int, block_tokens: int) -> str | None:
    """Why the launch cannot serve a model of the published widths here, or None."""
    reason = library.unusable()
    if reason is not None:
        return reason
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if not MULTIPROCESSORS[0] <= count <= MULTIPROCESSORS[1] or experts > count:
        return f"{count} multiprocessors for {experts} experts"
    if layers > MOST_LAYERS or block_tokens not in BLOCK_TOKENS:
        return f"{layers} layers, KV blocks of {block_tokens}"
    return None


def _address(value: torch.Tensor | int | None) -> int | None:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
