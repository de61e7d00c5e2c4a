"""The order of a core's work: the step behind the one that runs is planned and launched before that one's tokens are
taken.

Invariant: plans are run and committed in the order of planning, at most one is under way when another is made, and what
comes out is the same token for token as without running ahead. A step that the runner cannot launch (a guide, a
penalty, log-probabilities, an error) is run when nothing else is under way, in series. Must not know devices, batches
or sockets.

Why the device may run ahead safely: it runs steps in the order of their launch, so what a step writes lies there before
any later step reads it or writes over it, whoever owned the block meanwhile; the scheduler's page says who may own it.
"""

from __future__ import annotations

from collections.abc import Callable

from gptoss_trt.runtime.engine.scheduler import Scheduler
from gptoss_trt.runtime.engine.step_plan import StepPlan
from gptoss_trt.runtime.engine.steps import Flight, StepRunner


class Pipeline:
    """Drives `scheduler` and `runner`; `runs_ahead` False makes every step serial. `clock_ns` tells the time."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, *, runs_ahead: bool, clock_ns: Callable[[], int]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._runs_ahead = runs_ahead
        self._clock_ns = clock_ns
        self._flight: Flight | None = None
        self._planned: StepPlan | None = None  # and to be run in series

    def begin(self) -> None:
        """Plans a step where none is planned, and launches it if it can be."""
        if self._flight is None and self._planned is None:
            plan = self._scheduler.plan(self._clock_ns())
            self._flight = self._runner.launch(plan, None)
            self._planned = plan if self._flight is None else None

    def step(self) -> bool:
        """Brings the oldest planned step to its end; whether there was one."""
        self.begin()
        if self._flight is None:
            plan, self._planned = self._planned, None
            return plan is not None and self._run(plan)
        flight, self._flight = self._flight, self._launch_ahead(self._flight) if self._runs_ahead else None
        self._scheduler.prepare_commit(flight.plan)
        outcomes = self._runner.collect(flight)
        self._scheduler.commit(flight.plan, outcomes, self._clock_ns())
        return True

    def _launch_ahead(self, before: Flight) -> Flight | None:
        plan = self._scheduler.plan_ahead(self._clock_ns())
        if plan is None:
            return None
        flight = self._runner.launch(plan, before)
        if flight is None:
            self._scheduler.withdraw(plan)
        return flight

    def _run(self, plan: StepPlan) -> bool:
        if plan.work:
            outcomes = self._runner.run(plan)
            self._scheduler.commit(plan, outcomes, self._clock_ns())
        return bool(plan.work)
