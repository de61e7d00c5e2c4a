"""The tensors of the wire contract: the part of `protocol.py` that is a long list.

Invariant: names, types, dims and flags are those that existing clients of tensorrtllm_backend were written against; the
additions are min_length and finish_reason. Standard library only. Must not know models or how a tensor is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

DType = Literal["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "STRING"]
NUMPY_NAMES: Mapping[DType, str] = {  # Triton's word -> numpy's
    "BOOL": "bool", "UINT8": "uint8", "INT32": "int32", "INT64": "int64", "UINT64": "uint64",
    "FP16": "float16", "FP32": "float32", "STRING": "object",
}  # fmt: skip

STOP_REQUEST_INPUT = "stop"  # BOOL of tensorrt_llm: ends the request with the same Triton request id


@dataclass(frozen=True)
class Tensor:
    """One tensor. `dims` leaves the batch axis out; `reshape` gives a scalar of dims [1] the shape [] in the model.

    `refuse` says why a request that sets the input is refused; a value in `neutral` asks for nothing and is accepted,
    and so is an empty tensor. Neutral strings are compared as text.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False
    reshape: bool = False
    refuse: str = ""
    neutral: tuple[float | str, ...] = ()


def _optional(name: str, dtype: DType = "INT32", dims: tuple[int, ...] = (1,), *, ragged: bool = False) -> Tensor:
    return Tensor(name, dtype, dims, optional=True, ragged=ragged)


def _scalar(name: str, dtype: DType = "INT32") -> Tensor:
    return Tensor(name, dtype, optional=True, reshape=True)


def _refused(tensor: Tensor, reason: str, *neutral: float | str) -> Tensor:
    return replace(tensor, refuse=reason, neutral=neutral)


_ONE_BEAM = "there is no beam search: beam_width is 1"
_TEXT_ONLY = "gpt-oss takes text only"
_NO_ENCODER = "gpt-oss has no encoder"
_NO_DRAFTS = "a request cannot bring its own draft tokens"
_NO_LORA = "LoRA adapters are not served"
_NO_LOGITS = "raw logits are not returned; return_log_probs gives log-probabilities"
_NO_TABLE = "prompt embedding tables are not served"
_NO_RETENTION = "KV retention is the scheduler's own choice"
_NO_LOOKAHEAD = "lookahead decoding is not served"
_NO_DISAGGREGATION = "context and generation are not served apart"
_FIXED_TOP_P = "runtime_top_p stays the same for a whole request"

ENGINE_INPUTS = (
    _optional("input_ids", "INT32", (-1,), ragged=True),
    _refused(_optional("encoder_input_features", "FP32", (-1, -1), ragged=True), _NO_ENCODER),
    _refused(_scalar("encoder_output_lengths"), _NO_ENCODER, 0),
    Tensor("input_lengths", "INT32", reshape=True),
    Tensor("request_output_len", "INT32", reshape=True),
    _scalar("num_return_sequences"),
    _refused(_optional("draft_input_ids", "INT32", (-1,), ragged=True), _NO_DRAFTS),
    _refused(_optional("decoder_input_ids", "INT32", (-1,), ragged=True), _NO_ENCODER),
    _refused(_scalar("decoder_input_lengths"), _NO_ENCODER, 0),
    _refused(_optional("draft_logits", "FP32", (-1, -1), ragged=True), _NO_DRAFTS),
    _refused(_scalar("draft_acceptance_threshold", "FP32"), _NO_DRAFTS, 0),
    _scalar("end_id"),
    _scalar("pad_id"),
    _optional("stop_words_list", "INT32", (2, -1), ragged=True),
    _optional("bad_words_list", "INT32", (2, -1), ragged=True),
    _optional("embedding_bias", "FP32", (-1,), ragged=True),
    _refused(_scalar("beam_width"), _ONE_BEAM, 1),
    _scalar("temperature", "FP32"),
    _scalar("runtime_top_k"),
    _scalar("runtime_top_p", "FP32"),
    _refused(_scalar("runtime_top_p_min", "FP32"), _FIXED_TOP_P, 0, 1e-6),
    _refused(_scalar("runtime_top_p_decay", "FP32"), _FIXED_TOP_P, 0, 1),
    _refused(_scalar("runtime_top_p_reset_ids"), _FIXED_TOP_P, -1),
    _refused(_scalar("len_penalty", "FP32"), _ONE_BEAM, 0, 1),
    _refused(_scalar("early_stopping", "BOOL"), _ONE_BEAM, 0),
    _scalar("repetition_penalty", "FP32"),
    _scalar("min_tokens"),
    _refused(_scalar("beam_search_diversity_rate", "FP32"), _ONE_BEAM, 0),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("seed", "UINT64"),
    _scalar("return_log_probs", "BOOL"),
    _refused(_scalar("return_context_logits", "BOOL"), _NO_LOGITS, 0),
    _refused(_scalar("return_generation_logits", "BOOL"), _NO_LOGITS, 0),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar(STOP_REQUEST_INPUT, "BOOL"),
    _scalar("streaming", "BOOL"),
    _refused(_optional("prompt_embedding_table", "FP16", (-1, -1), ragged=True), _NO_TABLE),
    _refused(_optional("prompt_table_extra_ids", "UINT64", (-1,), ragged=True), _NO_TABLE, 0),
    _refused(_scalar("prompt_vocab_size"), _NO_TABLE, 0),
    _refused(_optional("cross_attention_mask", "BOOL", (-1, -1), ragged=True), _NO_ENCODER),
    _refused(_optional("mrope_rotary_cos_sin", "FP32", (-1,)), _TEXT_ONLY),
    _refused(_optional("mrope_position_deltas", "INT64"), _TEXT_ONLY, 0),
    _refused(_scalar("lora_task_id", "UINT64"), _NO_LORA, 0),
    _refused(_optional("lora_weights", "FP16", (-1, -1), ragged=True), _NO_LORA),
    _refused(_optional("lora_config", "INT32", (-1, 3), ragged=True), _NO_LORA),
    _refused(_optional("context_phase_params", "UINT8", (-1,), ragged=True), _NO_DISAGGREGATION),
    _refused(_optional("skip_cross_attn_blocks", "BOOL", ragged=True), _NO_ENCODER, 0),
    _refused(_optional("retention_token_range_starts", "INT32", (-1,), ragged=True), _NO_RETENTION),
    _refused(_optional("retention_token_range_ends", "INT32", (-1,), ragged=True), _NO_RETENTION),
    _refused(_optional("retention_token_range_priorities", "INT32", (-1,), ragged=True), _NO_RETENTION),
    _refused(_optional("retention_token_range_durations_ms", "INT32", (-1,), ragged=True), _NO_RETENTION),
    _refused(_optional("retention_decode_priority", ragged=True), _NO_RETENTION),
    _refused(_optional("retention_decode_duration_ms", ragged=True), _NO_RETENTION),
    _optional("guided_decoding_guide_type", "STRING", ragged=True),
    _optional("guided_decoding_guide", "STRING", ragged=True),
    _refused(_optional("lookahead_window_size", ragged=True), _NO_LOOKAHEAD, 0),
    _refused(_optional("lookahead_ngram_size", ragged=True), _NO_LOOKAHEAD, 0),
    _refused(_optional("lookahead_verification_set_size", ragged=True), _NO_LOOKAHEAD, 0),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    _scalar("min_length"),  # what genai-perf sends for min_tokens
)

RESULT_OUTPUTS = (  # of tensorrt_llm and of the text models
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    Tensor("kv_cache_alloc_new_blocks", "INT32"),
    Tensor("kv_cache_reused_blocks", "INT32"),
    Tensor("kv_cache_alloc_total_blocks", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_scheduled_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("finish_reason", "STRING", (-1,)),  # with the last response of a sequence: stop, length or cancelled
)

TEXT_INPUTS = (
    Tensor("text_input", "STRING"),
    _refused(_optional("decoder_text_input", "STRING"), _NO_ENCODER, ""),
    Tensor("max_tokens", "INT32"),
    _optional("num_return_sequences"),
    _optional("bad_words", "STRING", (-1,)),
    _optional("stop_words", "STRING", (-1,)),
    _optional("exclude_input_in_output", "BOOL"),
    _optional("end_id"),
    _optional("pad_id"),
    _optional("top_k"),
    _optional("top_p", "FP32"),
    _optional("temperature", "FP32"),
    _refused(_optional("length_penalty", "FP32"), _ONE_BEAM, 0, 1),
    _optional("repetition_penalty", "FP32"),
    _optional("min_tokens"),
    _optional("presence_penalty", "FP32"),
    _optional("frequency_penalty", "FP32"),
    _optional("seed", "UINT64"),
    _optional("return_log_probs", "BOOL"),
    _refused(_optional("return_context_logits", "BOOL"), _NO_LOGITS, 0),
    _refused(_optional("return_generation_logits", "BOOL"), _NO_LOGITS, 0),
    _optional("return_perf_metrics", "BOOL"),
    _refused(_optional("beam_width"), _ONE_BEAM, 1),
    _optional("stream", "BOOL"),
    _refused(_optional("prompt_embedding_table", "FP16", (-1, -1)), _NO_TABLE),
    _refused(_optional("prompt_table_extra_id", "UINT64"), _NO_TABLE, 0),
    _refused(_optional("prompt_vocab_size"), _NO_TABLE, 0),
    _optional("embedding_bias_words", "STRING", (-1,)),
    _optional("embedding_bias_weights", "FP32", (-1,)),
    _refused(_optional("lora_task_id", "UINT64"), _NO_LORA, 0),
    _refused(_optional("lora_weights", "FP16", (-1, -1), ragged=True), _NO_LORA),
    _refused(_optional("lora_config", "INT32", (-1, 3), ragged=True), _NO_LORA),
    _optional("guided_decoding_guide_type", "STRING", ragged=True),
    _optional("guided_decoding_guide", "STRING", ragged=True),
    _optional("return_num_input_tokens", "BOOL"),
    _optional("return_num_output_tokens", "BOOL"),
    _optional("min_length"),
)
_BLS_RESHAPED = frozenset(
    {
        "return_log_probs",
        "return_context_logits",
        "return_generation_logits",
        "num_return_sequences",
        "lora_task_id",
        "return_perf_metrics",
    }
)
_BLS_NOT_RAGGED = frozenset({"guided_decoding_guide_type", "guided_decoding_guide"})
BLS_INPUTS = (
    *(
        replace(
            tensor, reshape=tensor.name in _BLS_RESHAPED, ragged=tensor.ragged and tensor.name not in _BLS_NOT_RAGGED
        )
        for tensor in TEXT_INPUTS
    ),
    _refused(_optional("image_input", "FP16", (-1, 3, -1, -1)), _TEXT_ONLY),
    _refused(_optional("image_bytes_input", "UINT8", (-1, -1, -1, -1)), _TEXT_ONLY),
    _refused(_optional("image_url_input", "STRING"), _TEXT_ONLY, ""),
    _refused(_optional("video_bytes_input", "UINT8", (-1, -1, -1, -1)), _TEXT_ONLY),
    _refused(_optional("num_draft_tokens"), _NO_DRAFTS, 0),
    _refused(_scalar("use_draft_logits", "BOOL"), _NO_DRAFTS, 0),
)
PREPROCESSING_INPUTS = (
    Tensor("QUERY", "STRING"),
    _refused(_optional("DECODER_QUERY", "STRING"), _NO_ENCODER, ""),
    _refused(_optional("IMAGE_BYTES", "UINT8", (-1, -1, -1, -1)), _TEXT_ONLY),
    _refused(_optional("IMAGE_URL", "STRING"), _TEXT_ONLY, ""),
    _refused(_optional("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1)), _TEXT_ONLY),
    Tensor("REQUEST_OUTPUT_LEN", "INT32"),
    _optional("BAD_WORDS_DICT", "STRING", (-1,)),
    _optional("STOP_WORDS_DICT", "STRING", (-1,)),
    _optional("EMBEDDING_BIAS_WORDS", "STRING", (-1,)),
    _optional("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
    _optional("END_ID"),
    _optional("PAD_ID"),
    _refused(_optional("PROMPT_TABLE_EXTRA_ID", "UINT64"), _NO_TABLE, 0),
)
PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("DECODER_INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
    Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("OUT_END_ID", "INT32"),
    Tensor("OUT_PAD_ID", "INT32"),
    Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),  # from here on declared and never produced
    Tensor("PIXEL_VALUES", "FP16", (-1, -1, -1, -1)),
    Tensor("ASPECT_RATIO_IDS", "INT64", (-1,)),
    Tensor("ASPECT_RATIO_MASK", "INT64", (-1, -1)),
    Tensor("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1)),
    Tensor("IMAGE_SIZES", "INT64", (2,)),
    Tensor("IS_VIDEO_INPUT", "BOOL"),
    Tensor("ATTENTION_MASK", "INT64", (-1,)),
    Tensor("IMAGE_GRID_THW", "INT64", (3,)),
    Tensor("VISION_INPUT_ID", "INT32", (-1,)),
)

ENGINE_OUTPUTS = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    *RESULT_OUTPUTS,
    Tensor("context_phase_params", "UINT8", (-1,)),
)
TEXT_OUTPUTS = (Tensor("text_output", "STRING", (-1,)), *RESULT_OUTPUTS)
POSTPROCESSING_INPUTS = (Tensor("TOKENS_BATCH", "INT32", (-1, -1)), Tensor("SEQUENCE_LENGTH", "INT32", (-1,)))
POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "STRING", (-1,)),)
JSON_INPUTS = (Tensor("request", "STRING"), Tensor("stream", "BOOL", optional=True))
JSON_OUTPUTS = (Tensor("response", "STRING", (-1,)),)
