"""Chat on a real server over a scripted engine that speaks Harmony: the clients, the command, the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.client.bench.perf_analyzer import command
from gptoss_trt.client.bench.profile import read_profile
from gptoss_trt.client.connect import connect
from gptoss_trt.client.errors import ServerError
from gptoss_trt.runtime.harmony import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "perf"
PLAIN = (
    "<|channel|>analysis<|message|>Simple sum.<|end|><|start|>assistant<|channel|>final<|message|>It is 4. 🙂<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Need data.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
TRANSPORTS = ("grpc", "http")


@pytest.fixture(scope="module")
def plain(launch: Callable[..., Any]) -> Any:
    """A server whose engine answers every prompt with PLAIN."""
    ids = list(Tokenizer.load().encode(PLAIN))
    return launch(script={"default": {"tokens": ids}, "scripts": []}, models=("chat", "tensorrt_llm", "ensemble"))


@pytest.fixture(scope="module")
def calling(launch: Callable[..., Any]) -> Any:
    """A server whose engine answers every prompt with CALL."""
    ids = list(Tokenizer.load().encode(CALL))
    return launch(script={"default": {"tokens": ids}, "scripts": []}, models=("chat",))


def url_of(triton: Any, transport: str) -> str:
    return str(triton.server.http_url if transport == "http" else triton.server.grpc_url)


def run(arguments: list[str], lines: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gptoss_trt", *arguments]
    return subprocess.run(line, input=lines, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_chat_whole_and_streamed(plain: Any, transport: str) -> None:
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "2 + 2?"}]}
    with connect(url_of(plain, transport)) as client:
        message = client.chat(body)
        assert (message["content"], message["reasoning_content"]) == ("It is 4. 🙂", "Simple sum.")
        chunks = list(client.stream_chat(body))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4. 🙂"
    assert len(chunks) > 5
    assert chunks[-1]["usage"]["completion_tokens"] == len(Tokenizer.load().encode(PLAIN))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_names_the_parameter(plain: Any, transport: str, streamed: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temprature": 1}
    with connect(url_of(plain, transport)) as client, pytest.raises(ServerError) as caught:
        list(client.stream_chat(body)) if streamed else client.chat(body)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert caught.value.message.startswith("unknown parameter 'temprature'")
    assert caught.value.detail is not None
    assert caught.value.detail["param"] == "temprature"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_chat_command(plain: Any, transport: str) -> None:
    done = run(["chat", "--url", url_of(plain, transport), "--show-reasoning"], "2 + 2?\nAgain?\n")
    assert (done.stdout, done.stderr, done.returncode) == ("reasoning: Simple sum.\nIt is 4. 🙂\n" * 2, "", 0)


def test_the_chat_command_s_tool_loop(calling: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    options = ["chat", "--url", calling.server.grpc_url, "--tools", str(tools), "--json"]
    done = run(options, 'Weather in Oslo?\n{"rain": true}\nForget it.\n')
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    calls = [event for event in events if event["event"] == "tool_call"]
    arguments = "".join(event["text"] for event in events if event["event"] == "tool_arguments")
    assert [call["name"] for call in calls] == ["get_weather"] * 3
    assert arguments == '{"city": "Oslo"}' * 3
    assert [event["reason"] for event in events if event["event"] == "finish"] == ["tool_calls"] * 3


def test_raw_prompts(plain: Any) -> None:
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    done = run(["chat", "--url", plain.server.grpc_url, "--raw"], prompt + "\n")
    assert (done.stdout, done.returncode) == ("analysisSimple sum.assistantfinalIt is 4. 🙂\n", 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bench_serve_counts_by_usage(plain: Any, transport: str) -> None:
    options = ["--model", "chat", "--concurrency", "2", "--requests", "6", "--input-tokens", "12", "--json"]
    done = run(["bench", "serve", "--url", url_of(plain, transport), *options])
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["requests"], line["errors"], line["finish_reasons"]) == (6, {}, {"stop": 6})
    assert line["output_tokens"] == 6 * len(Tokenizer.load().encode(PLAIN))
    assert line["input_tokens"] > 6 * 12


def test_perf_analyzer_on_chat(plain: Any, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    arguments = ["-m", "chat", "-i", "grpc", "-u", plain.server.grpc_url, "--async", "--streaming"]
    arguments += ["--input-data", str(DATA / "chat.json"), "--request-count", "6", "--concurrency-range", "2"]
    line, environment = command([*arguments, "--profile-export-file", str(profile)])
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [(_load, summary)] = read_profile(profile)
    # The shipped file asks for 8 tokens; the scripted answer is cut there.
    assert summary.errors == {}
    assert summary.output_tokens == 8 * summary.requests
