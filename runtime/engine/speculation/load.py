"""A speculator from an engine's options: the drafter they name, with a draft engine's model or a head if it has one.

Invariant: a draft engine and a head speak the target's vocabulary, and all KV caches fit the memory given for one. Must
not know requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gptoss_trt.build_engine.spec import ModelConfig, SpecError
from gptoss_trt.runtime.engine.cache_size import CacheShape
from gptoss_trt.runtime.engine.core import EngineLoadError
from gptoss_trt.runtime.engine.kv_cache import KvCache
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.plain_decode import DrawingModel
from gptoss_trt.runtime.engine.sampler import Sampler
from gptoss_trt.runtime.engine.speculation.draft_model import ModelDrafter
from gptoss_trt.runtime.engine.speculation.eagle import EagleDrafter
from gptoss_trt.runtime.engine.speculation.eagle_head import EagleHead
from gptoss_trt.runtime.engine.speculation.ngram import NgramDrafter
from gptoss_trt.runtime.engine.speculation.speculator import CPU_COST, CUDA_COST, Speculator
from gptoss_trt.runtime.engine.steps import Model, Observer, StepRunner
from gptoss_trt.runtime.model.taps import FeatureTap

if TYPE_CHECKING:
    from gptoss_trt.runtime.model import GptOssModel


# Times of a step of one row that any pass takes, however small the drafter: launches and copies. On a GPU a head runs
# without a graph.
LEAST_PASS = {"cpu": 0.1, "cuda": 0.3}


class TappedHead(NamedTuple):
    """An EAGLE-3 head and the tap in its target."""

    head: EagleHead
    tap: FeatureTap


class Speculation(NamedTuple):
    """What an engine speculates with, and who is to be shown every step of the target: then none may run ahead."""

    speculator: Speculator | None = None
    observer: Observer | None = None


def load_draft(options: EngineOptions, engine_dir: Path, target: GptOssModel, device: str) -> Model | TappedHead | None:
    """What drafts for the target of `engine_dir` by resolved `options`; None where that needs no weights.

    Raises EngineLoadError when it cannot be loaded or has another vocabulary.
    """
    path = Path(options.draft_engine)
    if options.speculation == "draft":
        return _load_draft_model(path, engine_dir, target.config, device)
    if options.speculation == "eagle3":
        from gptoss_trt.runtime.model.graph_shapes import MAX_ROWS

        head = EagleHead(path, target.config, target.embedding, target.device)
        most = max(options.step_tokens, MAX_ROWS)
        target.tap = FeatureTap(head.config.features, most, target.config.hidden_size, target.device)
        return TappedHead(head, target.tap)
    return None


def _load_draft_model(draft_dir: Path, engine_dir: Path, config: ModelConfig, device: str) -> Model:
    from gptoss_trt.runtime.model import GraphedModel, LoadError, load_model

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


def make_speculation(
    options: EngineOptions, device: str, target: ModelConfig, draft: Model | TappedHead | None,
    shape: CacheShape | None, *, kv_bytes: int, full_blocks: int,
) -> Speculation:  # fmt: skip
    """The speculation of resolved `options` for a model of `target`. Allocates the KV cache of a draft model of `shape`
    for `kv_bytes`, or that of a head for the target's `full_blocks`.

    Raises EngineLoadError when that is too little.
    """
    cost, most = CUDA_COST if device == "cuda" else CPU_COST, options.draft_tokens
    if isinstance(draft, TappedHead):
        draft.head.allocate_kv(full_blocks, options.block_tokens)
        eagle = EagleDrafter(draft.head, draft.tap, options.block_tokens)
        share = max(LEAST_PASS[device], draft.head.weights / active_weights(target))
        return Speculation(Speculator(eagle, most, cost, share), eagle.seen)
    if draft is not None and shape is not None:
        share = max(LEAST_PASS[device], active_weights(draft.config) / active_weights(target))
        drafter = _model_drafter(options, device, draft, shape, kv_bytes)
        return Speculation(Speculator(drafter, most, cost, share))
    if options.speculation == "ngram":
        return Speculation(Speculator(NgramDrafter(), most, cost))
    if options.speculation != "none":
        raise EngineLoadError(f"speculation is {options.speculation!r}, and nothing was loaded for it")
    return Speculation()


def active_weights(config: ModelConfig) -> int:
    """Weights that one token is multiplied with: what a step of one row reads."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    experts = 3 * config.experts_per_token * config.intermediate_size
    return config.hidden_size * (config.num_layers * (heads + experts) + config.vocab_size)


def _model_drafter(options: EngineOptions, device: str, draft: Model, shape: CacheShape, kv_bytes: int) -> ModelDrafter:
    blocks = shape.pool_sizes(kv_bytes)
    draft.allocate_kv(*blocks, options.block_tokens)
    has_graphs = isinstance(draft, DrawingModel)
    batches_on = "cpu" if has_graphs else device
    runner = StepRunner(draft, Sampler(), options.block_tokens, batches_on)
    cache = KvCache(*blocks, options.block_tokens, draft.config.sliding_window)
    return ModelDrafter(runner, cache, options.step_tokens, shape.max_context, single_passes=has_graphs)
