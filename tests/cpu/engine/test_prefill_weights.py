"""FP8 copies of experts for steps of many tokens: how much memory they get."""

from __future__ import annotations

from typing import Any

import pytest

from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.prefill_weights import copies_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "kept_gib", "all_gib", "gib"),
    [
        ({}, 10, 18, 18),
        ({}, 10, 26, 0),  # a part of the layers gains less than the cache loses
        ({}, 90, 18, 0),
        ({"kv_bytes": 20 * GIB}, 22, 107, 78),  # what the cache and steps leave
        ({"kv_bytes": 90 * GIB}, 92, 18, 8),
        ({"kv_bytes": 110 * GIB}, 112, 18, 0),
        ({"prefill_weights": "none"}, 10, 18, 0),
        ({"prefill_weights": "2.5"}, 10, 18, 2.5),
        ({"prefill_weights": "200"}, 8, 107, 92),
        ({"prefill_weights": "30", "kv_bytes": 60 * GIB}, 75, 107, 25),
        ({"deterministic": True}, 10, 18, 0),
    ],
)
def test_memory_of_copies(options: dict[str, Any], kept_gib: int, all_gib: int, gib: float) -> None:
    size = copies_bytes(EngineOptions(**options), 100 * GIB, kept_gib * GIB, all_gib * GIB)
    assert size == int(gib * GIB)


@pytest.mark.parametrize("given", ["some", "-1", "nan", ""])
def test_impossible_memory_is_an_error(given: str) -> None:
    with pytest.raises(EngineLoadError, match="engine option prefill_weights is"):
        EngineOptions(prefill_weights=given)
