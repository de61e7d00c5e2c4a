"""A run over levels of load: warm-up, measurement, cost, one line of results a level.

Invariant: a level's line is given away when it is measured, so an interrupted sweep keeps what it has. Must not know
options nor where results go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gptoss_trt.client.api import AsyncClient
from gptoss_trt.client.bench.cost import Price, split_cost
from gptoss_trt.client.bench.load import Level, Target, closed_loop, open_loop
from gptoss_trt.client.bench.measure import Slo, Summary, summarize
from gptoss_trt.client.bench.report import Line
from gptoss_trt.client.bench.workload import Lengths, Request, cycled, load_dataset, synthetic
from gptoss_trt.client.connect import connect_async

READY_S = 30.0
REQUESTS_PER_SLOT = 4  # requests of a level for each one in flight, unless the run says otherwise
MIN_REQUESTS = 16


@dataclass(frozen=True)
class Sweep:
    """A whole run: what is asked of whom, at which levels. A level is ("concurrency" or "request_rate", number)."""

    url: str
    target: Target
    levels: tuple[tuple[str, float], ...]
    inputs: Lengths
    outputs: Lengths
    dataset: Path | None
    requests: int | None
    warmup: int
    shared_prefix: int
    seed: int
    slo: Slo | None
    price: Price | None

    def source(self, *, salt: int) -> Iterator[Request]:
        """Requests that no level before has sent, whose prompts a prefix cache would know: synthetic ones differ with
        the salt, those of a dataset go on where the last source stopped, and begin again behind its end."""
        if self.dataset is not None:
            return self._dataset
        return synthetic(
            self.target.model, self.inputs, self.outputs, self.seed * 1000 + salt, shared_prefix=self.shared_prefix
        )

    @functools.cached_property
    def _dataset(self) -> Iterator[Request]:
        assert self.dataset is not None
        return cycled(load_dataset(self.dataset, self.target.model, self.outputs, self.seed))

    def count(self, concurrency: float) -> int:
        return self.requests or max(MIN_REQUESTS, REQUESTS_PER_SLOT * int(concurrency))


async def run_level(client: AsyncClient, sweep: Sweep, kind: str, number: float, salt: int) -> tuple[Line, Level]:
    """Warms up, measures one level, and gives its line and records."""
    requests = sweep.source(salt=salt)
    if sweep.warmup:
        slots = int(number) if kind == "concurrency" else sweep.warmup
        await closed_loop(client, sweep.target, requests, count=sweep.warmup, concurrency=slots)
    if kind == "concurrency":
        count = sweep.count(number)
        level = await closed_loop(client, sweep.target, requests, count=count, concurrency=int(number))
    else:
        count = sweep.count(number)
        level = await open_loop(client, sweep.target, requests, count=count, rate=number, seed=sweep.seed)
    summary = summarize(level.records, level.duration_s, sweep.slo)
    line = {
        "kind": "serve",
        "model": sweep.target.model,
        "load": f"{number:g} {'in flight' if kind == 'concurrency' else 'req/s'}",
        kind: number,
        **summary.line(),
        **await _cost(client, sweep, summary, number if kind == "concurrency" else 1, salt),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return line, level


async def _cost(client: AsyncClient, sweep: Sweep, summary: Summary, slots: float, salt: int) -> Line:
    """The level's costs; {} without a price or when no request succeeded in the level or in the prefill pass."""
    if sweep.price is None or not summary.input_tokens:
        return {}
    one_token = (Request(1, *_prompt(request)) for request in sweep.source(salt=salt + 500))
    count = sweep.count(slots)
    level = await closed_loop(client, sweep.target, one_token, count=count, concurrency=int(slots))
    prefill = summarize(level.records, level.duration_s)
    if not prefill.input_tok_s > 0:
        return {"cost_error": prefill.first_error}
    cost = split_cost(
        sweep.price,
        duration_s=summary.duration_s,
        input_tokens=summary.input_tokens,
        output_tokens=summary.output_tokens,
        prefill_tok_s=prefill.input_tok_s,
    )
    return {**vars(cost), "prefill_tok_s": prefill.input_tok_s}


def _prompt(request: Request) -> tuple[Any, ...]:
    return request.prompt, request.input_ids, request.messages


async def run_sweep(sweep: Sweep, on_line: Callable[[Line], None]) -> list[tuple[Line, Level]]:
    """Every level in turn; `on_line` gets each line as soon as it is measured."""
    results = []
    async with connect_async(sweep.url) as client:
        await client.wait_ready([sweep.target.model], timeout_s=READY_S)
        for salt, (kind, number) in enumerate(sweep.levels):
            line, level = await run_level(client, sweep, kind, number, salt)
            on_line(line)
            results.append((line, level))
    return results
