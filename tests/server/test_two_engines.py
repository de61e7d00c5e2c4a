"""Two models over two engines in one server, two instances of one of them: folders of the repository under suffixes."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from gptoss_trt.runtime.launch.repository import packaged_repository
from gptoss_trt.runtime.launch.server_binary import assemble_backends, find_server, server_environment
from gptoss_trt.runtime.triton_models.pbtxt import config_text

TOKENS = {"_first": [101, 102, 103], "_second": [201, 202, 203]}
INSTANCES = {"_first": 2, "_second": 1}


def repository(folder: Path, words: Any) -> Path:
    """`tensorrt_llm` once for each engine, under its suffix."""
    for suffix, tokens in TOKENS.items():
        engine = words.scripted_engine(
            folder / f"engine{suffix}", default={"tokens": tokens, "cycle": True}, scripts=[]
        )
        model = folder / "models" / f"tensorrt_llm{suffix}"
        shutil.copytree(packaged_repository() / "tensorrt_llm", model, ignore=shutil.ignore_patterns("__pycache__"))
        parameters = {"engine_dir": str(engine)}
        text = config_text("tensorrt_llm", parameters, suffix=suffix, instances=INSTANCES[suffix])
        (model / "config.pbtxt").write_text(text, encoding="utf-8")
    return folder / "models"


@pytest.fixture
def server(tmp_path: Path, words: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    binary = find_server()
    http, grpc, metrics = words.free_ports(3)
    command = [
        str(binary.path), f"--model-repository={repository(tmp_path, words)}",
        f"--backend-directory={assemble_backends(binary, tmp_path / 'backends')}",
        "--http-address=127.0.0.1", f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
        "--metrics-address=127.0.0.1", f"--metrics-port={metrics}",
    ]  # fmt: skip
    environment = {**server_environment(binary), "GPTOSS_TRT_STATE_DIR": str(tmp_path / "state")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{http}"

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    try:
        words.wait_until(ready, timeout_s=60.0, period_s=0.2)
        yield url, process
    finally:
        process.terminate()
        process.wait(20)


def test_each_model_answers_from_its_own_engine(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = server

    def ask(suffix: str) -> list[int]:
        body = {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 60, "exclude_input_in_output": True}
        where = f"{url}/v2/models/tensorrt_llm{suffix}/generate"
        with urllib.request.urlopen(urllib.request.Request(where, json.dumps(body).encode()), timeout=30) as answer:
            ids: list[int] = json.loads(answer.read())["output_ids"]
            return ids

    suffixes = ["_first", "_second"] * 8
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, suffixes))
    assert answers == [TOKENS[suffix] * 20 for suffix in suffixes]
    children = psutil.Process(process.pid).children(recursive=True)
    lines = [" ".join(child.cmdline()) for child in children]
    stubs = [line for line in lines if "triton_python_backend_stub" in line]
    assert sum("tensorrt_llm_first" in line for line in stubs) == 2
    assert sum("tensorrt_llm_second" in line for line in stubs) == 1
    engines = [line for line in lines if "gptoss_trt.runtime.engine.process" in line]
    assert len(engines) == 2, "one process an engine, however many instances share it"
