"""Held-out samples through the training forward: which kinds reach their level.

Invariant: a sample counts only when every token that the model writes in its step, analysis included, is the
greedy one after the true prefix; then greedy decoding gives the same text, so the share is a lower bound of the
visible message's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.build_engine.demo.dataset import Encoder, Layout, Packer, held_out
from gptoss_trt.build_engine.demo.kinds import KINDS

Sample = tuple[str, NDArray[Any], NDArray[Any]]


def held_out_samples(encoder: Encoder, count: int, kinds: Iterable[str]) -> list[Sample]:
    """`count` samples of each kind: its name, rows and learn flags."""
    return [(name, *encoded) for name in kinds for encoded in held_out(KINDS[name], count, encoder)]


def _groups(samples: list[Sample], layout: Layout) -> Iterable[list[list[Sample]]]:
    """Samples in rows, rows in batches, within the sizes of the layout."""
    rows: list[list[Sample]] = []
    learnt = 0
    for sample in sorted(samples, key=lambda item: len(item[1])):
        own = int((sample[2] == 1).sum())
        if len(sample[1]) > layout.tokens or own > layout.learnt:
            raise ValueError(
                f"a held-out sample of {sample[0]} has {len(sample[1])} tokens; a row holds {layout.tokens}"
            )
        fits = rows and sum(len(item[1]) for item in rows[-1]) + len(sample[1]) <= layout.tokens
        if learnt + own > layout.learnt or (not fits and len(rows) == layout.rows):
            yield rows
            rows, learnt, fits = [], 0, False
        if fits:
            rows[-1].append(sample)
        else:
            rows.append([sample])
        learnt += own
    if rows:
        yield rows


def evaluate(
    samples: list[Sample], layout: Layout, hits_of: Callable[[dict[str, NDArray[Any]]], NDArray[Any]]
) -> dict[str, tuple[int, int]]:
    """For each kind: samples whose step is right, and samples. `hits_of` runs one batch and tells which labels win."""
    packer = Packer(layout, 0)
    result: dict[str, tuple[int, int]] = {}
    for rows in _groups(samples, layout):
        batch = packer.batch([[(ids, learn) for _, ids, learn in row] for row in rows])
        hits = hits_of(batch)
        wrong = np.zeros(layout.rows * layout.tokens, bool)
        own = batch["weights"] == 1.0
        wrong[batch["where"][own & ~hits]] = True
        for number, row in enumerate(rows):
            at = number * layout.tokens
            for name, ids, _ in row:
                right, total = result.get(name, (0, 0))
                result[name] = (right + int(not wrong[at : at + len(ids)].any()), total + 1)
                at += len(ids)
    return result


def report(result: dict[str, tuple[int, int]]) -> str:
    """One line a kind, those below their level marked."""
    lines = []
    for name, (right, total) in result.items():
        level = KINDS[name].level
        mark = "" if right >= level * total else f"   below {level}"
        lines.append(f"{name:24s} {right:4d} / {total:4d}  {right / total:.3f}{mark}")
    return "\n".join(lines)
