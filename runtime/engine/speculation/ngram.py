"""The n-gram drafter: what followed the last time that the sequence's latest tokens stood in its prompt or output.

Invariant: the cost of a draft is bounded whatever the text: INDEXED_A_CALL tokens enter the index, CANDIDATES places
are compared over LONGEST_MATCH tokens. Must not know models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.drafter import Wanted

SHORTEST_MATCH = 3  # tokens: with two, ordinary prose matches somewhere and goes on differently
LONGEST_MATCH = 32
CANDIDATES = 16  # places of one n-gram that are compared, newest first
INDEXED_A_CALL = 4096  # a prompt of 128k tokens takes 32 calls of some 6 ms to be known


class NgramIndex:
    """Where each run of SHORTEST_MATCH tokens of a growing list ends. The list may only be appended to."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}  # n-gram: the end of its latest place
        self._before: list[int] = []  # by end - SHORTEST_MATCH: the end of the place before, 0 for none

    @property
    def indexed(self) -> int:
        """Tokens that the index covers."""
        return len(self._before) + SHORTEST_MATCH - 1 if self._before else 0

    def extend(self, tokens: Items[int], most: int = INDEXED_A_CALL) -> None:
        """Takes in at most `most` tokens behind those known."""
        for end in range(len(self._before) + SHORTEST_MATCH, min(len(tokens), self.indexed + most) + 1):
            ngram = tuple(tokens[end - SHORTEST_MATCH : end])
            self._before.append(self._last.get(ngram, 0))
            self._last[ngram] = end

    def match(self, tokens: Items[int]) -> int:
        """Where the longest match of the list's end ends, the newest of equals; 0 without one."""
        best, longest = 0, 0
        end = self._last.get(tuple(tokens[-SHORTEST_MATCH:]), 0)
        if end == len(tokens):
            end = self._before[end - SHORTEST_MATCH]
        for _ in range(CANDIDATES):
            if not end or longest == LONGEST_MATCH:
                break
            length = _common_end(tokens, end)
            if length > longest:
                best, longest = end, length
            end = self._before[end - SHORTEST_MATCH]
        return best


class NgramDrafter:
    """A Drafter that needs no model."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def draft(self, wanted: Wanted) -> list[list[int]]:
        return [self._continuation(sequence, count) for sequence, count in wanted]

    def _continuation(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.tokens
        index = self._indexes.setdefault(sequence, NgramIndex())
        index.extend(tokens)
        end = index.match(tokens)
        if not end:
            return []
        period = len(tokens) - end  # a match that runs into the end goes on as a repetition
        return [tokens[end + place % period] for place in range(count)]


def _common_end(tokens: Items[int], end: int) -> int:
    """How many tokens before `end` equal those at the list's end, SHORTEST_MATCH being known; at most
    LONGEST_MATCH."""
    length, last = SHORTEST_MATCH, len(tokens)
    while length < min(end, LONGEST_MATCH) and tokens[end - 1 - length] == tokens[last - 1 - length]:
        length += 1
    return length
