"""`gptoss-trt serve` as its users start it: ready by a real answer, closed by default, drained, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from gptoss_trt.client.connect import connect
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.launch.stub_watch import POLL_S, stubs_by_model

WORDS = "Count the sheep"
ENGINE = {
    "step_ms": 5,
    "max_context": 100_000,
    "full_blocks": 2048,
    "block_tokens": 64,
    "default": {"echo": True},
    "scripts": [
        {"match": [1, 2, 3, 4], "tokens": [11, 12, 13, 14], "cycle": True},
        {"match": Tokenizer.load().encode_ordinary(WORDS), "tokens": [11, 12, 13, 14], "cycle": True},
    ],
}
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


class Serve:
    """A `gptoss-trt serve` process and its announcement."""

    def __init__(self, folder: Path, *options: str) -> None:
        engine = folder / "engine"
        engine.mkdir(exist_ok=True)
        (engine / "scripted.json").write_text(json.dumps(ENGINE), encoding="utf-8")
        command = [sys.executable, "-m", "gptoss_trt", "serve", str(engine), "--json", *FREE_PORTS]
        models = () if "--openai-port" in options else ("--model", "tensorrt_llm", "--model", "ensemble")
        command += [*models, "--state-dir", str(folder / "state"), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def announcement(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> tuple[int, str]:
        """Exit status and stderr after a signal."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for one server; what it leaves in /dev/shm fails the test."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    yield tmp_path
    prefix = next(iter((tmp_path / "state").glob("server-*/shm-prefix")), None)
    assert prefix is None, f"{prefix} still names shared memory"
    ours = f"gptoss_{os.getpid()}"
    assert not [name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if name.startswith(ours)]


def stream(url: str, max_tokens: int, into: list[Any]) -> threading.Thread:
    """Reads an endless answer in a thread; each event goes to `into`, what ends it as a string."""
    body = {"input_ids": [1, 2, 3, 4], "input_lengths": 4, "request_output_len": max_tokens, "streaming": True}

    def read() -> None:
        request = urllib.request.Request(f"{url}/v2/models/tensorrt_llm/generate_stream", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                into.extend(json.loads(line[5:]) for line in answer if line.startswith(b"data:"))
        except OSError as error:
            into.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def status_of(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {}), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_is_closed_by_default_and_ends_cleanly(folder: Path) -> None:
    serve = Serve(folder)
    told = serve.announcement()
    assert told["http"].startswith("http://127.0.0.1:") and told["ready_s"] > 0
    state = Path(told["state"])
    assert state.stat().st_mode & 0o777 == 0o700
    key = (state / "admin.key").read_text()
    assert (state / "admin.key").stat().st_mode & 0o077 == 0
    for path, body in (("repository/index", b"{}"), ("logging", None), ("trace/setting", None),
                       ("systemsharedmemory/status", None)):  # fmt: skip
        url = f"{told['http']}/v2/{path}"
        assert status_of(url, body) == 403, path
        assert status_of(url, body, {"gptoss-admin-key": key}) == 200, path
        assert status_of(url, body, {"gptoss-admin-key": key + "x"}) == 403, path
    assert serve.end() == (0, NO_API + serve_drain_line(30))


NO_API = "no OpenAI API: it needs the streaming models chat and completions\n"


def serve_drain_line(seconds: int) -> str:
    return f"draining for at most {seconds} s; a second signal ends at once\n"


def test_sigterm_lets_a_stream_finish(folder: Path) -> None:
    serve = Serve(folder)
    events: list[Any] = []
    thread = stream(serve.announcement()["http"], 400, events)  # 2 s at 5 ms a step
    time.sleep(0.5)
    status, _ = serve.end()
    thread.join(20)
    assert status == 0
    # /generate_stream writes a tensor of one element as a number, without its list.
    ids = [event["output_ids"] for event in events if isinstance(event, dict)]
    assert sum(len(each) if isinstance(each, list) else 1 for each in ids) >= 400
    assert isinstance(events[-1], dict)
    assert events[-1]["finish_reason"] == "length"


def test_a_terminal_that_closes_drains_unless_under_nohup(folder: Path) -> None:
    serve = _served_with(signal.SIG_DFL, folder)  # the tests themselves may run under nohup
    serve.announcement()
    assert serve.end(signal.SIGHUP)[0] == 0
    serve = _served_with(signal.SIG_IGN, folder)
    url = serve.announcement()["http"]
    serve.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert status_of(f"{url}/v2/health/live") == 200
    assert serve.end()[0] == 0


def _served_with(hangup: signal.Handlers, folder: Path) -> Serve:
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        return Serve(folder)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_outlasts_the_drain_is_cancelled(folder: Path) -> None:
    serve = Serve(folder, "--drain-seconds", "1")
    events: list[Any] = []
    thread = stream(serve.announcement()["http"], 50_000, events)
    time.sleep(0.5)
    start = time.monotonic()
    status, _ = serve.end()
    assert status == 0
    assert time.monotonic() - start < 12
    thread.join(20)
    assert not thread.is_alive()


def test_a_refused_tensor_does_not_hold_up_the_drain(folder: Path) -> None:
    """tritonserver 2.51 keeps a gRPC stream's request that it refused itself, and with it the model."""
    serve = Serve(folder, "--drain-seconds", "90")
    errors: list[Any] = []
    client = grpcclient.InferenceServerClient(serve.announcement()["grpc"])
    client.start_stream(lambda result, error: errors.append(error))
    tensors = {"input_ids": np.int64, "input_lengths": np.int32, "request_output_len": np.int32}
    inputs = []
    for name, kind in tensors.items():
        inputs.append(grpcclient.InferInput(name, [1, 1], np_to_triton_dtype(kind)))
        inputs[-1].set_data_from_numpy(np.ones((1, 1), dtype=kind))
    client.async_stream_infer("tensorrt_llm", inputs)
    client.stop_stream()
    client.close()
    assert "INT64" in errors[0].message()
    start = time.monotonic()
    assert serve.end()[0] == 0
    assert time.monotonic() - start < 30


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    serve = Serve(folder, "--drain-seconds", "60")
    events: list[Any] = []
    thread = stream(serve.announcement()["http"], 50_000, events)
    time.sleep(0.5)
    serve.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    start = time.monotonic()
    status, _ = serve.end(signal.SIGINT)
    assert status == 0
    assert time.monotonic() - start < 12
    thread.join(20)


def test_a_signal_while_starting_ends_it(folder: Path) -> None:
    serve = Serve(folder)
    deadline = time.monotonic() + 30
    while not list((folder / "state").glob("server-*/shm-prefix")) and time.monotonic() < deadline:
        time.sleep(0.05)
    status, errors = serve.end()
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM while starting" in errors


def test_a_taken_port_is_named(folder: Path) -> None:
    serve = Serve(folder)
    port = serve.announcement()["http"].rsplit(":", 1)[1]
    second = Serve(folder, "--http-port", port)
    _, errors = second.process.communicate(timeout=60)
    assert second.process.returncode == 1
    assert f"cannot listen on HTTP port {port} of 127.0.0.1: Address already in use" in errors
    assert serve.end()[0] == 0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("address", "bound"), [("::1", "[::1]"), ("localhost", "127.0.0.1")])
def test_every_listener_binds_the_address(folder: Path, address: str, bound: str) -> None:
    """An address of IPv6, and a name: tritonserver alone would listen nowhere and say that it does."""
    serve = Serve(folder, "--openai-port", "0", "--address", address)
    if address == "::1" and not has_ipv6():  # then that is said
        assert "port 0 of ::1" in serve.process.communicate(timeout=60)[1]
        return
    told = serve.announcement()
    for url in (f"{told['http']}/v2/health/ready", told["metrics"], f"{told['openai']}/models"):
        assert url.startswith(f"http://{bound}:")
        assert status_of(url) == 200, url
    assert told["grpc"].startswith(f"{bound}:")
    with connect(told["grpc"]) as client:
        client.wait_ready(["chat"])
    with urllib.request.urlopen(told["openai"].removesuffix("/v1") + "/metrics", timeout=20) as answer:
        assert b"nv_inference_request_success" in answer.read(), "the gateway reaches the server's metrics"
    elsewhere = "127.0.0.1" if bound == "[::1]" else "[::1]"
    for url in (told["http"], told["metrics"], told["openai"]):
        with pytest.raises(OSError):
            status_of(url.replace(bound, elsewhere))
    assert serve.end() == (0, serve_drain_line(30)), "no warning of exposure"


def test_no_engine_is_a_plain_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gptoss_trt",
        "serve",
        str(tmp_path),
        "--state-dir",
        str(tmp_path / "s"),
        *FREE_PORTS,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "is not an engine directory: manifest.json is missing" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_openai_gateway_starts_heals_and_ends_with_the_server(folder: Path) -> None:
    serve = Serve(folder, "--openai-port", "0", "--served-model-name", "gpt-oss-20b")
    url = serve.announcement()["openai"]
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
    with urllib.request.urlopen(f"{url}/models", timeout=20) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["gpt-oss-20b"]
    children = psutil.Process(serve.process.pid).children()
    (gateway,) = [child for child in children if "gptoss_trt.runtime.openai.gateway" in child.cmdline()]
    gateway.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if status_of(f"{url}/models") == 200:
                break
        except OSError:
            time.sleep(0.2)
    assert status_of(f"{url}/models") == 200
    assert serve.end()[0] == 0
    with pytest.raises(OSError):
        status_of(f"{url}/models")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stub_that_dies_fails_the_streams_of_the_gateway(folder: Path, workers: str) -> None:
    """Triton tells nobody that a stub died: the launcher does, and the API answers again when the model is back."""
    serve = Serve(
        folder, "--openai-port", "0", "--api-workers", workers, "--drain-seconds", "3"
    )  # the lost stream never ends
    told = serve.announcement()
    body = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 50_000, "stream": True}
    with httpx.Client(base_url=told["openai"].removesuffix("/v1"), timeout=20) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            server = next(p for p in psutil.Process(serve.process.pid).children() if p.name() == "tritonserver")
            (stub,) = stubs_by_model(server.pid)["chat"]
            os.kill(stub, signal.SIGKILL)
            *_, error, done = list(lines)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"
        short = {**body, "max_tokens": 4, "stream": False}
        deadline = time.monotonic() + 20
        try:
            while (status := client.post("/v1/chat/completions", json=short).status_code) != 200:
                assert time.monotonic() < deadline, status
                time.sleep(0.2)
        except httpx.TransportError as error:
            pytest.fail(f"{error}; the launcher ended with {serve.end()}")
    assert serve.end()[0] == 0


def test_what_an_administrator_unloads_or_reloads_is_left_alone(folder: Path) -> None:
    serve = Serve(folder, "--drain-seconds", "1")
    told = serve.announcement()
    url, key = told["http"], {"gptoss-admin-key": (Path(told["state"]) / "admin.key").read_text()}
    server = next(p for p in psutil.Process(serve.process.pid).children() if p.name() == "tritonserver")

    def control(model: str, action: str) -> None:
        assert status_of(f"{url}/v2/repository/models/{model}/{action}", b"{}", key) == 200

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    control("ensemble", "unload")
    until(lambda: "ensemble" not in stubs_by_model(server.pid))
    time.sleep(4 * POLL_S)
    assert status_of(f"{url}/v2/models/ensemble/ready") != 200, "the launcher has loaded it again"
    seen: list[Any] = []
    reader = stream(url, 50_000, seen)
    until(lambda: bool(seen))
    (old,) = stubs_by_model(server.pid)["tensorrt_llm"]
    control("tensorrt_llm", "unload")
    control("tensorrt_llm", "load")
    (fresh,) = stubs_by_model(server.pid)["tensorrt_llm"] - {old}
    os.kill(fresh, signal.SIGKILL)  # while the old one still serves its stream
    until(lambda: bool(stubs_by_model(server.pid)["tensorrt_llm"] - {old, fresh}))
    assert psutil.pid_exists(old)
    status, errors = serve.end()
    reader.join(20)
    assert status == 0 and errors.count("died: reloading it") == 1, errors


@pytest.mark.parametrize("options", [(), ("--openai-port", "0"), ("--openai-port", "0", "--api-workers", "2")])
def test_a_killed_launcher_leaves_no_server_and_no_gateway(folder: Path, options: tuple[str, ...]) -> None:
    serve = Serve(folder, *options)
    found = serve.announcement()
    children = psutil.Process(serve.process.pid).children()
    assert len(children) == (2 if options else 1)
    serve.process.kill()
    serve.process.wait()
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left
    for url in [f"{found['http']}/v2/health/live", *([f"{found['openai']}/models"] if options else [])]:
        with pytest.raises(OSError):
            status_of(url)
    for record in (folder / "state").glob("server-*/shm-prefix"):  # the next launcher of the folder sweeps this
        for region in Path("/dev/shm").glob(f"{record.read_text()}*"):
            region.unlink()
        record.unlink()


@pytest.mark.parametrize(
    "option",
    [
        ("--http-port", "99999"),
        ("--drain-seconds", "-5"),
        ("--drain-seconds", "nan"),
        ("--model", "ensembel"),
        ("--address", "no.such.host.invalid"),
        ("--address", "fe80::1%lo"),
    ],
)
def test_an_impossible_option_is_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    (tmp_path / "scripted.json").write_text("{}")
    command = [sys.executable, "-m", "gptoss_trt", "serve", str(tmp_path), "--state-dir", str(tmp_path / "s"), *option]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode in (1, 2)
    assert option[1] in result.stderr
    assert "Traceback" not in result.stderr
