"""Which block a pool gives up: the known one that nobody holds and that was unused for longest."""

from __future__ import annotations

import pytest

from gptoss_trt.runtime.engine.block_pool import BlockPool


def known(pool: BlockPool, *names: str) -> dict[str, int]:
    """A block for each name, known by it, and released in that order."""
    blocks = {name: pool.take() for name in names}
    for name, block in blocks.items():
        assert pool.publish([block], [name.encode()]) == [0]
    for block in blocks.values():
        pool.release(block)
    return blocks


def test_the_block_unused_for_longest_goes_first() -> None:
    lost: list[bytes] = []
    pool = BlockPool(4, lost.append)
    blocks = known(pool, "a", "b", "c")
    pool.take()  # the free one: nothing known is given up while there is one
    assert lost == []
    pool.hold(blocks["a"])
    pool.release(blocks["a"])  # used again, so it is the youngest
    assert [pool.take(), pool.take(), pool.take()] == [blocks["b"], blocks["c"], blocks["a"]]
    assert lost == [b"b", b"c", b"a"] and pool.find(b"a") is None
    with pytest.raises(RuntimeError, match="all 4 blocks are held"):
        pool.take()
    pool.check()


def test_a_block_that_somebody_holds_is_not_given_up() -> None:
    pool = BlockPool(2)
    blocks = known(pool, "a", "b")
    for _ in range(2):  # two requests with that prefix
        pool.hold(blocks["a"])
    pool.release(blocks["a"])
    assert pool.held_counts() == {blocks["a"]: 1} and pool.available == 1
    assert pool.take() == blocks["b"]
    assert pool.find(b"a") == blocks["a"] and pool.find(b"b") is None
    pool.release(blocks["a"])
    assert pool.available == 1 and pool.take() == blocks["a"]
    with pytest.raises(RuntimeError, match="more often than it was taken"):
        for _ in range(2):
            pool.release(blocks["a"])


def test_many_blocks_are_those_of_one_after_another() -> None:
    pools = [BlockPool(12), BlockPool(12)]
    for pool in pools:
        known(pool, *"abcdef")
    one, many = pools
    for count in (0, 4, 5):  # the last finds two free blocks, and evicts three
        assert many.take_many(count) == [one.take() for _ in range(count)]
    assert many.known_contents() == one.known_contents() == {b"d", b"e", b"f"}
    held = list(many.held_counts())
    many.release(*held)
    for block in held:
        one.release(block)
    assert [one.take() for _ in range(12)] == many.take_many(12)
    many.release(3, 7)
    with pytest.raises(RuntimeError, match="3 blocks are wanted; 2 of 12 are not held"):
        many.take_many(3)
    assert many.available == 2  # nothing was taken
    for pool in pools:
        pool.check()


def test_equal_contents_have_one_known_block() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    assert pool.publish([first, second], [b"same", b"same"]) == [0]
    pool.release(second)
    pool.release(first)
    assert pool.find(b"same") == first
    assert pool.take() != first, "an unknown block is free"
    pool.forget(first)
    assert pool.find(b"same") is None and pool.available == 2
    pool.check()
