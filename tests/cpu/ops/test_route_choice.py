"""Which norms and routings go to the library, and in one kernel or several: a function of shapes alone."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "top_k", "kernels"),
    [
        (0, 2880, 32, 4, None),
        (7, 2880, 32, 4, None),  # Triton is faster
        (8, 2880, 32, 4, "one"),
        (256, 2880, 32, 4, "one"),
        (257, 2880, 32, 4, "several"),
        (128, 2880, 128, 4, "one"),
        (129, 2880, 128, 4, "several"),
        (32768, 2880, 128, 4, "several"),
        (32769, 2880, 128, 4, None),
        (64, 2884, 32, 4, None),
        (64, 4104, 32, 4, None),
        (64, 2880, 129, 4, None),
        (64, 2880, 3, 4, None),
        (64, 2880, 32, 2, None),
    ],
)
def test_what_the_library_takes(tokens: int, hidden: int, experts: int, top_k: int, kernels: str | None) -> None:
    from gptoss_trt.ops import rmsnorm_route  # brings Triton, whose interpreter the interpret tier chooses first

    names = {None: "triton", "one": "cluster", "several": "pieces"}
    assert rmsnorm_route.kernels_for(tokens, hidden, experts, top_k) == names[kernels]


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "resident"),
    [
        (512, 2880, 32, False),
        (513, 2880, 32, True),
        (513, 3072, 4, True),
        (8192, 3080, 32, False),
        (8192, 2880, 33, False),
    ],
)
def test_whose_router_stays_in_shared_memory(tokens: int, hidden: int, experts: int, resident: bool) -> None:
    from gptoss_trt.ops import rmsnorm_route

    assert rmsnorm_route.is_resident(tokens, hidden, experts) == resident


@pytest.mark.parametrize(("hidden", "taken"), [(8, True), (2880, True), (4096, True), (4104, False), (2884, False)])
def test_rows_that_the_librarys_norm_takes(hidden: int, taken: bool) -> None:
    from gptoss_trt.ops import rmsnorm_quant

    assert rmsnorm_quant.takes(hidden) == taken
