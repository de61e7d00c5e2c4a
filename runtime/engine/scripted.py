"""The scripted engine: given tokens, delays, chunk sizes and faults behind the real engine's interface; no model.

Invariant: apart from where tokens come from, a request sees what the real engine would show it: one end a sequence,
stop ids emitted, KV blocks taken while it lives and given back at the step after its end. Must not know sockets.
`script.py` says what a scripted.json may hold.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.messages import (
    Error,
    ErrorCode,
    Event,
    Finished,
    FinishReason,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)
from gptoss_trt.runtime.engine.metrics import Statistics
from gptoss_trt.runtime.engine.script import Fault, Script, ScriptedEngine
from gptoss_trt.runtime.engine.validation import Limits, refusal

log = logging.getLogger(__name__)

HANG_S = 3600.0


@dataclass
class _Sequence:
    index: int
    output: list[int] = field(default_factory=list)
    steps: int = 0
    done: bool = False


@dataclass
class _Request:
    key: RequestKey
    submit: Submit
    script: Script
    arrival_ns: int
    blocks: int
    sequences: list[_Sequence]
    wait_steps: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    @property
    def open(self) -> list[_Sequence]:
        return [sequence for sequence in self.sequences if not sequence.done]


class ScriptedCore:
    """An EngineCore that plays a ScriptedEngine. Each step takes `step_ms`."""

    def __init__(self, plan: ScriptedEngine) -> None:
        self._plan = plan
        self._limits = Limits(plan.vocab_size, plan.max_context, plan.full_blocks * plan.block_tokens, guides=True)
        self._waiting: deque[_Request] = deque()
        self._active: dict[RequestKey, _Request] = {}
        self._cancelled: set[RequestKey] = set()
        self._events: list[tuple[RequestKey, Event]] = []
        self._used_blocks = 0
        self._statistics = Statistics()

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
        script = self._plan.script_for(submit.token_ids)
        reason = refusal(submit, self._limits)
        fault = script.fault
        if reason is not None:
            self._events.append((key, Error(submit.request_id, *reason)))
        elif fault is not None and fault.kind == "refuse":
            self._events.append((key, Error(submit.request_id, fault.code, fault.message)))
        elif len(self._waiting) >= self._plan.max_queue:
            message = f"{len(self._waiting)} requests wait; the limit is {self._plan.max_queue}"
            self._events.append((key, Error(submit.request_id, "RESOURCE_EXHAUSTED", message)))
        else:
            tokens = len(submit.token_ids) + submit.max_tokens * submit.n
            blocks = min(-(-tokens // self._plan.block_tokens), self._plan.full_blocks)
            sequences = [_Sequence(index) for index in range(submit.n)]
            delay_steps = round(script.first_delay_ms / max(self._plan.step_ms, 1e-3))
            self._waiting.append(_Request(key, submit, script, arrival_ns, blocks, sequences, delay_steps))
            self._statistics.submitted(len(submit.token_ids))

    def cancel(self, key: RequestKey) -> None:
        self._cancelled.add(key)

    def has_work(self) -> bool:
        return bool(self._waiting or self._active or self._events or self._cancelled)

    def begin(self) -> None:
        """A step is all that there is."""

    def step(self) -> list[tuple[RequestKey, Event]]:
        self._end_cancelled_and_late()
        self._admit()
        if self._active:
            time.sleep(self._plan.step_ms / 1000)
        for request in list(self._active.values()):
            self._play(request)
        self._statistics.iterations += 1
        events, self._events = self._events, []
        return events

    def settle(self) -> None:
        """Nothing is left by a step."""

    def stats(self) -> dict[str, Any]:
        generating = sum(len(request.open) for request in self._active.values())
        total = self._plan.full_blocks
        pool = {
            "max": total,
            "free": total - self._used_blocks,
            "used": self._used_blocks,
            "tokens_per": self._plan.block_tokens,
            "reused": 0,
            "fraction": self._used_blocks / total,
        }
        levels = {
            "requests": {
                "active": len(self._active) + len(self._waiting),
                "max": self._plan.max_batch,
                "scheduled": len(self._active),
                "context": 0,
                "waiting": len(self._waiting),
            },
            "kv": {"full": pool, "window": dict(pool)},
            "inflight": {"total_context_tokens": 0, "generation_requests": generating, "paused_requests": 0},
        }
        return {**levels, **self._statistics.as_dict()}

    def _end_cancelled_and_late(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        now_ns = time.time_ns()
        for request in [*self._waiting, *self._active.values()]:
            deadline_ms = request.submit.deadline_ms
            if request.key in cancelled:
                for sequence in request.open:
                    self._finish(request, sequence, "cancelled")
            elif deadline_ms is not None and now_ns - request.arrival_ns > deadline_ms * 1_000_000:
                self._fail(request, "DEADLINE_EXCEEDED", f"not finished within its deadline of {deadline_ms} ms")

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._plan.max_batch:
            request = self._waiting[0]
            if self._used_blocks + request.blocks > self._plan.full_blocks:
                return
            self._waiting.popleft()
            self._active[request.key] = request
            self._used_blocks += request.blocks
            request.first_scheduled_ns = time.time_ns()
            waited_s = (request.first_scheduled_ns - request.arrival_ns) / 1e9
            self._statistics.scheduled(waited_s, len(request.submit.token_ids))

    def _play(self, request: _Request) -> None:
        if request.wait_steps > 0:
            request.wait_steps -= 1
            return
        for sequence in request.open:
            if request.key not in self._active:
                return  # a fault ended the whole request
            self._advance(request, sequence)

    def _advance(self, request: _Request, sequence: _Sequence) -> None:
        submit, script = request.submit, request.script
        chunk = script.chunk[sequence.steps % len(script.chunk)]
        sequence.steps += 1
        fresh: list[int] = []
        reason: FinishReason | None = None
        while len(fresh) < chunk and reason is None:
            done = len(sequence.output)
            if script.fault is not None and done >= script.fault.after:
                self._emit(request, sequence, fresh)
                self._fault(request, script.fault)
                return
            token = script.token(done, submit.token_ids)
            if token is None:
                reason = "stop"
                break
            fresh.append(token)
            sequence.output.append(token)
            reason = self._end_reason(submit, sequence.output)
        self._emit(request, sequence, fresh)
        if reason is not None:
            self._finish(request, sequence, reason)

    @staticmethod
    def _end_reason(submit: Submit, output: list[int]) -> FinishReason | None:
        if len(output) >= submit.min_tokens:
            stopped = any(tuple(output[-len(s) :]) == s for s in submit.stop_sequences)
            if stopped or output[-1] in submit.stop_ids:
                return "stop"
        return "length" if len(output) >= submit.max_tokens else None

    def _emit(self, request: _Request, sequence: _Sequence, fresh: list[int]) -> None:
        if not fresh:
            return
        now_ns = time.time_ns()
        if not request.first_token_ns:
            request.first_token_ns = now_ns
            self._statistics.first_token((now_ns - request.arrival_ns) / 1e9)
        request.last_token_ns = now_ns
        best = request.submit.logprobs
        logprobs = None if best is None else tuple(_scripted_logprobs(token, best) for token in fresh)
        tokens = Tokens(request.submit.request_id, sequence.index, tuple(fresh), logprobs)
        self._events.append((request.key, tokens))
        self._statistics.generated_tokens += len(fresh)

    def _finish(self, request: _Request, sequence: _Sequence, reason: FinishReason) -> None:
        sequence.done = True
        remaining = len(request.open)
        usage = self._usage(request, sequence)
        end = Finished(request.submit.request_id, sequence.index, reason, usage, remaining)
        self._events.append((request.key, end))
        self._statistics.finished(reason, usage)
        if not remaining:
            self._release(request)

    def _fail(self, request: _Request, code: ErrorCode, message: str) -> None:
        self._events.append((request.key, Error(request.submit.request_id, code, message)))
        self._statistics.failed(code)
        self._release(request)

    def _release(self, request: _Request) -> None:
        if self._active.pop(request.key, None) is not None:
            self._used_blocks -= request.blocks
        else:
            self._waiting.remove(request)

    def _usage(self, request: _Request, sequence: _Sequence) -> Usage:
        return Usage(
            prompt_tokens=len(request.submit.token_ids),
            completion_tokens=len(sequence.output),
            kv_new_blocks=request.blocks,
            kv_total_blocks=request.blocks,
            arrival_ns=request.arrival_ns,
            first_scheduled_ns=request.first_scheduled_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
        )

    def _fault(self, request: _Request, fault: Fault) -> None:
        log.warning("scripted fault %s for request %s", fault.kind, request.submit.request_id)
        if fault.kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            time.sleep(HANG_S)
        elif fault.kind == "nan":
            self._fail(request, "INTERNAL", "the logits of this request are not finite")
        else:
            self._fail(request, fault.code, fault.message)


def _scripted_logprobs(token: int, best: int) -> TokenLogprobs:
    """A fixed, recognisable answer: -0.5 for the chosen token, then -1.5, -2.5, ... for the ids after it."""
    return TokenLogprobs(-0.5, tuple((token + rank, -0.5 - rank) for rank in range(best)))
