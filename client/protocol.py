"""The wire contract as one typed table: Triton models, their tensors and parameters, and the metrics page.

Invariant: everything else that names a tensor, a parameter or a metric (config.pbtxt files, models, clients) is
generated from or checked against this table. Standard library only. Must not know how a model computes anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from gptoss_trt.client import wire_tensors as tensors
from gptoss_trt.client.wire_tensors import NUMPY_NAMES, STOP_REQUEST_INPUT, DType, Tensor

__all__ = ["NUMPY_NAMES", "STOP_REQUEST_INPUT", "DType", "Tensor"]  # beside what is defined here

MAX_BATCH_SIZE = 256  # prompts in one request of a model with a batch axis
END_ID_NEVER = -1  # end_id that switches the stop ids off
WORD_OFFSET_PADDING = -1  # fills row 1 of a word list; row 0 (ids) is filled with 0


class ProtocolError(ValueError):
    """A name or value that the wire contract does not have; the text suggests the nearest one."""


@dataclass(frozen=True)
class Parameter:
    """One entry of a config.pbtxt's `parameters`: text on the wire, parsed by the type of `default`."""

    name: str
    default: str | bool
    purpose: str


@dataclass(frozen=True)
class Model:
    """One Triton model. `max_batch_size` 0 means that its tensors have no batch axis."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...] = ()
    platform: Literal["python", "ensemble"] = "python"
    decoupled: bool = False
    has_unary_variant: bool = False  # a launch may choose the model not decoupled, for clients that do unary infer only
    max_batch_size: int = MAX_BATCH_SIZE
    steps: tuple[EnsembleStep, ...] = ()

    def input(self, name: str) -> Tensor:
        return _named(name, self.inputs, f"{self.name}: input")

    def output(self, name: str) -> Tensor:
        return _named(name, self.outputs, f"{self.name}: output")

    def parse_parameters(self, values: Mapping[str, str]) -> dict[str, str | bool]:
        """Every parameter's value, defaults filled in. Raises ProtocolError for an unknown name or malformed value."""
        parsed = {parameter.name: parameter.default for parameter in self.parameters}
        for name, text in values.items():
            if name in RESERVED_PARAMETERS:
                continue
            default = _named(name, self.parameters, f"{self.name}: parameter").default
            parsed[name] = _boolean(f"{self.name}: parameter {name}", text) if isinstance(default, bool) else text
        return parsed


@dataclass(frozen=True)
class EnsembleStep:
    """One model of a true Triton ensemble; the maps go from the model's tensor to the ensemble's."""

    model: str
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)


_Named = TypeVar("_Named", Tensor, Parameter, Model)
RESERVED_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_AUTO_COMPLETE_CONFIG"})


def _named(name: str, table: Iterable[_Named], what: str) -> _Named:
    known = {entry.name: entry for entry in table}
    if name not in known:
        raise ProtocolError(f"{what} {name!r} does not exist{did_you_mean(name, known)}")
    return known[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest of `known`, '' when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _boolean(what: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ProtocolError(f"{what} is {text!r}; allowed: true, false")
    return text.lower() == "true"


TEXT_TO_ENGINE: Mapping[str, str] = {  # where ensemble and tensorrt_llm name one thing differently
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    "max_tokens": "request_output_len",
}


_ENGINE = Parameter("engine_dir", "", "engine directory; empty: the environment variable GPTOSS_TRT_ENGINE")
_STATE_DIR = Parameter("state_dir", "", "folder of the engine's socket and lock; empty: the user's state folder")
_SKIP_SPECIAL = Parameter("skip_special_tokens", True, "leave the text of special tokens out of what is answered")
_EXCLUDE_INPUT = Parameter("exclude_input_in_output", False, "default of the input of that name")
_METRICS = Parameter("metrics", False, "publish the engine's metrics, labelled with this model's name")
_CHAT_MODE = Parameter("chat_mode", False, "text_input is one user turn, text_output the final channel only")
_SERVED_NAME = Parameter("served_model_name", "", "names, comma separated, that a request may give; empty: any")
_TEXT_PARAMETERS = (_ENGINE, _STATE_DIR, _SKIP_SPECIAL, _EXCLUDE_INPUT, _CHAT_MODE, _METRICS)
_JSON_PARAMETERS = (_ENGINE, _STATE_DIR, _SERVED_NAME, _METRICS)

_PIPELINE_TO_PREPROCESSING = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# tensorrt_llm's input -> preprocessing's output. end_id goes past it: unset means three ids, which one cannot say.
_PREPROCESSING_TO_ENGINE = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "pad_id": "OUT_PAD_ID",
}


def _pipeline_steps() -> tuple[EnsembleStep, ...]:
    inner = {name: f"_{name}" for name in _PREPROCESSING_TO_ENGINE.values()}
    consumed = set(_PIPELINE_TO_PREPROCESSING.values())
    engine_inputs = {name: inner[output] for name, output in _PREPROCESSING_TO_ENGINE.items()}
    known = {tensor.name for tensor in tensors.ENGINE_INPUTS}
    for tensor in tensors.TEXT_INPUTS:
        name = TEXT_TO_ENGINE.get(tensor.name, tensor.name)
        if tensor.name not in consumed and name in known:
            engine_inputs[name] = tensor.name
    results = {tensor.name: tensor.name for tensor in tensors.RESULT_OUTPUTS}
    return (
        EnsembleStep("preprocessing", _PIPELINE_TO_PREPROCESSING, inner),
        EnsembleStep(
            "tensorrt_llm",
            engine_inputs,
            {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH", **results},
        ),
        EnsembleStep(
            "postprocessing",
            {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
            {"OUTPUT": "text_output"},
        ),
    )


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(
            "tensorrt_llm",
            tensors.ENGINE_INPUTS,
            tensors.ENGINE_OUTPUTS,
            (_ENGINE, _STATE_DIR, _EXCLUDE_INPUT, Parameter("metrics", True, _METRICS.purpose)),
            decoupled=True,
            has_unary_variant=True,
        ),
        Model(
            "ensemble",
            tensors.TEXT_INPUTS,
            tensors.TEXT_OUTPUTS,
            _TEXT_PARAMETERS,
            decoupled=True,
            has_unary_variant=True,
        ),
        Model(
            "tensorrt_llm_bls",
            tensors.BLS_INPUTS,
            tensors.TEXT_OUTPUTS,
            _TEXT_PARAMETERS,
            decoupled=True,
            has_unary_variant=True,
        ),
        Model("preprocessing", tensors.PREPROCESSING_INPUTS, tensors.PREPROCESSING_OUTPUTS),
        Model("postprocessing", tensors.POSTPROCESSING_INPUTS, tensors.POSTPROCESSING_OUTPUTS, (_SKIP_SPECIAL,)),
        Model("pipeline", tensors.TEXT_INPUTS, tensors.TEXT_OUTPUTS, platform="ensemble", steps=_pipeline_steps()),
        Model("chat", tensors.JSON_INPUTS, tensors.JSON_OUTPUTS, _JSON_PARAMETERS, decoupled=True, max_batch_size=0),
        Model(
            "completions", tensors.JSON_INPUTS, tensors.JSON_OUTPUTS, _JSON_PARAMETERS, decoupled=True, max_batch_size=0
        ),
    )
}


def model(name: str) -> Model:
    """The model of that name. Raises ProtocolError with the nearest name."""
    return _named(name, MODELS.values(), "model")


@dataclass(frozen=True)
class MetricFamily:
    """One family of the server's metrics page. `values` are the values of `label`; '' as label means one series.

    Every series also has the labels model and version. A histogram has `buckets`, upper bounds in `unit`.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    description: str
    label: str = ""
    values: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


_LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
METRICS: Mapping[str, MetricFamily] = {
    family.name: family
    for family in (
        MetricFamily(
            "nv_trt_llm_request_metrics",
            "gauge",
            "TRT LLM request metrics",
            "request_type",
            ("active", "max", "scheduled", "context", "waiting"),
            "requests",
        ),
        MetricFamily(
            "nv_trt_llm_runtime_memory_metrics",
            "gauge",
            "TRT LLM runtime memory metrics",
            "memory_type",
            ("cpu", "gpu", "pinned"),
            "bytes",
        ),
        MetricFamily(
            "nv_trt_llm_kv_cache_block_metrics",
            "gauge",
            "TRT LLM KV cache block metrics",
            "kv_cache_block_type",
            ("max", "free", "used", "tokens_per", "reused", "fraction"),
            "blocks",
        ),
        MetricFamily(
            "nv_trt_llm_inflight_batcher_metrics",
            "gauge",
            "TRT LLM inflight_batcher-specific metrics",
            "inflight_batcher_specific_metric",
            ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
        ),
        MetricFamily(
            "nv_trt_llm_general_metrics",
            "gauge",
            "General TRT LLM metrics",
            "general_type",
            ("timestamp", "iteration_counter"),
        ),
        MetricFamily(
            "nv_trt_llm_disaggregated_serving_metrics",
            "counter",
            "TRT LLM disaggregated serving metrics",
            "disaggregated_serving_type",
            ("kv_cache_transfer_ms", "request_count"),
        ),
        MetricFamily(
            "nv_llm_input_token_len",
            "histogram",
            "TRT LLM response metrics",
            "response_metric_type",
            ("total_input_tokens",),
            "tokens",
            _LENGTH_BUCKETS,
        ),
        MetricFamily(
            "nv_llm_output_token_len",
            "histogram",
            "TRT LLM response metrics",
            "response_metric_type",
            ("total_output_tokens",),
            "tokens",
            _LENGTH_BUCKETS,
        ),
        MetricFamily(
            "gptoss_trt_time_to_first_token_seconds",
            "histogram",
            "From arrival in the engine to the first token",
            unit="seconds",
            buckets=_LATENCY_BUCKETS,
        ),
        MetricFamily(
            "gptoss_trt_time_between_tokens_seconds",
            "histogram",
            "Mean gap between a sequence's tokens",
            unit="seconds",
            buckets=_LATENCY_BUCKETS,
        ),
        MetricFamily(
            "gptoss_trt_queue_time_seconds",
            "histogram",
            "From arrival in the engine to the first step",
            unit="seconds",
            buckets=_LATENCY_BUCKETS,
        ),
        MetricFamily(
            "gptoss_trt_prefix_cache_tokens",
            "counter",
            "Prompt tokens by where they came from",
            "source",
            ("cached", "computed"),
            "tokens",
        ),
        MetricFamily(
            "gptoss_trt_speculative_tokens", "counter", "Draft tokens", "outcome", ("drafted", "accepted"), "tokens"
        ),
        MetricFamily("gptoss_trt_generated_tokens", "counter", "Tokens given out, as they come", unit="tokens"),
        MetricFamily(
            "gptoss_trt_window_cache_blocks",
            "gauge",
            "KV blocks of the windowed layers",
            "kv_cache_block_type",
            ("max", "free", "used"),
            "blocks",
        ),
        MetricFamily(
            "gptoss_trt_preemptions",
            "counter",
            "Sequences paused for want of blocks, to be recomputed",
            unit="sequences",
        ),
        MetricFamily(
            "gptoss_trt_errors",
            "counter",
            "Requests that the engine refused or failed",
            "code",
            (
                "INVALID_ARGUMENT",
                "RESOURCE_EXHAUSTED",
                "DEADLINE_EXCEEDED",
                "UNAVAILABLE",
                "INTERNAL",
            ),
            "requests",
        ),
        MetricFamily("gptoss_trt_cancellations", "counter", "Sequences that ended cancelled", unit="sequences"),
    )
}
