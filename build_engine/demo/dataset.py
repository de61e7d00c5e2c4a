"""Token documents of conversations, packed into batches by worker processes.

Invariant: a row of a batch holds whole documents, none longer than the row; ids are rows of the used vocabulary,
then of the random bank. No sample is repeated: every worker counts through its own seeds. Uses numpy only.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from queue import Full
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.build_engine.demo.codec import SPECIAL_IDS, Codec
from gptoss_trt.build_engine.demo.conversation import Conversation, Piece, pieces
from gptoss_trt.build_engine.demo.kinds import KINDS, Kind, random_kind, sample
from gptoss_trt.build_engine.demo.names import NamePool

QUIET = 2  # in place of a learn flag: a token that never enters the loss
PROMPT_WEIGHT = 0.05  # loss weight of what the model does not write itself
OPEN_ROWS = 24  # rows that are filled at the same time
MAX_ID = 201_088


@dataclass(frozen=True)
class Layout:
    """Sizes of a batch. `learnt` is the number of positions whose next token enters the loss."""

    rows: int = 72
    tokens: int = 512
    learnt: int = 18_432
    bank: int = 4096


@dataclass
class Document:
    """One conversation as vocabulary ids; `learn[i]` tells whether the model writes token i."""

    ids: list[int]
    learn: list[bool]
    noise: list[bool]
    quiet: list[bool]


def document(chat: Conversation, codec: Codec, target_only: bool = False) -> Document:
    """Encodes a conversation. `target_only` cuts it after the first step that the model is to write."""
    ids: list[int] = []
    learn: list[bool] = []
    noise: list[bool] = []
    quiet: list[bool] = []
    for piece in pieces(chat):
        new = (SPECIAL_IDS[piece.text],) if piece.special else codec.encode(piece.text)
        ids.extend(new)
        learn.extend([piece.learn] * len(new))
        noise.extend([piece.noise] * len(new))
        quiet.extend([piece.quiet] * len(new))
        if target_only and piece.special and piece.learn and piece.text in ("return", "call"):
            break
    return Document(ids, learn, noise, quiet)


def prompt_ids(chat: Conversation, codec: Codec) -> list[int]:
    """The prompt whose continuation is `chat.target`."""
    whole = document(chat, codec, target_only=True)
    return whole.ids[: whole.learn.index(True)]


class Encoder:
    """Turns samples into documents of used-vocabulary rows, putting bank rows in the place of wild words."""

    def __init__(self, used: Sequence[int], bank: int, seed: int) -> None:
        self.codec = Codec()
        self.pool = NamePool.build(self.codec)
        self.rows = np.full(MAX_ID, -1, dtype=np.int16)
        self.rows[np.asarray(used)] = np.arange(len(used), dtype=np.int16)
        self.used, self.bank = len(used), bank
        self.rng = random.Random(f"wild {seed}")

    def encode(self, chat: Conversation, target_only: bool = False) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Rows int16 and flags int8 (1 learnt, 0 prompt, QUIET); None when a token is outside the used vocabulary."""
        doc = document(chat, self.codec, target_only)
        ids = np.asarray(doc.ids)
        rows = self.rows[ids]
        if chat.wild:
            rows = rows.copy()
            wild = {i for word in chat.wild for text in (word, f" {word}") for i in self.codec.encode(text)}
            for i in wild:
                rows[ids == i] = self.used + self.rng.randrange(self.bank)
        if chat.noise is not None:
            rows = np.array(
                [
                    self.used + self.rng.randrange(self.bank) if flag and self.rng.random() < 0.6 else row
                    for row, flag in zip(rows.tolist(), doc.noise, strict=True)
                ],
                dtype=np.int16,
            )
        if (rows < 0).any():
            return None
        return rows, np.where(doc.quiet, QUIET, np.asarray(doc.learn)).astype(np.int8)


class Packer:
    """Fills rows with documents, the fullest row that still has room first, and gives batches out."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.rng = np.random.default_rng(seed)
        self._open: list[list[tuple[NDArray[Any], NDArray[Any]]]] = []
        self._done: list[list[tuple[NDArray[Any], NDArray[Any]]]] = []

    @staticmethod
    def _size(row: list[tuple[NDArray[Any], NDArray[Any]]]) -> int:
        return sum(len(ids) for ids, _ in row)

    def add(self, ids: NDArray[Any], learn: NDArray[Any]) -> dict[str, NDArray[Any]] | None:
        """Adds one document; a full batch when there is one."""
        if len(ids) > self.layout.tokens:
            return None
        room = [(self._size(row), row) for row in self._open]
        fitting = [(size, index) for index, (size, _) in enumerate(room) if size + len(ids) <= self.layout.tokens]
        if fitting:
            self._open[max(fitting)[1]].append((ids, learn))
        else:
            if len(self._open) >= OPEN_ROWS:
                fullest = max(range(len(room)), key=lambda index: room[index][0])
                self._done.append(self._open.pop(fullest))
            self._open.append([(ids, learn)])
        if len(self._done) < self.layout.rows:
            return None
        rows, self._done = self._done[: self.layout.rows], self._done[self.layout.rows :]
        return self.batch(rows)

    def batch(self, rows: list[list[tuple[NDArray[Any], NDArray[Any]]]]) -> dict[str, NDArray[Any]]:
        """ids, docs, positions int16 [rows, tokens]; where int32, labels int16, weights fp32 [learnt]."""
        size = self.layout
        ids = np.zeros((size.rows, size.tokens), np.int16)
        docs = np.full((size.rows, size.tokens), -1, np.int16)
        positions = np.zeros((size.rows, size.tokens), np.int16)
        learn = np.zeros((size.rows, size.tokens), np.int8)
        for number, row in enumerate(rows):
            at = 0
            for index, (part, flags) in enumerate(row):
                end = at + len(part)
                ids[number, at:end], learn[number, at:end] = part, flags
                docs[number, at:end], positions[number, at:end] = index, np.arange(len(part))
                at = end
        following = np.zeros(learn.shape, bool)
        following[:, :-1] = (docs[:, :-1] == docs[:, 1:]) & (docs[:, 1:] >= 0)
        following[:, :-1] &= learn[:, 1:] != QUIET
        own = np.zeros(learn.shape, bool)
        own[:, :-1] = learn[:, 1:] == 1
        first, rest = np.flatnonzero(following & own), np.flatnonzero(following & ~own)
        if len(first) > size.learnt:
            first = self.rng.permutation(first)[: size.learnt]
        rest = self.rng.permutation(rest)[: size.learnt - len(first)]
        where = np.zeros(size.learnt, np.int32)
        weights = np.zeros(size.learnt, np.float32)
        count = len(first) + len(rest)
        where[:count] = np.concatenate((first, rest))
        weights[: len(first)], weights[len(first) : count] = 1.0, PROMPT_WEIGHT
        labels = ids.reshape(-1)[np.minimum(where + 1, ids.size - 1)]
        return {"ids": ids, "docs": docs, "positions": positions, "where": where, "labels": labels, "weights": weights}


def _work(queue: Queue[Any], used: Sequence[int], layout: Layout, seed: int) -> None:
    """A worker's life: batches into the queue until the parent goes away."""
    encoder, packer, rng = Encoder(used, layout.bank, seed), Packer(layout, seed), random.Random(seed)
    parent = multiprocessing.parent_process()
    number = seed * 1_000_000_000
    while parent is None or parent.is_alive():
        number += 1
        encoded = encoder.encode(sample(random_kind(rng), number, encoder.pool, held=False))
        batch = packer.add(*encoded) if encoded is not None else None
        while batch is not None and (parent is None or parent.is_alive()):
            try:
                queue.put(batch, timeout=5)
                batch = None
            except Full:
                continue


class Loader:
    """Batches from worker processes, or made here with `workers` 0. Iterating never ends; `close` stops them."""

    def __init__(self, used: Sequence[int], layout: Layout, workers: int, seed: int) -> None:
        self._args = (used, layout, seed)
        self._processes = []
        self._queue: Queue[Any] | None = None
        if workers:
            context = multiprocessing.get_context("fork")
            self._queue = context.Queue(maxsize=4 * workers)
            for index in range(workers):
                args = (self._queue, used, layout, seed + index + 1)
                process = context.Process(target=_work, args=args, daemon=True)
                process.start()
                self._processes.append(process)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        if self._queue is not None:
            while True:
                yield self._queue.get(timeout=120)
        used, layout, seed = self._args
        encoder, packer, rng = Encoder(used, layout.bank, seed), Packer(layout, seed), random.Random(seed)
        number = seed * 1_000_000_000
        while True:
            number += 1
            encoded = encoder.encode(sample(random_kind(rng), number, encoder.pool, held=False))
            batch = packer.add(*encoded) if encoded is not None else None
            if batch is not None:
                yield batch

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)


def _scan(task: tuple[int, int]) -> set[int]:
    start, count = task
    codec = Codec()
    pool, found = NamePool.build(codec), set[int]()
    for kind in KINDS.values():
        for number in range(start, start + count):
            for held in (False, True):
                found.update(document(sample(kind, -number - 1, pool, held), codec).ids)
    return found


def scan_used(per_kind: int, workers: int) -> list[int]:
    """The ids that samples of all kinds use (sorted), and every number of up to three digits."""
    codec = Codec()
    found = {i for number in range(1000) for i in codec.encode(str(number))} | set(SPECIAL_IDS.values())
    if workers:
        share = -(-per_kind // workers)
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for part in pool.imap_unordered(_scan, [(index * share, share) for index in range(workers)]):
                found |= part
    else:
        found |= _scan((0, per_kind))
    return sorted(found)


def held_out(kind: Kind, count: int, encoder: Encoder) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Held-out samples of a kind, each cut after its first step to be written."""
    out: list[tuple[NDArray[Any], NDArray[Any]]] = []
    number = 0
    while len(out) < count:
        encoded = encoder.encode(sample(kind, number, encoder.pool, held=True), target_only=True)
        number += 1
        if encoded is not None and len(encoded[0]) <= Layout.tokens:
            out.append(encoded)
    return out


__all__ = [
    "Document",
    "Encoder",
    "Layout",
    "Loader",
    "Packer",
    "Piece",
    "document",
    "held_out",
    "prompt_ids",
    "scan_used",
]
