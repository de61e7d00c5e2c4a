"""Counts the experts that a piece of work touches, by looking at what the router op returns.

Invariant: the work runs eagerly and unchanged; a captured graph replays without passing here. Must not know the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUTE = "gptoss_trt::moe_route"
_ACTIVE = 9  # argument active_experts of moe_route: the number of local experts with rows comes first


class _RouteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the number of active experts of every routing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == _ROUTE:
            self.counts.append(args[_ACTIVE][0].clone())
        return result


def mean_distinct_experts(work: Callable[[], object]) -> float:
    """The mean over all routings in `work()` of the number of experts with rows. Raises ValueError without any."""
    with _RouteWatch() as watch:
        work()
    if not watch.counts:
        raise ValueError("the work routed no tokens: it ran no expert layer, or replayed a graph")
    return float(torch.stack(watch.counts).float().mean())
