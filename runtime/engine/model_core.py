"""The real engine: validation, scheduler, model and sampler behind the EngineCore interface.

Invariant: one step is plan, run, commit (pipeline.py has the order); nothing else changes the scheduler. Must not know
sockets or frames.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from gptoss_trt.ops import dispatch
from gptoss_trt.ops.plan import PlanError
from gptoss_trt.runtime.engine.cache_size import CacheShape
from gptoss_trt.runtime.engine.core import EngineCore, EngineLoadError, RequestKey
from gptoss_trt.runtime.engine.guides import GuideCompiler, GuideError, GuideMatcher
from gptoss_trt.runtime.engine.guides_core import GuidedCore
from gptoss_trt.runtime.engine.guides_llguidance import LlguidanceCompiler
from gptoss_trt.runtime.engine.kernel_plan import use_plan
from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.messages import Event, Submit
from gptoss_trt.runtime.engine.metrics import Statistics
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.pipeline import Pipeline
from gptoss_trt.runtime.engine.plain_decode import DrawingModel
from gptoss_trt.runtime.engine.sampler import Sampler
from gptoss_trt.runtime.engine.scheduler import Scheduler, SchedulerLimits
from gptoss_trt.runtime.engine.sequence import Sequence
from gptoss_trt.runtime.engine.speculation.load import TappedHead, load_draft, make_speculation, split_memory
from gptoss_trt.runtime.engine.step_memory import head_bytes, least_cache_bytes, left_to_steps, step_bytes
from gptoss_trt.runtime.engine.steps import Model, StepRunner
from gptoss_trt.runtime.engine.validation import Limits, refusal
from gptoss_trt.runtime.launch import settings

if TYPE_CHECKING:
    from gptoss_trt.runtime.engine.kv_events import KvEventPublisher

log = logging.getLogger(__name__)

CPU_KV_SHARE = 0.125  # of the memory that is free, when kv_bytes is not given
CPU_KV_BYTES = 256 << 20  # a cache fills up in time, prefixes being kept: this is memory that a CPU engine grows to


class ModelCore:
    """An EngineCore over a model. Allocates the KV caches of the model and of what drafts for it for `kv_bytes` in
    all."""

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        *,
        kv_bytes: int,
        device: str = "cpu",
        guide_compiler: GuideCompiler | None = None,
        draft: Model | TappedHead | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        options = options.resolved(device)
        config = model.config
        context = _context(model, options)
        shape, draft_shape = _cache_shapes(model, draft, options)
        kv_bytes, draft_bytes = split_memory(kv_bytes, shape, draft_shape)
        blocks = shape.pool_sizes(kv_bytes)
        model.allocate_kv(*blocks, options.block_tokens)
        self._kv_events = _publisher(options, device)
        self._cache = KvCache(*blocks, options.block_tokens, config.sliding_window, self._kv_events)
        self._compiler = guide_compiler
        self._options = options
        self._limits = Limits(config.vocab_size, context, self._cache.capacity_tokens, guide_compiler is not None)
        self._statistics = Statistics()
        limits = SchedulerLimits(options.max_batch, options.step_tokens, options.max_queue, options.prefix_cache)
        speculation = make_speculation(
            options, device, config, draft, draft_shape, kv_bytes=draft_bytes, full_blocks=blocks[0]
        )
        self._scheduler = Scheduler(limits, self._cache, self._statistics, speculation.speculator)
        batches_on = "cpu" if isinstance(model, DrawingModel) else device
        runner = StepRunner(model, Sampler(self._guide_for), options.block_tokens, batches_on, speculation.observer)
        runs_ahead = options.run_ahead and speculation.observer is None
        self._pipeline = Pipeline(self._scheduler, runner, runs_ahead=runs_ahead, clock_ns=clock_ns)
        self._device = device
        log.info("KV cache: %d full and %d window blocks of %d tokens", *blocks, options.block_tokens)

    def submit(self, key: RequestKey, submit: Submit, arrival_ns: int) -> None:
        reason = refusal(submit, self._limits)
        if reason is None and submit.guides and self._compiler is not None:
            try:
                self._compiler.compile(submit.guides)
            except GuideError as error:
                reason = "INVALID_ARGUMENT", str(error)
        if reason is not None:
            self._scheduler.refuse(key, submit, *reason)
            return
        seed = submit.sampling.seed
        self._scheduler.submit(key, submit, arrival_ns, secrets.randbits(64) if seed is None else seed)

    def cancel(self, key: RequestKey) -> None:
        self._scheduler.cancel(key)

    def has_work(self) -> bool:
        return self._scheduler.has_work

    def begin(self) -> None:
        self._pipeline.begin()

    def step(self) -> list[tuple[RequestKey, Event]]:
        stepped = self._pipeline.step()
        events = self._scheduler.take_events()
        if not stepped and not events:
            raise RuntimeError(f"no work can be planned for {len(self._scheduler.requests)} open requests")
        return events

    def settle(self) -> None:
        self._cache.settle()
        if self._kv_events is not None:
            self._kv_events.flush()

    def stats(self) -> dict[str, Any]:
        scheduler, cache = self._scheduler, self._cache
        running = scheduler.running
        decoding = sum(sequence.decoding for sequence in running)
        values = self._statistics.as_dict()
        if self._device == "cuda":
            values["memory"]["gpu"] = torch.cuda.memory_reserved()
        return values | {
            "requests": {
                "active": len(scheduler.requests),
                "max": self._options.max_batch,
                "scheduled": len(running),
                "context": len(running) - decoding,
                "waiting": len(scheduler.waiting),
            },
            "kv": {
                name: {
                    "max": pool.count,
                    "free": pool.available,
                    "used": pool.used,
                    "tokens_per": cache.block_tokens,
                    "reused": pool.reused,
                    "fraction": pool.used / pool.count,
                }
                for name, pool in (("full", cache.full), ("window", cache.window))
            },
            "inflight": {
                "total_context_tokens": scheduler.last_prompt_tokens,
                "generation_requests": decoding,
                "paused_requests": scheduler.waiting.paused,
            },
        }

    def _guide_for(self, sequence: Sequence) -> GuideMatcher | None:
        guides = sequence.request.submit.guides
        return self._compiler.compile(guides) if guides and self._compiler is not None else None


def load_core(engine_dir: Path, options: EngineOptions) -> EngineCore:
    """Loads the model in `engine_dir` and gives it a KV cache. Raises what load_model raises, and EngineLoadError."""
    from gptoss_trt.runtime.engine.prefill_weights import copy_experts
    from gptoss_trt.runtime.model import GraphedModel, load_model

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineLoadError(f"engine option device is 'cuda', but torch {torch.__version__} sees no GPU here")
    torch.set_num_threads(options.threads or _default_threads())
    _choose_kernels(engine_dir, options, device)
    loaded = load_model(engine_dir, device=device)
    loaded.one_launch = options.one_launch and not options.deterministic  # its sums are added in another order
    model: Model = GraphedModel(loaded) if device == "cuda" else loaded
    chosen = options.resolved(device)
    draft = load_draft(chosen, engine_dir, loaded, device)
    shapes = [shape for shape in _cache_shapes(model, draft, chosen) if shape is not None]
    steps = _steps_bytes(model, draft, chosen)
    copy_experts(loaded, options, steps + (options.kv_bytes or least_cache_bytes(steps, _context_bytes(shapes))))
    kv_bytes = options.kv_bytes or (_cuda_kv_bytes(steps) if device == "cuda" else _cpu_kv_bytes(shapes))
    compiler = LlguidanceCompiler(model.config.vocab_size)
    try:
        core = ModelCore(model, options, kv_bytes=kv_bytes, device=device, guide_compiler=compiler, draft=draft)
    except ValueError as error:  # of the KV cache
        raise EngineLoadError(f"engine options: {error}") from error
    for graphed, rows in ((model, chosen.max_batch * (1 + chosen.draft_tokens)), (draft, chosen.max_batch)):
        if isinstance(graphed, GraphedModel):
            began = time.monotonic()
            graphs = graphed.warm(rows, chosen.step_tokens)
            log.info("%d graphs in %.1f s", graphs, time.monotonic() - began)
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0] / (1 << 30)
        log.info("%.2f GiB free behind caches and graphs, %.2f were kept for steps", free, steps / (1 << 30))
    return GuidedCore(core, compiler)


def _choose_kernels(engine_dir: Path, options: EngineOptions, device: str) -> None:
    """On a GPU, for the whole process, because a model asks for them when it is loaded; the CPU's never depend on the
    batch. Raises EngineLoadError."""
    try:
        draft_dir = Path(options.draft_engine) if options.draft_engine else None
        use_plan(engine_dir, device, draft_dir=draft_dir, deterministic=options.deterministic)
    except PlanError as error:
        raise EngineLoadError(str(error)) from error
    if device != "cuda":
        return
    try:
        dispatch.be_invariant(options.deterministic)
    except dispatch.NoImplementationError as error:
        raise EngineLoadError(f"engine option deterministic: {error}") from error


def _publisher(options: EngineOptions, device: str) -> KvEventPublisher | None:
    if not options.kv_events:
        return None
    from gptoss_trt.runtime.engine.kv_events import KvEventPublisher

    medium = "GPU" if device == "cuda" else "CPU"
    return KvEventPublisher(
        options.kv_events, options.kv_events_replay, block_tokens=options.block_tokens, medium=medium
    )


def _context(model: Model, options: EngineOptions) -> int:
    """Raises EngineLoadError for an option above the model's own context."""
    most = model.config.max_context
    if options.max_context > most:
        raise EngineLoadError(f"engine option max_context is {options.max_context}; the model's context is {most}")
    return options.max_context or most


def _cache_shapes(
    model: Model, draft: Model | TappedHead | None, options: EngineOptions
) -> tuple[CacheShape, CacheShape | None]:
    """The cache of the model, with the keys of a head in its full blocks, and that of a draft model."""
    if isinstance(draft, TappedHead):
        return _cache_shape(model, options, draft.head.block_bytes(options.block_tokens)), None
    return _cache_shape(model, options), None if draft is None else _cache_shape(draft, options)


def _cache_shape(model: Model, options: EngineOptions, head_bytes: int = 0) -> CacheShape:
    full, window = model.kv_block_bytes(options.block_tokens)
    return CacheShape(
        (full + head_bytes, window),
        options.block_tokens,
        model.config.sliding_window,
        options.max_batch,
        options.step_tokens,
        _context(model, options),
        options.prefix_cache,
    )


def _default_threads() -> int:
    """GPTOSS_TRT_THREADS, less where that would leave no core to the server and the stubs beside the engine."""
    wanted: int = settings.read("GPTOSS_TRT_THREADS")
    return min(wanted, max(1, (os.cpu_count() or 1) - 1))


def _steps_bytes(model: Model, draft: Model | TappedHead | None, options: EngineOptions) -> int:
    """What steps of the model, and of what drafts for it, take on a GPU."""
    size = step_bytes(model.config, options)
    if isinstance(draft, TappedHead):
        return size + head_bytes(draft.head.config, options)
    return size if draft is None else size + step_bytes(draft.config, options)


def _context_bytes(shapes: list[CacheShape]) -> int:
    """Caches that hold one whole context."""
    return sum(shape.one_context_bytes for shape in shapes)


def _cuda_kv_bytes(steps_bytes: int) -> int:
    """What is free, less what steps take."""
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info()
    return free - left_to_steps(steps_bytes, free)


def _cpu_kv_bytes(shapes: list[CacheShape]) -> int:
    """What one whole context takes, within a share of what is free."""
    wanted = sum(max(CPU_KV_BYTES, shape.one_context_bytes) for shape in shapes)
    return min(wanted, int(psutil.virtual_memory().available * CPU_KV_SHARE))
