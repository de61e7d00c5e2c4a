"""A speculator from an engine's options: the drafter they name, with a draft engine's model and memory if it has one.

Invariant: a draft engine speaks the target's vocabulary, and both KV caches fit the memory given for one. Must not know
requests.
"""

from __future__ import annotations

from pathlib import Path

from gptoss_trt.build_engine.spec import ModelConfig, SpecError
from gptoss_trt.runtime.engine.cache_size import CacheShape
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.plain_decode import DrawingModel
from gptoss_trt.runtime.engine.sampler import Sampler
from gptoss_trt.runtime.engine.speculation.draft_model import ModelDrafter
from gptoss_trt.runtime.engine.speculation.ngram import NgramDrafter
from gptoss_trt.runtime.engine.speculation.speculator import CPU_COST, CUDA_COST, Speculator
from gptoss_trt.runtime.engine.steps import Model, StepRunner


def load_draft_model(options: EngineOptions, engine_dir: Path, config: ModelConfig, device: str) -> Model | None:
    """The model of options.draft_engine for the target of `engine_dir`; None unless a draft engine is asked for.

    Raises EngineLoadError when it cannot be loaded or has another vocabulary.
    """
    if options.speculation != "draft":
        return None
    from gptoss_trt.runtime.model import GraphedModel, LoadError, load_model

    draft_dir = Path(options.draft_engine)
    try:
        model = load_model(draft_dir, device=device)
    except (SpecError, LoadError, OSError) as error:
        raise EngineLoadError(f"the draft engine {draft_dir} cannot be loaded: {error}") from error
    if model.config.vocab_size != config.vocab_size:
        raise EngineLoadError(
            f"the draft engine {draft_dir} has a vocabulary of {model.config.vocab_size} tokens, {engine_dir} one of "
            f"{config.vocab_size}; they must be the same"
        )
    return GraphedModel(model) if device == "cuda" else model


def split_memory(kv_bytes: int, target: CacheShape, draft: CacheShape | None) -> tuple[int, int]:
    """Shares of `kv_bytes` for the target's and the draft model's KV caches, so that both hold the same tokens."""
    if draft is None:
        return kv_bytes, 0
    share = draft.one_context_bytes / (target.one_context_bytes + draft.one_context_bytes)
    return kv_bytes - int(kv_bytes * share), int(kv_bytes * share)


def make_speculator(
    options: EngineOptions, device: str, draft: Model | None, draft_shape: CacheShape | None, kv_bytes: int
) -> Speculator | None:
    """The speculator of resolved `options`, or None. Allocates the draft model's KV cache for `kv_bytes`.

    Raises EngineLoadError when that is too little.
    """
    cost = CUDA_COST if device == "cuda" else CPU_COST
    if options.speculation == "none":
        return None
    if options.speculation == "ngram":
        return Speculator(NgramDrafter(), options.draft_tokens, cost)
    if draft is None or draft_shape is None:
        raise EngineLoadError("speculation is 'draft' without a draft model")
    blocks = draft_shape.pool_sizes(kv_bytes)
    draft.allocate_kv(*blocks, options.block_tokens)
    batches_on = "cpu" if isinstance(draft, DrawingModel) else device
    runner = StepRunner(draft, Sampler(), options.block_tokens, batches_on)
    cache = KvCache(*blocks, options.block_tokens, draft.config.sliding_window)
    drafter = ModelDrafter(runner, cache, options.step_tokens, draft_shape.max_context)
    return Speculator(drafter, options.draft_tokens, cost)
