"""One pool of KV blocks: who holds a block, which blocks hold a known prefix, which may be taken.

Invariant: every block is in exactly one state: held (references > 0), cached (no reference, known content, evictable in
LRU order) or free. Must not know sequences, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items

Lost = Callable[[bytes], None]


class BlockPool:
    """Blocks 0..count-1. `lost` hears of known contents that can be found no longer."""

    def __init__(self, count: int, lost: Lost | None = None) -> None:
        self.count = count
        self.reused = 0  # times that a known block was taken again
        self._lost = lost
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.available

    def take(self) -> int:
        """A block for writing, held once; evicts the cached block unused for longest when none is free.

        Raises RuntimeError when none is available: callers look first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
        else:
            raise RuntimeError(f"all {self.count} blocks are held")
        self._references[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """`count` blocks as `take` gives them one after another. Raises RuntimeError when fewer are available; nothing
        is taken then."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks are wanted; {self.available} of {self.count} are not held")
        if count > len(self._free):
            return [self.take() for _ in range(count)]
        first = len(self._free) - count
        blocks = self._free[first:][::-1]
        del self._free[first:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def find(self, content: bytes) -> int | None:
        """The block whose content has this hash."""
        return self._block_of.get(content)

    def is_idle(self, block: int) -> bool:
        """Whether nobody holds the block: holding it makes one block less available."""
        return self._references[block] == 0

    def hold(self, block: int) -> None:
        """One more reference to a known block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1
        self.reused += 1

    def publish(self, blocks: Items[int], contents: Items[bytes]) -> list[int]:
        """Makes held blocks findable by their contents, but for those whose content another block has already, which
        stays the known one; the places in `blocks` of those that became known."""
        block_of, hash_of, fresh = self._block_of, self._hash_of, []
        for place, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            if content not in block_of and block not in hash_of:
                block_of[content] = block
                hash_of[block] = content
                fresh.append(place)
        return fresh

    def forget(self, block: int) -> None:
        """Makes a block's content unknown: it is about to be overwritten, or it is not to be trusted."""
        content = self._hash_of.pop(block, None)
        if content is None:
            return
        del self._block_of[content]
        if self._cached.pop(block, "absent") is None and self._references[block] == 0:
            self._free.append(block)
        if self._lost is not None:
            self._lost(content)

    def release(self, *blocks: int) -> None:
        """Gives one reference to each block back, in this order; the last one makes a block cached or free."""
        references, known = self._references, self._hash_of
        for block in blocks:
            left = references[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            references[block] = left
            if not left:
                if block in known:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self) -> None:
        """Raises RuntimeError when the invariant is broken (tests and the simulator call it)."""
        held = {block for block, references in enumerate(self._references) if references > 0}
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or held | free | cached != set(range(self.count)):
            raise RuntimeError(f"{len(held)} held, {len(self._free)} free, {len(cached)} cached of {self.count} blocks")
        if held & free or held & cached or free & cached or free & set(self._hash_of):
            raise RuntimeError("a block is in two states")
        if {content: block for block, content in self._hash_of.items()} != self._block_of:
            raise RuntimeError("the tables of known contents differ")

    def known_contents(self) -> frozenset[bytes]:
        """The contents that `find` finds."""
        return frozenset(self._block_of)

    def held_counts(self) -> dict[int, int]:
        """References of each held block."""
        return {block: references for block, references in enumerate(self._references) if references > 0}
