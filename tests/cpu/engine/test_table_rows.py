"""Rows of block tables that are remembered equal rows that are copied, whatever happens to a table between steps."""

from __future__ import annotations

import random

import numpy as np

from gptoss_trt.runtime.engine.messages import Submit
from gptoss_trt.runtime.engine.sequence import BlockTable, Request, Sequence
from gptoss_trt.runtime.engine.table_rows import TableRows


def sequence() -> Sequence:
    return Sequence(Request((0, "r"), Submit("r", (1,), 1), 0, 0, 0, b""), 0, [1])


def expected(tables: list[list[int]], counts: list[int]) -> np.ndarray:
    out = np.full((len(tables), max(counts)), -1, dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, counts, strict=True)):
        out[row, :count] = table[:count]
    return out


def test_remembered_rows_are_the_tables() -> None:
    rng = random.Random(4)
    rows, sequences = TableRows(), [sequence() for _ in range(5)]
    for step in range(400):
        for one in sequences:
            table = one.table
            action = rng.choice(["keep", "keep", "grow", "shrink", "anew"])
            if action == "grow" or not table.window:
                table.window.append(rng.randrange(1000))
            elif action == "shrink" and len(table.window) > 1:
                table.window.pop(0)
                table.window_first += 1
                table.window.append(rng.randrange(1000))  # the same length as before
            elif action == "anew":
                one.table = BlockTable(
                    window=[rng.randrange(1000) for _ in table.window], window_first=table.window_first
                )
        chosen = rng.sample(sequences, rng.randrange(1, 6))
        tables = [one.table.window for one in chosen]
        firsts = [one.table.window_first for one in chosen]
        counts = [rng.randrange(1, len(table) + 1) for table in tables]
        ends = [first + count for first, count in zip(firsts, counts, strict=True)]
        got = rows.padded(chosen, tables, firsts, ends)
        assert np.array_equal(got, expected(tables, counts)), f"step {step}"
