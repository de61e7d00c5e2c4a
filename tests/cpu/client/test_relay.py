"""Streams that a thread reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gptoss_trt.client.chat.relay import relayed


def test_items_come_in_order_from_another_thread() -> None:
    readers = []

    def items() -> Iterator[int]:
        for number in range(100):
            readers.append(threading.current_thread())
            yield number

    assert list(relayed(items())) == list(range(100))
    assert len(set(readers)) == 1 and readers[0] is not threading.main_thread()


def test_an_error_comes_behind_what_came_before_it() -> None:
    def items() -> Iterator[str]:
        yield "first"
        raise LookupError("lost")

    stream = relayed(items())
    assert next(stream) == "first"
    with pytest.raises(LookupError, match="lost"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
