"""Damage: random changes to bytes and to JSON-like values.

Invariant: what is changed depends on the generator alone, so a seed gives the same damage again. Must not know formats.
"""

from __future__ import annotations

import copy
import random
from typing import Any

Path = tuple[str | int, ...]

NUMBERS = (
    0,
    1,
    -1,
    2,
    63,
    64,
    65,
    127,
    128,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
KEYS = 9  # of the texts below serve as keys, too
TEXTS = (
    "", " ", "0", "-1", "null", "9" * 5000, "a" * 5000, "\x00", "\ud800", "é🙂", "<|end|>",
    "<|start|>assistant<|channel|>final", "../../etc/passwd", "%s%n", "NaN", "\u2028", "functions.x", "json",
)  # fmt: skip


def value(generator: random.Random) -> Any:
    """A value that a careless reader may trip over."""
    kind = generator.randrange(7)
    if kind == 0:
        return generator.choice(NUMBERS)
    if kind == 1:
        return generator.choice(FLOATS)
    if kind == 2:
        return generator.choice(TEXTS)
    if kind == 3:
        return generator.choice((None, True, False, [], {}))
    if kind == 4:
        return [value(generator) for _ in range(generator.randrange(4))]
    if kind == 5:
        return {generator.choice(TEXTS[:KEYS]): value(generator) for _ in range(generator.randrange(3))}
    return nested(generator.choice((3, 30, 120)), generator.random() < 0.5)


def nested(depth: int, objects: bool) -> Any:
    inner: Any = 1
    for _ in range(depth):
        inner = {"a": inner} if objects else [inner]
    return inner


def change(tree: Any, generator: random.Random) -> Any:
    """A copy of a JSON-like value with one to three changes: a node replaced, removed, repeated or added, or a field of
    one object put into another, as it is or changed."""
    tree = copy.deepcopy(tree)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            return value(generator)
        holder, key = generator.choice(places)
        deed = generator.randrange(9)
        if deed == 0:
            del holder[key]
        elif deed == 1 and isinstance(holder, dict):
            holder[generator.choice(TEXTS[:KEYS]) + generator.choice(("", str(key)))] = value(generator)
        elif deed == 2 and isinstance(holder, list):
            holder.extend([copy.deepcopy(holder[key])] * generator.choice((1, 100)))
        elif deed == 3:
            holder[key] = copy.deepcopy(_at(generator.choice(places)))
        elif deed == 4 and isinstance(holder, dict):
            place = generator.choice([each for each in places if isinstance(each[0], dict)])
            holder[place[1]] = copy.deepcopy(_at(place)) if generator.random() < 0.5 else value(generator)
        else:
            holder[key] = value(generator)
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a tree."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        found += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    return found


def _at(place: tuple[Any, Any]) -> Any:
    holder, key = place
    return holder[key]


def damage(data: bytes, generator: random.Random) -> bytes:
    """A copy of bytes with bits flipped, a piece cut out, repeated or replaced, or the end cut off."""
    out = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        at = generator.randrange(len(out) + 1)
        end = min(len(out), at + generator.choice((1, 1, 4, 64)))
        deed = generator.randrange(6)
        if deed == 0:
            del out[at:end]
        elif deed == 1:
            out[at:at] = out[at:end] * 3
        elif deed == 2:
            out[at:end] = generator.randbytes(end - at)
        elif deed == 3:
            out[at:end] = bytes([generator.choice((0, 1, 127, 128, 255))]) * (end - at)
        elif deed == 4 and generator.random() < 0.3:
            del out[at:]
        elif at < len(out):
            out[at] ^= 1 << generator.randrange(8)
    return bytes(out)
