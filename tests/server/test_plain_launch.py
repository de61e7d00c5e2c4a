"""The packaged repository under a plain `tritonserver --model-repository`, with the engine from the environment."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptoss_trt.runtime.launch.repository import packaged_repository
from gptoss_trt.runtime.launch.server_binary import assemble_backends, find_server, server_environment


@pytest.fixture
def plain(tmp_path: Path, words: Any) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    binary = find_server()
    http, grpc, metrics = words.free_ports(3)
    environment = {
        **server_environment(binary),
        "GPTOSS_TRT_ENGINE": str(words.scripted_engine(tmp_path / "engine")),
        "GPTOSS_TRT_STATE_DIR": str(tmp_path / "state"),
    }
    command = [
        str(binary.path), f"--model-repository={packaged_repository()}",
        f"--backend-directory={assemble_backends(binary, tmp_path / 'backends')}",
        "--http-address=127.0.0.1", f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
        "--metrics-address=127.0.0.1", f"--metrics-port={metrics}",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{http}", log, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_every_packaged_model_loads_and_answers(plain: Any, words: Any) -> None:
    url, log, process = plain

    def ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    words.wait_until(ready, timeout_s=90.0, period_s=0.2)
    bodies = {
        "tensorrt_llm": {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 5},
        "chat": {"request": json.dumps({"messages": [{"role": "user", "content": words.GREETING}]})},
        **{name: {"text_input": "Hi", "max_tokens": 5} for name in ("ensemble", "tensorrt_llm_bls", "pipeline")},
        "completions": {"request": json.dumps({"prompt": "Hi"})},
    }
    for model, body in bodies.items():
        request = urllib.request.Request(f"{url}/v2/models/{model}/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read())["model_name"] == model
