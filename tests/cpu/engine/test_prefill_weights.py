"""FP8 copies of experts for steps of many tokens: how much memory they get."""

from __future__ import annotations

from typing import Any

import pytest

from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.prefill_weights import copies_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "all_gib", "gib"),
    [
        ({}, 18, 18),
        ({}, 26, 0),  # a part of the layers gains less than the cache loses
        ({"kv_bytes": 20 * GIB}, 107, 65),  # what the cache and steps leave
        ({"kv_bytes": 90 * GIB}, 18, 0),
        ({"prefill_weights": "none"}, 18, 0),
        ({"prefill_weights": "2.5"}, 18, 2.5),
        ({"prefill_weights": "200"}, 107, 85),
        ({"prefill_weights": "30", "kv_bytes": 60 * GIB}, 107, 25),
        ({"deterministic": True}, 18, 0),
    ],
)
def test_memory_of_copies(options: dict[str, Any], all_gib: int, gib: float) -> None:
    assert copies_bytes(EngineOptions(**options), 100 * GIB, all_gib * GIB) == int(gib * GIB)


@pytest.mark.parametrize("given", ["some", "-1", "nan", ""])
def test_impossible_memory_is_an_error(given: str) -> None:
    with pytest.raises(EngineLoadError, match="engine option prefill_weights is"):
        EngineOptions(prefill_weights=given)
