"""What ranks say to each other during a step: a small interface, and its single-rank form.

Invariant: the forward pass talks to other ranks through a `Group` only; with one rank every call is the identity and
costs nothing. Must not know layers, engines or how ranks were started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class Group(Protocol):
    """Ranks that add up, or put side by side, what each holds a part of. Every rank of the group makes the same calls
    in the same order, on the current stream."""

    @property
    def size(self) -> int:
        """Number of ranks, at least 1."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x (same shape and dtype), in rank order on every rank; may be x itself, overwritten."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' x in rank order along `dim`, whose size may differ between ranks."""


class SingleRank:
    """The group of one."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class Groups:
    """The two groups of a rank: `attention` shares attention, embedding and vocabulary (the TP ranks of its DP group);
    `experts` shares the expert layer (the world)."""

    attention: Group = field(default_factory=SingleRank)
    experts: Group = field(default_factory=SingleRank)
