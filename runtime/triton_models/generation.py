"""From checked inputs to the engine's request: the defaults and sentinels that existing clients rely on.

Invariant: nothing that a request sets is dropped; a value outside its range is refused by name. What depends on the
engine (context, vocabulary, guides) is the engine's to refuse. Must not know Triton or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.client.protocol import END_ID_NEVER
from gptoss_trt.runtime.engine.messages import Guide, GuideKind, Prompt, Sampling, Submit
from gptoss_trt.runtime.engine.validation import MAX_SEQUENCES
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError

GUIDE_KINDS: dict[str, GuideKind] = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "ebnf",
    "choice": "choice",
}


@dataclass(frozen=True)
class Wanted:
    """What a request asks its answer to hold."""

    streaming: bool
    exclude_input: bool
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool


def wanted(inputs: Inputs, row: int, *, exclude_input_default: bool) -> Wanted:
    """What row `row` asks for; flags that are not set are false but for `exclude_input_default`."""
    return Wanted(
        streaming=inputs.flag("streaming", row),
        exclude_input=inputs.flag("exclude_input_in_output", row, exclude_input_default),
        log_probs=inputs.flag("return_log_probs", row),
        perf_metrics=inputs.flag("return_perf_metrics", row),
        num_input_tokens=inputs.flag("return_num_input_tokens", row),
        num_output_tokens=inputs.flag("return_num_output_tokens", row),
    )


def sampling(inputs: Inputs, row: int) -> Sampling:
    """How tokens are chosen: no top_k (or 0) and no top_p (or one that is not above 0) is greedy at any temperature;
    the whole vocabulary takes top_p 1."""
    temperature = inputs.number("temperature", row, 1.0)
    top_k = int(inputs.number("runtime_top_k", row, 0))
    top_p = inputs.number("runtime_top_p", row, 0.0)
    for name, value, low in (("temperature", temperature, 0.0), ("runtime_top_k", top_k, 0)):
        if value < low:
            raise RefusalError(f"{inputs.name_of(name)} is {value}; it must be at least {low}")
    if top_p > 1:
        raise RefusalError(f"{inputs.name_of('runtime_top_p')} is {top_p}; it must be at most 1")
    greedy = top_k == 0 and top_p <= 0
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p if top_p > 0 else 1.0,
        seed=inputs.scalar("seed", row),
        repetition_penalty=inputs.number("repetition_penalty", row, 1.0),
        presence_penalty=inputs.number("presence_penalty", row, 0.0),
        frequency_penalty=inputs.number("frequency_penalty", row, 0.0),
    )


def stop_ids(inputs: Inputs, row: int) -> tuple[int, ...]:
    """The ids that end a sequence: end_id; Harmony's three when it is not set; none when it is -1."""
    end_id = inputs.scalar("end_id", row)
    if end_id is None:
        return HARMONY_STOP_IDS
    return () if end_id == END_ID_NEVER else (int(end_id),)


def min_tokens(inputs: Inputs, row: int) -> int:
    """min_tokens, or min_length, which is the same under another name. 0 when neither is set."""
    values = {name: inputs.scalar(name, row) for name in ("min_tokens", "min_length")}
    given = {int(value) for value in values.values() if value is not None}
    if len(given) > 1:
        raise RefusalError(
            f"min_tokens is {values['min_tokens']} and min_length {values['min_length']}; they are one thing: set one"
        )
    value = next(iter(given), 0)
    if value < 0:
        raise RefusalError(f"min_tokens is {value}; it must be at least 0")
    return value


def sequences(inputs: Inputs, row: int) -> int:
    """num_return_sequences; 1 when it is not set. Its limit is the engine's, but a model makes an answer for each
    sequence before the engine is asked."""
    value = inputs.scalar("num_return_sequences", row)
    count = 1 if value is None else int(value)
    if not 1 <= count <= MAX_SEQUENCES:
        raise RefusalError(f"num_return_sequences is {count}; it must lie in 1..{MAX_SEQUENCES}")
    return count


def guides(inputs: Inputs, row: int, end_ids: tuple[int, ...]) -> tuple[Guide, ...]:
    """The guide of guided_decoding_guide_type and guided_decoding_guide, from the first token to one of `end_ids`."""
    kind = inputs.text("guided_decoding_guide_type", row)
    grammar = inputs.text("guided_decoding_guide", row)
    if not kind:
        if grammar:
            raise RefusalError("guided_decoding_guide is set without guided_decoding_guide_type")
        return ()
    if kind not in GUIDE_KINDS:
        raise RefusalError(f"guided_decoding_guide_type is {kind[:80]!r}; allowed: {', '.join(GUIDE_KINDS)}")
    if not grammar and kind != "json":
        raise RefusalError(f"guided_decoding_guide_type {kind!r} needs guided_decoding_guide")
    return (Guide(GUIDE_KINDS[kind], grammar or "", end_ids=end_ids),)


def max_tokens(inputs: Inputs, row: int) -> int:
    """request_output_len (max_tokens of the text models), 1 or more."""
    value = inputs.scalar("request_output_len", row)
    if value is None or value < 1:
        raise RefusalError(f"{inputs.name_of('request_output_len')} is {value}; it must be at least 1")
    return int(value)


def submit(inputs: Inputs, row: int, token_ids: Prompt, *, want: Wanted) -> Submit:
    """The engine's request for row `row` without id, stop and bad sequences and bias, in which the models differ.

    Raises RefusalError for an empty prompt and for values outside their range.
    """
    if not token_ids:
        raise RefusalError("the prompt is empty: it has 0 tokens")
    ends = stop_ids(inputs, row)
    return Submit(
        request_id="",
        token_ids=token_ids,
        max_tokens=max_tokens(inputs, row),
        min_tokens=min_tokens(inputs, row),
        sampling=sampling(inputs, row),
        stop_ids=ends,
        logprobs=0 if want.log_probs else None,
        n=sequences(inputs, row),
        guides=guides(inputs, row, ends or HARMONY_STOP_IDS),
    )
