"""How many KV blocks an engine gets: pure arithmetic from memory, block sizes and limits.

Invariant: the window pool alone never limits the batch (every running sequence has its window, and a step its chunk),
and the full pool gets the rest of the memory. Must not know tensors or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptoss_trt.runtime.engine.core import EngineLoadError

CACHED_WINDOW_SHARE = 8  # one more window block for this many full blocks, so that cached prefixes keep their window


@dataclass(frozen=True)
class CacheShape:
    """What the size of a cache depends on. Counts of tokens and sequences; `block_bytes` are those of one (full,
    window)
    block over all layers of its pool."""

    block_bytes: tuple[int, int]
    block_tokens: int
    window_tokens: int
    max_batch: int
    step_tokens: int
    max_context: int
    keeps_prefixes: bool = True  # of requests that have ended

    @property
    def least_window_blocks(self) -> int:
        """Window blocks that max_batch sequences hold while a step of step_tokens is computed and the next planned."""
        per_sequence = -(-(self.window_tokens - 1) // self.block_tokens) + 1
        return self.max_batch * (per_sequence + 1) + 2 * -(-self.step_tokens // self.block_tokens)

    def bytes_for(self, full_blocks: int) -> int:
        """Memory of both pools when the full one has `full_blocks` blocks."""
        full_bytes, window_bytes = self.block_bytes
        return full_blocks * full_bytes + self._window_blocks(full_blocks) * window_bytes

    @property
    def one_context_bytes(self) -> int:
        """Memory with which one sequence of max_context tokens fits, and max_batch short ones."""
        return self.bytes_for(max(self.max_batch, -(-self.max_context // self.block_tokens)))

    def pool_sizes(self, kv_bytes: int) -> tuple[int, int]:
        """(full, window) blocks for `kv_bytes`, no more than max_batch sequences of max_context tokens can use.

        Raises EngineLoadError with both numbers when the memory does not hold max_batch sequences of one block.
        """
        full_bytes, window_bytes = self.block_bytes
        left = kv_bytes - self.least_window_blocks * window_bytes
        most = self.max_batch * -(-self.max_context // self.block_tokens)
        cached_bytes = window_bytes / CACHED_WINDOW_SHARE if self.keeps_prefixes else 0
        full_blocks = min(int(left / (full_bytes + cached_bytes)), most)
        if full_blocks < self.max_batch:
            raise EngineLoadError(
                f"kv_bytes {kv_bytes} is too small: {self.max_batch} sequences and steps of {self.step_tokens} tokens "
                f"need {self.bytes_for(self.max_batch)}"
            )
        return full_blocks, self._window_blocks(full_blocks)

    def _window_blocks(self, full_blocks: int) -> int:
        return self.least_window_blocks + (full_blocks // CACHED_WINDOW_SHARE if self.keeps_prefixes else 0)
