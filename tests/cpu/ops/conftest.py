"""Poisoned outputs with guard bands around them, for every test of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

_GUARD_BYTES = 256
_GUARD = 0xA5


class Outputs:
    """Makes output tensors filled with poison (NaN, or a huge integer) between two guard bands."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        buffer = torch.full((size + 2 * _GUARD_BYTES,), _GUARD, dtype=torch.uint8)
        inside = buffer[_GUARD_BYTES : _GUARD_BYTES + size]
        inside.fill_(0xFF if dtype.is_floating_point else 0x7F)
        self._buffers.append((buffer, size))
        return inside.view(dtype).view(shape)

    def check(self) -> None:
        for buffer, size in self._buffers:
            assert bool((buffer[:_GUARD_BYTES] == _GUARD).all()), "memory before an output was written"
            assert bool((buffer[_GUARD_BYTES + size :] == _GUARD).all()), "memory behind an output was written"


@pytest.fixture
def outputs() -> Iterator[Outputs]:
    made = Outputs()
    yield made
    made.check()


@pytest.fixture
def random() -> Callable[..., torch.Tensor]:
    """Seeded normal numbers: random(3, 4) is the same in every run."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return draw
