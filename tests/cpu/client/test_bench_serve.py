"""`bench serve` against scripted servers: counting over coalesced responses, errors, rates, costs, its outputs."""

import asyncio
import json
import time

import grpc
import pytest
from click.testing import CliRunner

from gptoss_trt.client.aio import AsyncGrpcClient
from gptoss_trt.client.bench.cli import BENCHMARKS, bench
from gptoss_trt.client.bench.load import Target, ask, closed_loop, open_loop
from gptoss_trt.client.bench.workload import Lengths, Request, synthetic


def tokens_in_lumps(_inputs):
    """Ten tokens in responses of 4, 4 and 2, some 20 ms apart."""
    for count, total in ((4, 4), (4, 8), (2, 10)):
        yield 0.02
        yield {
            "output_ids": [[[7] * count]],
            "sequence_length": [[count]],
            "num_output_tokens": [[total]],
            "num_input_tokens": [[9]],
        }


def text_in_lumps(_inputs):
    for text, total in (("ab", 4), ("c", 10)):
        yield {"text_output": [text], "num_output_tokens": [[total]], "num_input_tokens": [[9]]}


def chat_in_lumps(_inputs):
    for chunk in (
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "ok"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 10}},
    ):
        yield {"response": [json.dumps(chunk)]}


@pytest.fixture
def served(triton):
    triton.scripts = {"tensorrt_llm": tokens_in_lumps, "ensemble": text_in_lumps, "chat": chat_in_lumps}
    triton.ready_models = set(triton.scripts)
    return triton


def run(target, use):
    async def inner():
        async with AsyncGrpcClient(target) as client:
            return await use(client)

    return asyncio.run(inner())


def requests(model):
    return synthetic(model, Lengths.parse("9"), Lengths.parse("10"), 0)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "chat"])
def test_tokens_are_counted_by_the_server_not_by_responses(served, model):
    record = run(served.target, lambda client: ask(client, Target(model), next(requests(model))))
    assert (record.error, record.output_tokens, record.input_tokens) == (None, 10, 9)
    assert 0 < record.ttft_s <= record.e2e_s
    assert record.tpot_s == pytest.approx((record.last_s - record.first_s) / 9)


def test_without_a_count_the_ids_are_counted(served):
    def script(_inputs):
        for ids in ([1, 2], [3]):
            yield {"output_ids": [[ids]], "sequence_length": [[len(ids)]]}

    served.scripts["tensorrt_llm"] = script
    record = run(served.target, lambda client: ask(client, Target("tensorrt_llm"), next(requests("tensorrt_llm"))))
    assert record.output_tokens == 3


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (lambda _i: iter([("status", grpc.StatusCode.UNAVAILABLE, "gone")]), "UNAVAILABLE"),
        (lambda _i: iter([{"output_ids": [[[1]]], "sequence_length": [[1]]}, ("error", "late")]), "UNKNOWN"),
        (lambda _i: iter([{"output_ids": [[[1]]], "sequence_length": [[1]]}, ("cut",)]), "DATA_LOSS"),
        (lambda _i: iter([]), "EMPTY_ANSWER"),
        (lambda _i: iter([5.0]), "DEADLINE_EXCEEDED"),
    ],
)
def test_failures_are_records(served, script, error):
    served.scripts["tensorrt_llm"] = script
    target = Target("tensorrt_llm", timeout_s=0.5)
    record = run(served.target, lambda client: ask(client, target, next(requests("tensorrt_llm"))))
    assert record.error == error


def test_a_prompt_that_no_tensor_carries_is_a_record_too(served):
    record = run(served.target, lambda client: ask(client, Target("tensorrt_llm"), Request(4, input_ids=(2**40,))))
    assert (record.error, served.seen) == ("INVALID_ARGUMENT", [])


def test_ignore_eos_sends_the_end_id_that_never_comes(served):
    for ignore in (True, False):
        target = Target("ensemble", ignore_eos=ignore)
        run(served.target, lambda client, target=target: ask(client, target, next(requests("ensemble"))))
    assert served.seen[0][1]["end_id"][1].tolist() == [[-1]]
    assert "end_id" not in served.seen[1][1]


def test_a_closed_loop_keeps_its_number_in_flight(served):
    flying, most = [0], [0]

    def script(inputs):
        flying[0] += 1
        most[0] = max(most[0], flying[0])
        yield from tokens_in_lumps(inputs)
        flying[0] -= 1

    served.scripts["tensorrt_llm"] = script
    target = Target("tensorrt_llm")
    level = run(
        served.target,
        lambda client: closed_loop(client, target, requests("tensorrt_llm"), count=10, concurrency=3),
    )
    assert (len(level.records), len(served.seen), most[0]) == (10, 10, 3)
    assert level.duration_s >= 4 * 0.06


def test_an_open_loop_does_not_wait_for_answers(served):
    served.scripts["tensorrt_llm"] = lambda inputs: (step for step in [0.3, *tokens_in_lumps(inputs)])
    target = Target("tensorrt_llm")
    started = time.perf_counter()
    level = run(
        served.target,
        lambda client: open_loop(client, target, requests("tensorrt_llm"), count=8, rate=100.0),
    )
    assert len(level.records) == 8
    assert all(record.error is None for record in level.records)
    assert time.perf_counter() - started < 8 * 0.3


def invoke(*arguments):
    result = CliRunner().invoke(bench, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_lines_of_a_sweep(served, tmp_path):
    records, report = tmp_path / "records.jsonl", tmp_path / "report.txt"
    result = invoke(
        "serve", "--url", served.target, "--concurrency", "1,2", "--requests", "4", "--warmup", "1",
        "--input-tokens", "9", "--output-tokens", "10", "--gpu-hour-usd", "3.6", "--slo-ttft-ms", "1000", "--json",
        "--records", str(records), "--report", str(report),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["concurrency"], line["requests"], line["errors"]) for line in lines] == [(1, 4, {}), (2, 4, {})]
    for line in lines:
        assert (line["output_tokens"], line["input_tokens"]) == (40, 36)
        spent = 0.001 * line["duration_s"]
        paid = (line["usd_per_m_input"] * 36 + line["usd_per_m_output"] * 40) / 1e6
        assert paid == pytest.approx(spent, rel=1e-3)
        assert line["goodput_s"] == pytest.approx(line["requests_s"])
    assert len(records.read_text().splitlines()) == 8
    assert "2 in flight" in report.read_text()
    # two levels of one warm-up, four requests and four prefill requests, with one token of answer
    wanted = [seen[1]["request_output_len"][1].item() for seen in served.seen]
    assert wanted == [10] * 5 + [1] * 4 + [10] * 5 + [1] * 4
    prompts = {seen[1]["input_ids"][1].tobytes() for seen in served.seen}
    assert len(prompts) == len(served.seen)


def test_errors_are_counted_in_the_lines_and_in_the_table(served):
    calls = iter(range(100))

    def every_second(inputs):
        if next(calls) % 2:
            yield ("status", grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield from tokens_in_lumps(inputs)

    served.scripts["tensorrt_llm"] = every_second
    options = ["serve", "--url", served.target, "--concurrency", "1", "--requests", "6", "--warmup", "0"]
    result = invoke(*options, "--json")
    line = json.loads(result.stdout)
    assert (line["requests"], line["errors"]) == (3, {"RESOURCE_EXHAUSTED": 3})
    assert "RESOURCE_EXHAUSTED: full" in line["first_error"]
    assert "3 RESOURCE_EXHAUSTED; first: RESOURCE_EXHAUSTED: full" in invoke(*options).stdout


def test_a_run_without_any_success_fails(served):
    served.scripts["tensorrt_llm"] = lambda _i: iter([("status", grpc.StatusCode.INTERNAL, "broken")])
    result = invoke("serve", "--url", served.target, "--concurrency", "1", "--requests", "2", "--warmup", "0")
    assert result.exit_code == 1
    assert "no request succeeded; first error: INTERNAL: broken" in result.output


def test_rates_and_datasets(served, tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}\n')
    result = invoke(
        "serve", "--url", served.target, "--model", "chat", "--dataset", str(data), "--request-rate", "50",
        "--requests", "5", "--warmup", "0", "--temperature", "0.5", "--json",
    )  # fmt: skip
    line = json.loads(result.stdout)
    assert (line["request_rate"], line["requests"], line["load"]) == (50, 5, "50 req/s")
    body = json.loads(served.seen[0][1]["request"][1][0])
    assert (body["max_completion_tokens"], body["temperature"], body["top_p"]) == (5, 0.5, 1.0)


def test_levels_and_the_cost_share_a_dataset(served, tmp_path):
    """A prefix cache would know prompts that were sent before."""
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(f'{{"input_ids": [{number}], "max_tokens": 5}}\n' for number in range(12)))
    invoke(
        "serve", "--url", served.target, "--dataset", str(data), "--concurrency", "1,2", "--requests", "2",
        "--warmup", "1", "--gpu-hour-usd", "3", "--json",
    )  # fmt: skip
    sent = [int(inputs["input_ids"][1].reshape(-1)[0]) for _, inputs, _ in served.seen]
    assert sorted(sent) == list(range(10))  # a level: one to warm up, two that count, two for the cost of a prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--concurrency", "1", "--request-rate", "1"], "give one"),
        (["serve", "--concurrency", "0"], "list of positive whole numbers"),
        (["serve", "--concurrency", "1.5"], "list of positive whole numbers"),
        (["serve", "--request-rate", "x"], "list of positive numbers"),
        (["serve", "--input-tokens", "many"], "forms: 512"),
        (["serve", "--url", "ftp://x"], "allowed: grpc"),
        (["srve"], "did you mean 'serve'"),
    ],
)
def test_errors_of_use(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_benchmark_that_this_installation_lacks_is_named(monkeypatch):
    entry = BENCHMARKS["ops"]
    monkeypatch.setitem(BENCHMARKS, "ops", type(entry)("gptoss_trt.no.such", "x", "s", "build"))
    result = invoke("ops")
    assert (result.exit_code, "no `bench ops`" in result.output) == (1, True)


def test_help_imports_no_benchmark():
    result = invoke("--help")
    assert all(name in result.output for name in BENCHMARKS)
