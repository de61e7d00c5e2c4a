"""The scheduler under random workloads with a virtual clock: nothing leaks, starves, or ends twice, and every key is
right (scheduler_simulator.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler_simulator import LONGEST_WAIT_STEPS, SHAPES, Simulator


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_loads_keep_every_invariant(name: str, ahead: bool) -> None:
    simulator = Simulator(replace(SHAPES[name], ahead=ahead), seed=20_251)
    simulator.run(5000)
    assert not ahead or min(simulator.seen[what] for what in ("ahead", "withdrawn", "awaited")) > 20
    assert simulator.longest_wait < LONGEST_WAIT_STEPS
    assert simulator.seen["length"] and simulator.seen["stop"] and simulator.seen["cancelled"]


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_keep_every_invariant(name: str, ahead: bool) -> None:
    simulator = Simulator(replace(SHAPES[name], ahead=ahead, drafts=0.3), seed=20_252)
    simulator.run(1300)
    assert simulator.longest_wait < LONGEST_WAIT_STEPS
    assert simulator.seen["length"] and simulator.seen["stop"] and simulator.seen["cancelled"]
    if SHAPES[name].step_tokens > 1:
        assert simulator.seen["accepted"] > 50 and simulator.seen["rejected"] > 50
        assert not ahead or simulator.seen["ahead"] > 20


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
def test_failed_steps_fail_their_requests_only(ahead: bool) -> None:
    simulator = Simulator(replace(SHAPES["usual"], failures=0.05, ahead=ahead), seed=5)
    simulator.run(5000)
    assert simulator.seen["poisoned"] > 50 and simulator.seen["length"] > 50  # it spreads, but not to everybody


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
def test_the_loads_reach_what_they_are_for(ahead: bool) -> None:
    tight = Simulator(replace(SHAPES["tight full pool"], ahead=ahead), seed=1)
    tight.run(2000)
    assert tight.statistics.preemptions > 10
    assert tight.cache.full.reused > 100
    assert not ahead or tight.seen["given up"] > 10
    flooded = Simulator(replace(SHAPES["flooded"], ahead=ahead), seed=1)
    flooded.run(1000)
    assert flooded.seen["RESOURCE_EXHAUSTED"] > 50
    assert flooded.seen["DEADLINE_EXCEEDED"] > 5
