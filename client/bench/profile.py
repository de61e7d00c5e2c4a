"""Reads the profile that perf_analyzer exports (`--profile-export-file`) and counts tokens, not responses.

A response of these models carries several tokens and perf_analyzer counts responses, so its own token figures are too
low. Tokens come from num_output_tokens (it grows over a stream) where the request asked for it, else from
sequence_length (of each response), else from the usage of a chat's last chunk.

Invariant: a request without a token count is an error that names what is missing, never a zero. Must not know how the
profile was made.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gptoss_trt.client.bench.measure import Record, Slo, Summary, summarize

Outputs = dict[str, Any]
NS = 1e-9
CHUNK_START = re.compile(r'\{"(?=[a-z])')


class ProfileError(ValueError):
    """A profile that cannot be read or that counts no tokens."""


def read_profile(path: Path, slo: Slo | None = None) -> list[tuple[str, Summary]]:
    """(load, summary) of every experiment in the file, load as `concurrency 4`. Raises ProfileError."""
    try:
        experiments = json.loads(path.read_text(encoding="utf-8", errors="replace"))["experiments"]
        return [_experiment(entry, slo) for entry in experiments]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ProfileError(f"{path} is no profile of perf_analyzer: {error!r}") from error


def _experiment(entry: dict[str, Any], slo: Slo | None) -> tuple[str, Summary]:
    records = [record_of(request) for request in entry["requests"]]
    ends = [record.last_s for record in records if record.last_s is not None]
    duration_s = max(ends) - min(record.start_s for record in records) if ends else 0.0
    return f"{entry['experiment']['mode']} {entry['experiment']['value']}", summarize(records, duration_s, slo)


def record_of(request: dict[str, Any]) -> Record:
    """What one request saw. Raises ProfileError when no response carries a token count that can be trusted."""
    inputs, record = request["request_inputs"], Record(start_s=request["timestamp"] * NS)
    stamps, outputs = request["response_timestamps"], request["response_outputs"]
    shown = [(stamp * NS, output) for stamp, output in zip(stamps, outputs, strict=True) if output]
    if not shown:
        record.error, record.message = "EMPTY_ANSWER", "no response with outputs"
        return record
    counts = _counts([output for _stamp, output in shown], inputs)
    record.first_s = next((stamp for (stamp, _), count in zip(shown, counts, strict=True) if count), shown[0][0])
    record.last_s = shown[-1][0]
    record.output_tokens = sum(counts)
    record.input_tokens = _input_tokens([output for _stamp, output in shown], inputs)
    record.finish_reason = next((str(o["finish_reason"]) for _s, o in reversed(shown) if o.get("finish_reason")), None)
    return record


def _counts(outputs: list[Outputs], inputs: Outputs) -> list[int]:
    """New tokens of each response. perf_analyzer asks for every output and exports garbage for those that a response
    lacks, so a count is read only where the request asked for it."""
    if inputs.get("return_num_output_tokens") is True:
        totals = [int(_scalar(output["num_output_tokens"])) for output in outputs]
        return [total - before for before, total in zip([0, *totals], totals, strict=False)]
    if "output_ids" in outputs[0]:
        whole = not inputs.get("streaming") and not inputs.get("exclude_input_in_output")
        prompt = (_input_tokens(outputs, inputs) or 0) if whole else 0  # which then begins the answer
        return [int(_scalar(output["sequence_length"])) - prompt for output in outputs]
    if "response" in outputs[0]:
        return _chat_counts(outputs)
    raise ProfileError(
        f"requests did not set return_num_output_tokens and outputs {sorted(outputs[0])[:4]}... hold no token ids"
    )


def _chat_counts(outputs: list[Outputs]) -> list[int]:
    """All tokens of the usage with the first response that has text: chunks do not say how many they carry."""
    usages = [usage for output in outputs if (usage := _usage(output))]
    if not usages:
        raise ProfileError("a chat's chunks have no usage; set stream_options.include_usage in the body")
    first = next((position for position, output in enumerate(outputs) if _has_text(output)), 0)
    return [int(usages[-1]["completion_tokens"]) if position == first else 0 for position in range(len(outputs))]


def _scalar(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0] if value else None
    return value


def _chunks(output: Outputs) -> list[dict[str, Any]]:
    """The chunks of a response. perf_analyzer exports the elements of a string tensor as one text, with the four bytes
    of each next one's length between them."""
    texts = output["response"]
    text = "".join(texts) if isinstance(texts, list) else texts
    chunks, decoder, start = [], json.JSONDecoder(), CHUNK_START.search(text)
    while start is not None:
        chunk, end = decoder.raw_decode(text, start.start())
        chunks.append(chunk)
        start = CHUNK_START.search(text, end)
    return chunks


def _usage(output: Outputs) -> dict[str, Any]:
    return next((chunk["usage"] for chunk in _chunks(output) if chunk.get("usage")), {})


def _has_text(output: Outputs) -> bool:
    deltas = [choice.get("delta") or {} for chunk in _chunks(output) for choice in chunk.get("choices") or []]
    return any(delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "tool_calls"))


def _input_tokens(outputs: list[Outputs], inputs: Outputs) -> int | None:
    if inputs.get("return_num_input_tokens") is True:
        return int(_scalar(outputs[-1]["num_input_tokens"]))
    if "input_ids" in inputs:
        return len(inputs["input_ids"]) if isinstance(inputs["input_ids"], list) else 1
    if "response" in outputs[0]:
        usages = [usage for output in outputs if (usage := _usage(output))]
        return int(usages[-1]["prompt_tokens"])
    return None
