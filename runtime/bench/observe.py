"""Counts the experts that a piece of work touches, by looking at what the op that routes writes.

Invariant: the work runs eagerly and unchanged; a captured graph replays without passing here. Must not know the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ACTIVE = "active_experts"  # an op's output: the number of local experts with rows comes first


class _RouteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the number of active experts of every routing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = _place(func)
        if place is not None:
            self.counts.append(args[place][0].clone())
        return result


@functools.cache
def _place(func: Any) -> int | None:
    """Which argument of an op is the active experts that it writes; None when it writes none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == _ACTIVE and argument.alias_info is not None and argument.alias_info.is_write:
            return place
    return None


def mean_distinct_experts(work: Callable[[], object]) -> float:
    """The mean over all routings in `work()` of the number of experts with rows. Raises ValueError without any."""
    with _RouteWatch() as watch:
        work()
    if not watch.counts:
        raise ValueError("the work routed no tokens: it ran no expert layer, or replayed a graph")
    return float(torch.stack(watch.counts).float().mean())
