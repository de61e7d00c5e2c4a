"""The benchmark's arithmetic: workloads, figures, costs, tables, input files, and profiles of perf_analyzer."""

import itertools
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from gptoss_trt.client.bench.cost import Price, split_cost
from gptoss_trt.client.bench.inputs import input_data
from gptoss_trt.client.bench.load import arrival_times
from gptoss_trt.client.bench.measure import Record, Slo, summarize
from gptoss_trt.client.bench.profile import ProfileError, read_profile, record_of
from gptoss_trt.client.bench.report import print_tables, write_report
from gptoss_trt.client.bench.workload import FORMS, WORDS, Lengths, load_dataset, synthetic
from gptoss_trt.runtime.harmony import Tokenizer

DATA = Path(__file__).parents[2] / "data" / "perf"


def take(count, model, seed=0, **options):
    return list(itertools.islice(synthetic(model, Lengths.parse("9"), Lengths.parse("4"), seed, **options), count))


@pytest.mark.parametrize(
    "text", ["", "0", "1.5", "uniform:3", "uniform:9,3", "uniform:0,3", "normal:0,1", "zipf:1,2", "x"]
)
def test_bad_lengths_name_the_forms(text):
    with pytest.raises(ValueError, match="forms: 512, uniform:64,1024, normal:512,128"):
        Lengths.parse(text)


def test_lengths_are_drawn_as_they_say():
    source = random.Random(1)
    uniform = [Lengths.parse("uniform:3,5").draw(source) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}
    normal = [Lengths.parse("normal:100,10").draw(source) for _ in range(2000)]
    assert sum(normal) / len(normal) == pytest.approx(100, abs=1)
    assert min(Lengths.parse("normal:1,50").draw(source) for _ in range(100)) == 1
    assert {Lengths.parse("7").draw(source) for _ in range(9)} == {7}
    assert [str(Lengths.parse(text)) for text in ("512", "uniform:64,1024")] == ["512", "uniform:64,1024"]


def test_the_words_are_one_token_each():
    tokenizer = Tokenizer.load()
    assert {
        word: len(tokenizer.encode_ordinary(text)) for word in WORDS for text in (word, " " + word)
    } == dict.fromkeys(WORDS, 1)
    prompt = take(1, "ensemble", shared_prefix=5)[0].prompt
    assert len(tokenizer.encode_ordinary(prompt)) == 14


@pytest.mark.parametrize("model", sorted(FORMS))
def test_synthetic_requests_repeat_by_seed_and_differ_from_each_other(model):
    requests = take(5, model)
    assert requests == take(5, model)
    assert requests != take(5, model, seed=1)
    assert len({getattr(request, FORMS[model]) if model != "chat" else str(request) for request in requests}) == 5
    assert all(getattr(request, FORMS[model]) for request in requests)


def test_a_shared_prefix_is_shared():
    requests = take(4, "tensorrt_llm", shared_prefix=6)
    assert len({request.input_ids[:6] for request in requests}) == 1
    assert {len(request.input_ids) for request in requests} == {15}


def test_datasets(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "max_tokens": 9}\n')
    requests = load_dataset(path, "ensemble", Lengths.parse("4"), 0)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("a", 4), ("b", 9)]
    path.write_text('{"prompt": "a\u2028b\x85"}\r\n{"prompt": "c", "max_tokens": 9.0}', encoding="utf-8")
    requests = load_dataset(path, "ensemble", Lengths.parse("4"), 0)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("a\u2028b\x85", 4), ("c", 9)]
    for content, message in [
        ('{"prompt": 3}', ":1: no 'prompt'"),
        ("{", ":1:"),
        ("", "holds no request"),
        ("[]", ":1:"),
        ('{"prompt": "a", "max_tokens": null}', ":1: max_tokens is None"),
        ('{"prompt": "a", "max_tokens": "many"}', ":1: max_tokens is 'many'"),
        ('{"prompt": "a", "max_tokens": 0}', ":1: max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": 1e999}', ":1: max_tokens is inf"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_dataset(path, "ensemble", Lengths.parse("4"), 0)


def test_figures_of_a_level_by_hand():
    records = [
        Record(start_s=0.0, first_s=0.1, last_s=1.1, input_tokens=10, output_tokens=11, finish_reason="length"),
        Record(start_s=0.0, first_s=0.3, last_s=0.3, input_tokens=10, output_tokens=1, finish_reason="stop"),
        Record(start_s=0.0, first_s=0.2, last_s=0.9, output_tokens=5, error="UNAVAILABLE", message="gone"),
    ]
    summary = summarize(records, 2.0, Slo(ttft_ms=200, tpot_ms=100))
    assert (summary.requests, summary.errors, summary.first_error) == (2, {"UNAVAILABLE": 1}, "UNAVAILABLE: gone")
    assert (summary.input_tokens, summary.output_tokens) == (20, 12)
    assert (summary.output_tok_s, summary.requests_s, summary.goodput_s) == (6.0, 1.0, 0.5)
    assert summary.ttft_ms["p50"] == pytest.approx(200)
    assert summary.tpot_ms == pytest.approx({"mean": 100, "p50": 100, "p90": 100, "p99": 100, "max": 100})
    assert summary.finish_reasons == {"length": 1, "stop": 1}


def test_only_failures_still_make_a_summary():
    summary = summarize([Record(0.0, error="INTERNAL")], 1.0)
    assert (summary.requests, summary.errors, summary.ttft_ms) == (0, {"INTERNAL": 1}, {})


@pytest.mark.parametrize(
    ("slo", "record", "met"),
    [
        (Slo(100, None), Record(0, 0.1, 9.0, 1, 2), True),
        (Slo(99, None), Record(0, 0.1, 9.0, 1, 2), False),
        (Slo(None, 50), Record(0, 0.1, 0.2, 1, 3), True),
        (Slo(None, 49), Record(0, 0.1, 0.2, 1, 3), False),
        (Slo(None, 1), Record(0, 0.1, 0.1, 1, 1), True),
        (Slo(1, None), Record(0), False),
    ],
)
def test_slo(slo, record, met):
    assert slo.met(record) is met


def test_costs_add_up_to_the_price_of_the_time():
    cost = split_cost(
        Price(3.6, gpus=2), duration_s=100, input_tokens=50_000, output_tokens=10_000, prefill_tok_s=2_000
    )
    # 0.002 USD a second; 25 s are prefill: 0.05 USD for 50,000 tokens, 0.15 USD for 10,000.
    assert (cost.usd_per_m_input, cost.usd_per_m_output, cost.prefill_share) == (1.0, 15.0, 0.25)
    assert 0.05 * cost.usd_per_m_input + 0.01 * cost.usd_per_m_output == pytest.approx(0.2)


def test_costs_at_the_edges():
    full = split_cost(Price(3.6), duration_s=10, input_tokens=10**6, output_tokens=0, prefill_tok_s=1)
    assert (full.prefill_share, full.usd_per_m_output, full.usd_per_m_input) == (1.0, None, 0.01)
    with pytest.raises(ValueError, match="must be positive"):
        split_cost(Price(1), duration_s=1, input_tokens=1, output_tokens=1, prefill_tok_s=float("nan"))


def test_arrivals_are_a_poisson_process():
    times = arrival_times(4001, 50.0, 3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def line(**more):
    summary = summarize([Record(0.0, 0.1, 1.1, 10, 11), Record(0.0, error="INTERNAL", message="x")], 2.0)
    return {"load": "4 in flight", **summary.line(), **more}


def test_tables_fit_eighty_columns_and_show_errors(tmp_path):
    path = tmp_path / "report.txt"
    with path.open("w") as file:
        print_tables([line(goodput_s=1.0, usd_per_m_input=0.5, usd_per_m_output=12.25)], Console(file=file, width=80))
    text = path.read_text()
    assert "…" not in text
    assert "4 in flight: 1 INTERNAL; first: INTERNAL: x" in text
    assert "12.250" in text
    assert "1,100" in text


def test_reports_hold_the_settings(tmp_path):
    write_report(tmp_path / "r.txt", {"model": "chat"}, [line()])
    text = (tmp_path / "r.txt").read_text()
    assert text.startswith("model: chat\n")
    assert "\x1b" not in text
    assert "USD" not in text


@pytest.mark.parametrize("model", ["chat", "ensemble", "tensorrt_llm"])
def test_the_shipped_input_files_are_what_the_command_writes(model):
    requests = synthetic(model, Lengths.parse("16"), Lengths.parse("8"), 0)
    assert json.loads((DATA / f"{model}.json").read_text()) == input_data(model, requests, 4, streaming=True)


def test_input_files_have_shapes_without_a_batch_axis():
    data = input_data("tensorrt_llm", iter(take(1, "tensorrt_llm")), 1, streaming=False)["data"][0]
    assert (data["input_ids"]["shape"], data["request_output_len"]) == ([9], {"content": [4], "shape": [1]})
    assert (data["streaming"]["content"], data["end_id"]["content"]) == ([False], [-1])


def profile_request(outputs, **inputs):
    stamps = [10**9 + 10**8 * (1 + index) for index in range(len(outputs))]
    return {
        "timestamp": 10**9,
        "request_inputs": inputs,
        "response_timestamps": stamps,
        "response_outputs": outputs,
    }


def test_profiles_count_by_num_output_tokens_where_it_was_asked_for():
    outputs = [
        {"text_output": "a", "num_output_tokens": 3, "num_input_tokens": 7, "finish_reason": ""},
        {"text_output": "b", "num_output_tokens": 5, "num_input_tokens": 7, "finish_reason": "length"},
        {},
    ]
    asked = {"return_num_output_tokens": True, "return_num_input_tokens": True}
    record = record_of(profile_request(outputs, **asked))
    assert (record.output_tokens, record.input_tokens, record.finish_reason) == (5, 7, "length")
    assert (record.ttft_s, record.tpot_s) == (pytest.approx(0.1), pytest.approx(0.025))
    with pytest.raises(ProfileError, match="did not set return_num_output_tokens"):
        record_of(profile_request(outputs))


def test_profiles_of_tokens_count_by_sequence_length_else():
    outputs = [
        {"output_ids": [1, 2], "sequence_length": 2, "num_output_tokens": 777},
        {"output_ids": 3, "sequence_length": 1},
    ]
    record = record_of(profile_request(outputs, input_ids=[1, 2, 3], streaming=True))
    assert (record.output_tokens, record.input_tokens) == (3, 3)
    whole = [{"output_ids": [1, 2, 3, 7, 8], "sequence_length": 5}]
    assert record_of(profile_request(whole, input_ids=[1, 2, 3])).output_tokens == 2
    assert record_of(profile_request(whole, input_ids=[1, 2, 3], exclude_input_in_output=True)).output_tokens == 5


def test_profiles_of_chat_count_by_usage():
    first = {"choices": [{"delta": {"role": "assistant"}}]}
    text = {"choices": [{"delta": {"content": "a"}}]}
    last = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}
    outputs = [{"response": json.dumps(part)} for part in (first, text, last)]
    record = record_of(profile_request(outputs, request="{}"))
    assert (record.output_tokens, record.input_tokens, record.ttft_s) == (9, 4, pytest.approx(0.2))
    together = [{"response": json.dumps(first) + "{\x01\0\0" + json.dumps(text) + "\ufffd\0\0" + json.dumps(last)}]
    assert record_of(profile_request(together, request="{}")).output_tokens == 9
    with pytest.raises(ProfileError, match="no usage"):
        record_of(profile_request(outputs[:2], request="{}"))


def test_profiles_keep_empty_answers_as_errors(tmp_path):
    good = profile_request([{"output_ids": 3, "sequence_length": 1}], input_ids=[1], streaming=True)
    path = tmp_path / "p.json"
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": [good, profile_request([{}])]}
    path.write_text(json.dumps({"experiments": [experiment]}))
    [(load, summary)] = read_profile(path)
    assert (load, summary.requests, summary.errors) == ("concurrency 2", 1, {"EMPTY_ANSWER": 1})
    path.write_text("{}")
    with pytest.raises(ProfileError, match="is no profile of perf_analyzer"):
        read_profile(path)
