"""How many KV blocks a cache gets."""

from __future__ import annotations

import dataclasses

import pytest

from gptoss_trt.runtime.engine.cache_size import CACHED_WINDOW_SHARE, CacheShape
from gptoss_trt.runtime.engine.core import EngineLoadError

SHAPE = CacheShape(
    block_bytes=(1000, 700), block_tokens=64, window_tokens=128, max_batch=4, step_tokens=512, max_context=131072
)


@pytest.mark.parametrize("keeps_prefixes", [True, False])
@pytest.mark.parametrize("kv_bytes", [30_000, 123_456, 1_000_000])
def test_pools_take_the_memory_and_no_more(kv_bytes: int, keeps_prefixes: bool) -> None:
    shape = dataclasses.replace(SHAPE, keeps_prefixes=keeps_prefixes)
    full, window = shape.pool_sizes(kv_bytes)
    assert window == 4 * 4 + 2 * 8 + (full // CACHED_WINDOW_SHARE if keeps_prefixes else 0)
    assert shape.bytes_for(full) == 1000 * full + 700 * window <= kv_bytes < shape.bytes_for(full + 2)


def test_windows_of_prefixes_that_nobody_keeps_leave_room_for_sequences() -> None:
    without = dataclasses.replace(SHAPE, keeps_prefixes=False)
    assert without.pool_sizes(1_000_000)[0] > SHAPE.pool_sizes(1_000_000)[0]


def test_no_more_than_the_sequences_can_use() -> None:
    full, _window = SHAPE.pool_sizes(1 << 40)
    assert full == 4 * 131072 // 64


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(EngineLoadError, match=r"kv_bytes 20000 is too small: 4 sequences and steps of 512 tokens need"):
        SHAPE.pool_sizes(20_000)
