"""Hashing while pieces arrive in any order."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path

import pytest

from gptoss_trt.build_engine import prefix_hash
from gptoss_trt.build_engine.prefix_hash import PrefixHash


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_the_hash_of_the_whole(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hash, "READ_BYTES", 7)
    generator = random.Random(seed)
    content = generator.randbytes(1000)
    path = tmp_path / "file"
    path.write_bytes(content)
    borders = [0, *sorted(generator.sample(range(1, 1000), 20)), 1000]
    pieces = list(itertools.pairwise(borders))
    generator.shuffle(pieces)
    following = PrefixHash(path, 1000)
    for start, stop in pieces:
        following.written(start, stop)
    assert following.finish() == hashlib.sha256(content).hexdigest()
    following.abandon()


def test_a_gap_has_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    following = PrefixHash(path, 100)
    following.written(0, 40)
    following.written(50, 100)
    with pytest.raises(ValueError, match="60 bytes behind byte 40"):
        following.finish()


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(50))
    following = PrefixHash(path, 100)
    following.written(0, 100)
    with pytest.raises(OSError, match="ended at byte 50 of 100"):
        following.finish()
