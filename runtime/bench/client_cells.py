"""Measures cells at the client of an engine process: socket, frames and the way back are in the figures.

Prompts are read for real. Invariant: a decode cell counts only what came while every sequence was decoding. Must not
know the engine beyond its client.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gptoss_trt.build_engine.spec import Manifest
from gptoss_trt.runtime.bench.bound import decode_seconds, prefill_seconds
from gptoss_trt.runtime.bench.cells import STEP_TOKENS, WARM_STEPS, Effort, random_prompts
from gptoss_trt.runtime.bench.record import Cell
from gptoss_trt.runtime.engine.client import EngineClient, Sink
from gptoss_trt.runtime.engine.messages import Error, Event, Finished, IdArray, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.options import EngineOptions

READY_S = 300.0
ANSWER_S = 300.0  # without an event
# One sequence decodes so many times the usual steps: behind a prompt that took all of a card's power its clock is low
# for some 50 (3 to 5% of a step of 1 ms).
ALONE_FACTOR = 4


class ClientBench:
    """Cells of the engine in `engine_dir`, whose process runs while this context is open; `state_dir` is its own."""

    def __init__(self, engine_dir: Path, state_dir: Path, options: EngineOptions, effort: Effort, seed: int) -> None:
        manifest = Manifest.read(engine_dir)
        self.formats = manifest.formats
        self._config = manifest.model
        self._step_tokens = options.step_tokens or STEP_TOKENS
        self._effort = effort
        self._generator = torch.Generator().manual_seed(seed)
        self._sent = 0
        self._client = EngineClient(engine_dir, state_dir=state_dir, options=options, idle_timeout_s=1.0)
        self._notes = {
            "measured_at": "client process",
            "run_ahead": options.run_ahead,
            "prefill_weights": options.prefill_weights,
        }

    def __enter__(self) -> ClientBench:
        self._client.wait_ready(READY_S)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._client.close()

    def decode(self, context: int, batch: int) -> Cell:
        """Mean wall time between outputs while `batch` sequences, which began with `context` tokens, all decode."""
        reading = -(-batch * context // (self._step_tokens - batch)) + 2  # steps until the last prompt is read
        steps = self._effort.steps * (ALONE_FACTOR if batch == 1 else 1)
        answer = reading + WARM_STEPS + steps + 2
        arrivals = self._answers(self._prompts(batch, context), answer)
        begin = max(times[WARM_STEPS] for times in arrivals)
        end = min(times[-1] for times in arrivals)
        tokens = sum(begin < at <= end for times in arrivals for at in times)
        if end <= begin or tokens < batch:
            raise RuntimeError(f"{batch} sequences of {answer} tokens never decoded together")
        ms = (end - begin) * 1e3 * batch / tokens
        bound_ms = decode_seconds(self._config, self.formats, batch, context) * 1e3
        return Cell("decode", context, batch, ms, bound_ms, None, None, {"steps": tokens // batch, **self._notes})

    def prefill(self, tokens: int) -> Cell:
        """Median wall time from the submission of a prompt of `tokens` tokens to its first token."""
        spans = []
        for _ in range(self._effort.warm_prompts + self._effort.prompts):
            prompts = self._prompts(1, tokens)
            began = time.perf_counter()
            spans.append((self._answers(prompts, 1)[0][0] - began) * 1e3)
        measured = sorted(spans[-self._effort.prompts :])
        bound_ms = prefill_seconds(self._config, self.formats, tokens) * 1e3
        notes: dict[str, Any] = {"repeats": len(measured), "best_ms": round(measured[0], 4), **self._notes}
        return Cell("prefill", tokens, tokens, measured[len(measured) // 2], bound_ms, None, None, notes)

    def _prompts(self, count: int, tokens: int) -> list[IdArray]:
        return random_prompts(self._config.vocab_size, count, tokens, self._generator)

    def _answers(self, prompts: list[IdArray], answer: int) -> list[list[float]]:
        """When each token of the answers came (time.perf_counter), `answer` tokens each at temperature 1."""
        events: queue.SimpleQueue[tuple[int, float, Event]] = queue.SimpleQueue()

        def sink_of(number: int) -> Sink:
            return lambda event: events.put((number, time.perf_counter(), event))

        for number, ids in enumerate(prompts):
            self._sent += 1
            submit = Submit(f"bench-{self._sent}", ids, answer, sampling=Sampling(seed=number))
            self._client.submit(submit, sink_of(number))
        arrivals: list[list[float]] = [[] for _ in prompts]
        left = len(prompts)
        while left:
            number, at, event = events.get(timeout=ANSWER_S)
            if isinstance(event, Error):
                raise RuntimeError(f"prompt of {len(prompts[number])} tokens: {event.code}: {event.message}")
            if isinstance(event, Tokens):
                arrivals[number] += [at] * len(event.token_ids)
            left -= isinstance(event, Finished)
        return arrivals
