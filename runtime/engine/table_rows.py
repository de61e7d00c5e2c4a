"""Block tables of a step as one padded array, remembering each sequence's row from the step before.

Invariant: what comes out equals a fresh copy of the tables: a row is used again only while its list is the same object
with the same first block and length, because lists grow at their end and lose blocks at their front alone. Must not
know pools or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import numpy as np

from gptoss_trt.runtime.engine.sequence import Sequence

Array = np.ndarray[tuple[int, int], np.dtype[np.int32]]
_Row = tuple[list[int], int, np.ndarray[tuple[int], np.dtype[np.int32]]]


class TableRows:
    """The rows of one pool's tables."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Sequence, _Row] = WeakKeyDictionary()

    def padded(
        self, sequences: Items[Sequence], tables: Items[list[int]], firsts: Items[int], ends: Items[int]
    ) -> Array:
        """int32 [sequences, most blocks], unused entries -1: blocks of each table up to logical block `ends`, where
        `firsts` is the logical number of its first."""
        counts = [end - first for first, end in zip(firsts, ends, strict=True)]
        out = np.full((len(tables), max(counts)), -1, dtype=np.int32)
        for row, (sequence, table, first, count) in enumerate(zip(sequences, tables, firsts, counts, strict=True)):
            known = self._known.get(sequence)
            if known is None or known[0] is not table or known[1] != first or len(known[2]) != len(table):
                known = self._known[sequence] = (table, first, np.array(table, dtype=np.int32))
            out[row, :count] = known[2][:count]
        return out
