"""The paged KV cache's memory: two pools of blocks, and each layer's part of its pool.

Invariant: layers of one kind share a pool's block numbers, so block b of the full pool is block b of every
full-attention layer. Must not know which block belongs to whom: the scheduler does.
"""

from __future__ import annotations

import torch

from gptoss_trt.build_engine.spec import Formats, ModelConfig
from gptoss_trt.ops.checks import MAX_BLOCK_TOKENS

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class KvCache:
    """k and v [blocks, kv_heads, block_tokens, head_dim] of every layer, views of two allocations."""

    def __init__(
        self,
        config: ModelConfig,
        formats: Formats,
        kv_heads: int,
        device: torch.device,
        *,
        full_blocks: int,
        window_blocks: int,
        block_tokens: int,
    ) -> None:
        """Raises ValueError for a block_tokens outside 1..64 or a negative number of blocks."""
        check_block_tokens(block_tokens)
        if full_blocks < 0 or window_blocks < 0:
            raise ValueError(
                f"KV pools of {full_blocks} full and {window_blocks} window blocks; neither may be negative"
            )
        self.block_tokens = block_tokens
        blocks = {"full_attention": full_blocks, "sliding_attention": window_blocks}
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind, count in blocks.items():
            members = [n for n, layer in enumerate(config.layer_types) if layer == kind]
            shape = (len(members), 2, count, kv_heads, block_tokens, config.head_dim)
            pool = torch.zeros(shape, dtype=_DTYPES[formats.kv], device=device)
            self._layers |= {n: (pool[i, 0], pool[i, 1]) for i, n in enumerate(members)}

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of a layer."""
        return self._layers[layer]


def check_block_tokens(block_tokens: int) -> None:
    """Raises ValueError unless 1 <= block_tokens <= 64."""
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block_tokens is {block_tokens}; allowed are 1 to {MAX_BLOCK_TOKENS}")


def block_bytes(config: ModelConfig, formats: Formats, kv_heads: int, block_tokens: int) -> tuple[int, int]:
    """Bytes that one block takes over all layers of its pool: (full, window)."""
    check_block_tokens(block_tokens)
    one = 2 * kv_heads * block_tokens * config.head_dim * _DTYPES[formats.kv].itemsize
    full = sum(kind == "full_attention" for kind in config.layer_types)
    return full * one, (config.num_layers - full) * one
