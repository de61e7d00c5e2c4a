"""Block tables of a step as padded arrays, kept from step to step: only rows and entries that changed are written.

Invariant: what comes out equals a fresh copy of the tables: a row is kept with the table object that it was copied from
(one object while a sequence holds blocks), and what a step asks for beyond or below it is copied or cleared. Must not
know pools or tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.runtime.engine.sequence import BlockTable

Ints = NDArray[np.int32]
UNUSED = -1
LEAST_WIDTH = 8


class TableRows:
    """The rows of the sequences of the last step, in its order, for blocks of `block_tokens` and a window of
    `window` tokens."""

    def __init__(self, block_tokens: int, window: int) -> None:
        self._block_tokens = block_tokens
        self._window_tokens = window
        self._tables: list[BlockTable] = []
        self._full = np.full((1, LEAST_WIDTH), UNUSED, np.int32)
        self._window = np.full((1, LEAST_WIDTH), UNUSED, np.int32)
        # What each row holds: full blocks [0, full_end), window blocks [window_first, window_end), logical numbers.
        self._full_end = np.zeros(1, np.int32)
        self._window_first = np.zeros(1, np.int32)
        self._window_end = np.zeros(1, np.int32)

    def of(self, tables: list[BlockTable], begins: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        """(full blocks [S, most], window blocks [S, most], first window block [S]) for queries at [begins, ends) of
        each sequence: blocks that they see or write, unused entries -1. Views that hold until the next call."""
        if tables != self._tables:
            self._arrange(tables)
        last = -(-ends // self._block_tokens)
        first = np.maximum(begins - (self._window_tokens - 1), 0) // self._block_tokens
        self._fill_full(last)
        self._fill_window(first, last)
        return self._full[:, : int(last.max())], self._window[:, : int((last - first).max())], first

    def row(self, table: BlockTable, begin: int, end: int) -> tuple[list[int], list[int], int]:
        """What `of` gives for one sequence alone, without what is kept."""
        last = -(-end // self._block_tokens)
        first = max(begin - (self._window_tokens - 1), 0) // self._block_tokens
        return table.full[:last], table.window[first - table.window_first : last - table.window_first], first

    def _arrange(self, tables: list[BlockTable]) -> None:
        """Brings the rows into the order of `tables`; rows of tables that were not there become empty."""
        known = {table: row for row, table in enumerate(self._tables)}
        order = np.fromiter((known.get(table, UNUSED) for table in tables), np.int64, len(tables))
        fresh = order == UNUSED
        self._full, self._window = self._full[order], self._window[order]
        self._full_end, self._window_end = self._full_end[order], self._window_end[order]
        self._window_first = self._window_first[order]
        self._full[fresh] = self._window[fresh] = UNUSED
        self._full_end[fresh] = self._window_end[fresh] = self._window_first[fresh] = 0
        self._tables = tables

    def _fill_full(self, last: Ints) -> None:
        self._full = _widened(self._full, int(last.max()))
        for row in np.flatnonzero(last != self._full_end).tolist():
            begin, end = int(self._full_end[row]), int(last[row])
            if begin < end:
                self._full[row, begin:end] = self._tables[row].full[begin:end]
            else:
                self._full[row, end:] = UNUSED
        self._full_end = last

    def _fill_window(self, first: Ints, last: Ints) -> None:
        self._window = _widened(self._window, int((last - first).max()))
        changed = (first != self._window_first) | (last != self._window_end)
        for row in np.flatnonzero(changed).tolist():
            table = self._tables[row]
            skip, count = int(first[row]) - table.window_first, int(last[row] - first[row])
            self._window[row, :count] = table.window[skip : skip + count]
            self._window[row, count:] = UNUSED
        self._window_first, self._window_end = first, last


def _widened(rows: Ints, width: int) -> Ints:
    """`rows`, or a copy at least twice as wide with unused entries behind, when they are narrower than `width`."""
    if width <= rows.shape[1]:
        return rows
    wide: NDArray[Any] = np.full((len(rows), max(width, 2 * rows.shape[1])), UNUSED, np.int32)
    wide[:, : rows.shape[1]] = rows
    return wide
