"""Benchmarks against a real server: bench serve, perf_analyzer with the project's files, genai-perf's payloads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.client.bench.perf_analyzer import command, write_script
from gptoss_trt.client.bench.profile import read_profile

DATA = Path(__file__).parents[1] / "data" / "perf"
REQUESTS = 8
STEP_MS = 5.0


def bench(*arguments: str) -> str:
    line = [sys.executable, "-m", "gptoss_trt", "bench", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("url", ["grpc", "http"])
@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_bench_serve(triton: Any, model: str, url: str) -> None:
    address = triton.server.http_url if url == "http" else triton.server.grpc_url
    options = ["--concurrency", "1,4", "--requests", "6", "--input-tokens", "12", "--output-tokens", "10"]
    # The scripted engine echoes the prompt, so a prompt of 12 words fills an answer of 10 tokens.
    lines = [
        json.loads(line) for line in bench("serve", "--url", address, "--model", model, *options, "--json").splitlines()
    ]
    assert [line["concurrency"] for line in lines] == [1, 4]
    for line in lines:
        assert (line["requests"], line["errors"], line["finish_reasons"]) == (6, {}, {"length": 6})
        assert (line["input_tokens"], line["output_tokens"]) == (6 * 12, 6 * 10)
        assert 0.8 * STEP_MS < line["tpot_ms"]["p50"] < 10 * STEP_MS
        assert line["ttft_ms"]["p50"] < line["e2e_ms"]["p50"]
    assert lines[1]["output_tok_s"] > 1.5 * lines[0]["output_tok_s"]


def test_bench_serve_counts_the_server_s_failures(triton: Any, words: Any, tmp_path: Path) -> None:
    data = tmp_path / "requests.jsonl"
    prompts = [words.LONG, words.FAILS]
    data.write_text("".join(json.dumps({"input_ids": list(ids), "max_tokens": 6}) + "\n" for ids in prompts))
    options = ["--concurrency", "1", "--requests", "6", "--warmup", "0", "--dataset", str(data), "--json"]
    line = json.loads(bench("serve", "--url", triton.server.grpc_url, *options))
    assert (line["requests"], sum(line["errors"].values())) == (3, 3)
    assert "it broke" in line["first_error"]


def analyze(triton: Any, model: str, file: Path, profile: Path, *more: str) -> Any:
    """Runs perf_analyzer on an input file; gives the only experiment's requests and our summary of them."""
    arguments = ["-m", model, "-i", "grpc", "-u", triton.server.grpc_url, "--async", "--streaming"]
    arguments += ["--input-data", str(file), "--request-count", str(REQUESTS), "--concurrency-range", "2"]
    line, environment = command([*arguments, "--profile-export-file", str(profile), *more])
    for _attempt in range(3):
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        # perf_analyzer 2.51 now and then ends well with an empty profile; what it has is never wrong.
        written = profile.read_text().strip()
        experiments = json.loads(written)["experiments"] if written else []
        if experiments and experiments[0]["requests"]:
            break
        profile.unlink()  # it wants the name of a new file
    [experiment] = experiments
    return experiment["requests"], profile


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_perf_analyzer_with_the_project_s_files(triton: Any, model: str, tmp_path: Path) -> None:
    requests, profile = analyze(triton, model, DATA / f"{model}.json", tmp_path / "profile.json")
    [(load, summary)] = read_profile(profile)
    assert (load, summary.requests, summary.errors) == ("concurrency 2", len(requests), {})
    assert len(requests) >= REQUESTS
    # Prompts of 16 tokens, answers of 8.
    assert (summary.input_tokens, summary.output_tokens) == (16 * len(requests), 8 * len(requests))
    assert 0.8 * STEP_MS < summary.tpot_ms["p50"] < 10 * STEP_MS
    table = bench("profile", str(profile))
    assert "concurrency 2" in table


def test_perf_analyzer_without_streaming(triton: Any, tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    bench("inputs", "--model", "tensorrt_llm", "--count", "4", "--input-tokens", "9", "--output-tokens", "5", "--whole",
          "--out", str(file))  # fmt: skip
    requests, profile = analyze(triton, "tensorrt_llm", file, tmp_path / "profile.json")
    [(_load, summary)] = read_profile(profile)
    assert summary.output_tokens == 5 * len(requests)
    assert all(len(request["response_timestamps"]) <= 2 for request in requests)  # the answer, and an empty end


def test_a_script_for_tools_that_look_for_perf_analyzer(tmp_path: Path) -> None:
    script = bench("perf-analyzer", "--script", str(tmp_path)).strip()
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=30, check=False)
    assert "Perf Analyzer Version 2.51.0" in done.stderr
    bench("perf-analyzer", "--script", str(tmp_path))
    Path(script).write_text("#!/bin/sh\n")
    with pytest.raises(FileExistsError, match="is another perf_analyzer"):
        write_script(tmp_path)


def ensemble_payload(streaming: bool, tokens: int | None) -> dict[str, Any]:
    """What genai-perf 0.0.16 sends for service kind triton, backend tensorrtllm."""
    payload: dict[str, Any] = {
        "model": "ensemble",
        "text_input": ["a dozen words of a play about kings and their horses"],
        "max_tokens": [256],
        "exclude_input_in_output": [True],
    }
    if streaming:
        payload["stream"] = [True]
    if tokens is not None:
        payload |= {"min_length": [tokens], "max_tokens": [tokens]}
    return payload


def engine_payload(streaming: bool, tokens: int | None, **extra: Any) -> dict[str, Any]:
    """What genai-perf 0.0.16 sends for service kind tensorrtllm_engine, which it drives through the C API only."""
    ids = [1000 + 7 * index for index in range(12)]
    payload: dict[str, Any] = {
        "input_ids": {"content": ids, "shape": [len(ids)]},
        "input_lengths": [len(ids)],
        "request_output_len": [256],
    }
    if streaming:
        payload["streaming"] = [True]
    if tokens is not None:
        payload |= {"request_output_len": [tokens], "min_length": [tokens]}
    return payload | {name: [value] for name, value in extra.items()}


@pytest.mark.parametrize(
    "payload",
    [
        ensemble_payload(True, None),
        ensemble_payload(True, 6),
        ensemble_payload(False, 6),
        ensemble_payload(True, 6) | {"top_k": [1], "temperature": [0.5], "seed": [3]},
    ],
)
def test_genai_perf_s_ensemble_payloads(triton: Any, payload: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps({"data": [payload]}))
    shapes = ["--shape", "max_tokens:1", "--shape", "text_input:1", "--service-kind", "triton"]
    requests, _profile = analyze(
        triton, "ensemble", file, tmp_path / "p.json", *shapes, "--stability-percentage", "999"
    )
    expected = payload["text_input"][0] if "min_length" not in payload else None
    for request in requests:
        text = "".join(output.get("text_output", "") for output in request["response_outputs"])
        assert text == expected if expected else payload["text_input"][0].startswith(text) and text


@pytest.mark.parametrize(
    "payload",
    [
        engine_payload(True, None),
        engine_payload(True, 6),
        engine_payload(False, 6),
        engine_payload(True, 6, end_id=200002, runtime_top_k=1, temperature=0.5),
    ],
)
def test_genai_perf_s_engine_payloads(triton: Any, payload: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps({"data": [payload]}))
    requests, profile = analyze(triton, "tensorrt_llm", file, tmp_path / "p.json")
    [(_load, summary)] = read_profile(profile)
    echo = payload["input_lengths"][0] + 1  # with its end token
    assert summary.output_tokens == len(requests) * payload.get("min_length", [echo])[0]
