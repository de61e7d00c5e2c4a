"""The queue of sequences that wait for a place: by priority, fair between tenants, bounded, and nobody waits for ever.

Invariant: a sequence is in the queue exactly once. Order: effective priority (a level better for every AGING_S waited),
paused sequences before new ones, the tenant that was served least, arrival. Must not know blocks or time sources.
"""

from __future__ import annotations

from collections import deque

from gptoss_trt.runtime.engine.sequence import Request, Sequence

AGING_NS = 10_000_000_000  # after 10 s of waiting a request counts as one priority level better

Tenant = tuple[int, str]


class WaitingQueue:
    """Requests with sequences that were not started, and paused sequences."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._fresh: dict[tuple[Tenant, int], deque[Sequence]] = {}  # by tenant and priority, in order of arrival
        self._paused: list[Sequence] = []
        self._served: dict[Tenant, float] = {}  # tokens granted so far, on a common clock
        self._clock = 0.0
        self._requests: dict[Request, int] = {}  # fresh sequences that wait, by request

    def __len__(self) -> int:
        return sum(self._requests.values()) + len(self._paused)

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._fresh.get((sequence.request.tenant, sequence.request.submit.priority), ())
        return sequence in self._paused or sequence in line

    @property
    def requests(self) -> int:
        """Requests that have not started a sequence that waits: what the limit counts."""
        return len(self._requests)

    @property
    def paused(self) -> int:
        return len(self._paused)

    @property
    def is_full(self) -> bool:
        return len(self._requests) >= self.limit

    def add(self, sequence: Sequence) -> None:
        """A new sequence, at the end of its tenant's line."""
        request = sequence.request
        line = (request.tenant, request.submit.priority)
        self._fresh.setdefault(line, deque()).append(sequence)
        self._requests[request] = self._requests.get(request, 0) + 1
        self._served[request.tenant] = max(self._served.get(request.tenant, 0.0), self._clock)

    def add_paused(self, sequence: Sequence) -> None:
        self._paused.append(sequence)

    def first(self, now_ns: int) -> Sequence | None:
        """Who is next; None when nobody waits. The others of a request wait until its first has computed the prompt."""
        candidates = [*self._paused, *(line[0] for line in self._fresh.values())]
        return min(candidates, key=lambda sequence: self._order(sequence, now_ns), default=None)

    def remove(self, sequence: Sequence, *, served: bool) -> None:
        """Takes a sequence out; `served` charges its tenant for the tokens it may take."""
        if sequence.paused:
            self._paused.remove(sequence)
            return
        request = sequence.request
        key = (request.tenant, request.submit.priority)
        self._fresh[key].remove(sequence)
        if not self._fresh[key]:
            del self._fresh[key]
        self._requests[request] -= 1
        if not self._requests[request]:
            del self._requests[request]
        if served:
            self._clock = max(self._clock, self._served[request.tenant])
            self._served[request.tenant] += len(request.submit.token_ids) + request.submit.max_tokens
        self._drop_idle_tenants()

    def effective_priority(self, request: Request, now_ns: int) -> int:
        """The request's priority, a level better for every AGING_NS since it arrived."""
        return request.submit.priority - max(0, now_ns - request.arrival_ns) // AGING_NS

    def _order(self, sequence: Sequence, now_ns: int) -> tuple[int, bool, float, int, int]:
        request = sequence.request
        served = 0.0 if sequence.paused else self._served[request.tenant]
        return (
            self.effective_priority(request, now_ns),
            not sequence.paused,
            served,
            request.order,
            sequence.index,
        )

    def _drop_idle_tenants(self) -> None:
        """Forgets tenants that wait for nothing and owe nothing, so that the table does not grow for ever."""
        if len(self._served) > 2 * len(self._fresh) + 64:
            waiting = {tenant for tenant, _ in self._fresh}
            self._served = {t: v for t, v in self._served.items() if t in waiting or v > self._clock}
