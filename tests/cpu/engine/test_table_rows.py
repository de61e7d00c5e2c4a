"""Rows of block tables that are kept from step to step equal rows that are copied, whatever happens between steps."""

from __future__ import annotations

import random

import numpy as np

from gptoss_trt.runtime.engine.sequence import BlockTable
from gptoss_trt.runtime.engine.table_rows import TableRows

BLOCK, WINDOW = 4, 10


class Row:
    """A sequence's table as the cache keeps it: it grows at its end, its window loses blocks at the front."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.begin = 0
        self.renew()

    def renew(self) -> None:
        self.table = BlockTable()

    def reach(self, end: int) -> None:
        """Blocks for positions up to `end`; the window may lag behind what `begin` needs."""
        blocks = -(-end // BLOCK)
        table = self.table
        while len(table.full) < blocks + self.rng.randrange(2):
            table.full.append(self.rng.randrange(1000))
        while table.window_first + len(table.window) < blocks:
            table.window.append(self.rng.randrange(1000))

    def slide(self) -> None:
        first = max(0, self.begin - WINDOW + 1) // BLOCK
        while self.table.window_first < first:
            self.table.window.pop(0)
            self.table.window_first += 1


def expected(rows: list[Row], ends: list[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    firsts = [max(0, row.begin - WINDOW + 1) // BLOCK for row in rows]
    lasts = [-(-end // BLOCK) for end in ends]
    full = np.full((len(rows), max(lasts)), -1, np.int32)
    window = np.full((len(rows), max(b - a for a, b in zip(firsts, lasts, strict=True))), -1, np.int32)
    for i, (row, first, last) in enumerate(zip(rows, firsts, lasts, strict=True)):
        table = row.table
        full[i, :last] = table.full[:last]
        window[i, : last - first] = table.window[first - table.window_first : last - table.window_first]
    return full, window, firsts


def test_kept_rows_are_the_tables() -> None:
    rng = random.Random(4)
    kept, rows = TableRows(BLOCK, WINDOW), [Row(rng) for _ in range(6)]
    chosen = rows[:3]
    for step in range(1500):
        if rng.random() < 0.3:  # others, in another order
            chosen = rng.sample(rows, rng.randrange(1, 7))
        ends = []
        for row in chosen:
            if rng.random() < 0.03:
                row.renew()  # paused: other blocks, computed again
                row.begin = 0
            ends.append(row.begin + rng.choice((1, 1, 1, 1, rng.randrange(1, 30))))
            row.reach(ends[-1])
        begins = np.array([row.begin for row in chosen], np.int32)
        full, window, firsts = kept.of([row.table for row in chosen], begins, np.array(ends, np.int32))
        want_full, want_window, want_firsts = expected(chosen, ends)
        assert np.array_equal(full, want_full) and np.array_equal(window, want_window), f"step {step}"
        assert firsts.tolist() == want_firsts
        if rng.random() < 0.9:  # else the same step once more, or a shorter one: it was withdrawn
            for row, end in zip(chosen, ends, strict=True):
                row.begin = end
        if rng.random() < 0.7:
            for row in chosen:
                row.slide()
