"""The two KV pools together: which blocks a sequence has, which prefix it can reuse, what slides out of the window.

Invariant: a sequence's full table covers its positions from 0, its window table the positions that its next query in a
windowed layer can see; a prefix is reused only when both are there. What the pools need not hear at once (whole blocks
of a piece of a prompt that are known from now on, blocks given back) waits until `settle`, or until a pool is asked for
anything, so that nobody sees that it waited. Must not know the order of requests or tensors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from gptoss_trt.runtime.engine.block_pool import BlockPool
from gptoss_trt.runtime.engine.sequence import BlockTable, Sequence

HASH_BYTES = 16


class KvListener(Protocol):
    """Hears which blocks of full attention can be found by their content (for an external router)."""

    def stored(self, content: bytes, parent: bytes | None, tokens: Items[int]) -> None:
        """A block of these tokens behind the block `parent` (None: a prompt's first) can be found from now on."""

    def removed(self, content: bytes) -> None:
        """It can be found no longer."""


class KvCache:
    """Block accounting for `full_blocks` and `window_blocks` blocks of `block_tokens` positions each."""

    def __init__(
        self, full_blocks: int, window_blocks: int, block_tokens: int, window: int, listener: KvListener | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self.window_tokens = window
        self._listener = listener
        self._full = BlockPool(full_blocks, None if listener is None else listener.removed)
        self._window = BlockPool(window_blocks)
        self._waiting: deque[Callable[[], None]] = deque()  # what the pools are to hear, in this order

    @property
    def full(self) -> BlockPool:
        self.settle()
        return self._full

    @property
    def window(self) -> BlockPool:
        self.settle()
        return self._window

    def settle(self) -> None:
        """Tells the pools what waits: 0.2 ms behind a prompt of 8,192 tokens, which its first token need not wait
        for."""
        while self._waiting:
            self._waiting.popleft()()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that fits an empty cache (its window alone must fit as well)."""
        return self._full.count * self.block_tokens if self._window.count >= self.least_window_blocks else 0

    @property
    def least_window_blocks(self) -> int:
        """Window blocks of one sequence that computes one token a step, wherever the token lies in its block."""
        return -(-(self.window_tokens - 1) // self.block_tokens) + 1

    def first_visible_block(self, position: int) -> int:
        """The first logical block that a query at `position` sees in a windowed layer."""
        return max(0, position - self.window_tokens + 1) // self.block_tokens

    def admit(self, sequence: Sequence, *, reuse: bool, spare_blocks: int) -> bool:
        """Gives a sequence without blocks its reusable prefix and full blocks for all its tokens.

        False, with nothing taken, when fewer than `spare_blocks` full blocks or no room for a first window would be
        left.
        """
        self.settle()
        prefix = self._reusable_blocks(sequence) if reuse else 0
        table = sequence.table
        first = self.first_visible_block(prefix * self.block_tokens)
        known_full = [self._known(self._full, content) for content in table.hashes[:prefix]]
        known_window = [self._known(self._window, content) for content in table.hashes[first:prefix]]
        fresh = self._blocks_for(len(sequence.tokens)) - prefix
        full_cost = fresh + sum(map(self._full.is_idle, known_full))
        window_cost = 1 + sum(map(self._window.is_idle, known_window))
        if full_cost + spare_blocks > self._full.available or window_cost > self._window.available:
            return False
        for pool, known in ((self._full, known_full), (self._window, known_window)):
            for block in known:
                pool.hold(block)
        table.full = known_full + self._full.take_many(fresh)
        table.window, table.window_first = known_window, first
        table.published = prefix
        sequence.computed = prefix * self.block_tokens
        sequence.reused_blocks += prefix
        sequence.new_blocks += fresh
        return True

    def extend(self, sequence: Sequence, count: int) -> bool:
        """Makes room for `count` more tokens in both tables, behind those computed and planned; False, with nothing
        taken, when a pool lacks blocks."""
        table, end = sequence.table, self._blocks_for(sequence.computed + sequence.planned + count)
        if end <= len(table.full) and end <= table.window_first + len(table.window):
            return True
        self.settle()
        fresh_full = max(0, end - len(table.full))
        fresh_window = max(0, end - table.window_first - len(table.window))
        if fresh_full > self._full.available or fresh_window > self._window.available:
            return False
        table.full += self._full.take_many(fresh_full)
        table.window += self._window.take_many(fresh_window)
        sequence.new_blocks += fresh_full
        return True

    def longest_extension(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens `extend` can make room for now."""
        self.settle()
        table = sequence.table
        full_end = len(table.full) + self._full.available
        window_end = table.window_first + len(table.window) + self._window.available
        begin = sequence.computed + sequence.planned
        return max(0, min(count, min(full_end, window_end) * self.block_tokens - begin))

    def advance(self, sequence: Sequence, count: int) -> None:
        """After a step: `count` tokens more are computed; whole blocks become known, what no query sees is released."""
        sequence.computed = computed = sequence.computed + count
        if count == 1 and computed % self.block_tokens and (computed - self.window_tokens + 1) % self.block_tokens:
            return  # no block was filled and none left the window
        table = sequence.table
        self._waiting.append(lambda: self._take_in(sequence, table, computed))
        if count <= 1:
            self.settle()

    def _take_in(self, sequence: Sequence, table: BlockTable, computed: int) -> None:
        """What `advance` does about blocks, in the table that the sequence had then."""
        whole = computed // self.block_tokens
        self._hash_blocks(sequence, whole)
        if whole > table.published:
            self._publish(sequence, table, whole)
        left = self.first_visible_block(computed) - table.window_first
        if left > 0:
            self._window.release(*table.window[:left])
            del table.window[:left]
            table.window_first += left

    def _publish(self, sequence: Sequence, table: BlockTable, whole: int) -> None:
        """Makes the first `whole` blocks of a sequence known, whose hashes are there."""
        begin = table.published
        contents = table.hashes[begin:whole]
        fresh = self._full.publish(table.full[begin:whole], contents)
        if self._listener is not None:
            for place in fresh:
                self._tell_stored(self._listener, sequence, begin + place)
        self._window.publish(table.window[begin - table.window_first : whole - table.window_first], contents)
        table.published = whole

    def hash_ahead(self, sequence: Sequence, computed: int) -> None:
        """Makes the hashes that `advance` needs when `computed` tokens are computed, as far as those are known."""
        self._hash_blocks(sequence, min(computed, len(sequence.tokens)) // self.block_tokens)

    def _tell_stored(self, listener: KvListener, sequence: Sequence, block: int) -> None:
        hashes, size = sequence.table.hashes, self.block_tokens
        tokens = sequence.tokens[block * size : (block + 1) * size]
        listener.stored(hashes[block], hashes[block - 1] if block else None, tokens)

    def distrust(self, sequence: Sequence) -> None:
        """Nothing that the sequence computed may be found again, in or out of the window."""
        self.settle()
        for pool in (self._full, self._window):
            for content in sequence.table.hashes:
                known = pool.find(content)
                if known is not None:
                    pool.forget(known)

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back. Last blocks first: the beginning of a prefix is the most useful part, so it is evicted
        last."""
        table = sequence.table
        self._waiting.append(lambda: self._give_back(table))
        sequence.table = BlockTable(hashes=table.hashes)
        sequence.computed = 0

    def _give_back(self, table: BlockTable) -> None:
        for pool, blocks in ((self._full, table.full), (self._window, table.window)):
            pool.release(*reversed(blocks))

    def _reusable_blocks(self, sequence: Sequence) -> int:
        """Whole blocks of the longest known prefix; at least one token is left, because a step needs a query."""
        most = (len(sequence.tokens) - 1) // self.block_tokens
        hashes = sequence.table.hashes
        prefix = 0
        while prefix < most:
            if prefix == len(hashes):
                self._hash_blocks(sequence, prefix + 1)
            if self._full.find(hashes[prefix]) is None:
                break
            prefix += 1
        while prefix:
            first = self.first_visible_block(prefix * self.block_tokens)
            lost = next((i for i in range(prefix - 1, first - 1, -1) if self._window.find(hashes[i]) is None), None)
            if lost is None:
                return prefix
            prefix = lost
        return 0

    def _hash_blocks(self, sequence: Sequence, whole: int) -> None:
        """Extends the chain of hashes: each covers the salt and all tokens up to the end of its block."""
        hashes, size = sequence.table.hashes, self.block_tokens
        for block in range(len(hashes), whole):
            before = hashes[block - 1] if block else sequence.request.salt
            content = sequence.tokens[block * size : (block + 1) * size]
            hashes.append(hashlib.blake2b(content, digest_size=HASH_BYTES, key=before).digest())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @staticmethod
    def _known(pool: BlockPool, content: bytes) -> int:
        block = pool.find(content)
        assert block is not None
        return block
