"""How many KV blocks an engine gets: pure arithmetic from memory, block sizes and limits.

Invariant: the window pool alone never limits the batch (every running sequence has its window, and a step its chunk),
and the full pool gets the rest of the memory. Must not know tensors or devices.
"""

from __future__ import annotations

from gptoss_trt.runtime.engine.core import EngineLoadError

CACHED_WINDOW_SHARE = 8  # one more window block for this many full blocks, so that cached prefixes keep their window


def pool_sizes(
    kv_bytes: int,
    block_bytes: tuple[int, int],
    *,
    block_tokens: int,
    window_tokens: int,
    max_batch: int,
    step_tokens: int,
    max_context: int,
) -> tuple[int, int]:
    """(full, window) blocks for `kv_bytes`; `block_bytes` are those of one (full, window) block over all its layers.

    No more full blocks than max_batch sequences of max_context tokens can use. Raises EngineLoadError with both numbers
    when the memory does not hold even one short sequence.
    """
    full_bytes, window_bytes = block_bytes
    window_blocks = least_window_blocks(block_tokens, window_tokens, max_batch, step_tokens)
    left = kv_bytes - window_blocks * window_bytes
    per_full = full_bytes + window_bytes / CACHED_WINDOW_SHARE
    full_blocks = min(int(left / per_full), max_batch * -(-max_context // block_tokens))
    if full_blocks < max_batch:
        least = int(window_blocks * window_bytes + max_batch * per_full)
        raise EngineLoadError(
            f"kv_bytes {kv_bytes} is too small: {max_batch} sequences and steps of {step_tokens} tokens need {least}"
        )
    return full_blocks, window_blocks + full_blocks // CACHED_WINDOW_SHARE


def least_window_blocks(block_tokens: int, window_tokens: int, max_batch: int, step_tokens: int) -> int:
    """Window blocks that max_batch sequences hold while a step of `step_tokens` is computed."""
    per_sequence = -(-(window_tokens - 1) // block_tokens) + 1
    return max_batch * (per_sequence + 1) + -(-step_tokens // block_tokens)
