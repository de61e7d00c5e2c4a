"""Processes die and models come and go; clients get an error or their answer, and the server goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gptoss_trt.runtime.launch.parent_watch import PROGRAM
from gptoss_trt.runtime.launch.stub_watch import stubs_by_model

MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")


@pytest.fixture
def own(launch: Callable[..., Any]) -> Any:
    """A server that a test may harm."""
    triton = launch(models=MODELS)
    assert answers(triton, "tensorrt_llm")
    return triton


def engines(triton: Any) -> list[psutil.Process]:
    """The engine processes that serve this server's state folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = process.cmdline()
            if "gptoss_trt.runtime.engine.process" in line and any(str(triton.server.folder) in word for word in line):
                found.append(process)
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def watches(triton: Any) -> int:
    """How many processes watch over stubs for the death of this server."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = process.cmdline()
            found += str(PROGRAM) in line and str(triton.server.process.pid) in line
    return found


def stub_of(triton: Any, model: str) -> int:
    (pid,) = stubs_by_model(triton.server.process.pid)[model]
    return pid


def answers(triton: Any, model: str, timeout_s: float = 20.0) -> bool:
    if model == "tensorrt_llm":
        body = {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 5}
    else:
        body = {"text_input": "Hi", "max_tokens": 5}
    status, _ = triton.post(f"{model}/generate", body, timeout_s)
    return bool(status == 200)


def ends_with_an_error(call: Any) -> str:
    """The text of the error that ends a stream; fails if it ends well or hangs."""
    with pytest.raises(Exception) as caught:
        call.rest(10.0)
    call.close()
    return str(caught.value)


def test_models_loaded_in_parallel_share_one_engine(own: Any) -> None:
    assert all(answers(own, model) for model in MODELS)
    assert len(engines(own)) == 1


def test_an_engine_that_crashes_comes_back(own: Any, words: Any) -> None:
    (before,) = engines(own)
    bystander = own.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=2000, streaming=True))
    bystander.next()
    crash = own.open("tensorrt_llm", words.token_tensors(words.CRASHES, max_tokens=20, streaming=True))
    assert "the engine is not available" in ends_with_an_error(crash)
    assert "the engine is not available" in ends_with_an_error(bystander)
    words.wait_until(lambda: answers(own, "tensorrt_llm") and answers(own, "ensemble"), timeout_s=10.0, period_s=0.1)
    (after,) = engines(own)
    assert after.pid != before.pid
    assert own.is_ready()


def test_kill_9_of_the_engine(own: Any, words: Any) -> None:
    (engine,) = engines(own)
    calls = {
        "tensorrt_llm": own.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=2000, streaming=True)),
        "ensemble": own.open("ensemble", words.text_tensors(words.LONG_TEXT, max_tokens=2000, stream=True)),
    }
    for call in calls.values():
        call.next()
    engine.kill()
    for call in calls.values():
        assert "the engine is not available" in ends_with_an_error(call)
    words.wait_until(lambda: all(answers(own, model) for model in MODELS), timeout_s=10.0, period_s=0.1)


def test_kill_9_of_the_stub_that_started_the_engine(own: Any, words: Any) -> None:
    (engine,) = engines(own)
    starter = next(model for model in MODELS if stub_of(own, model) == engine.ppid())
    others = [model for model in MODELS if model != starter]
    os.kill(stub_of(own, starter), signal.SIGKILL)
    assert all(answers(own, model) for model in others), "the engine lives in a session of its own"
    assert [process.pid for process in engines(own)] == [engine.pid]
    own.server.control(starter, "unload")
    own.server.control(starter, "load")
    words.wait_until(lambda: answers(own, starter), timeout_s=10.0, period_s=0.1)


def test_kill_9_of_the_server(launch: Callable[..., Any], words: Any) -> None:
    """Nothing of it stays: not the stub whose interpreter waits for the dead server, nor the engine with it."""
    triton = launch(models=(*MODELS, "preprocessing"))
    assert answers(triton, "tensorrt_llm")
    left = psutil.Process(triton.server.process.pid).children(recursive=True)
    assert len(left) == 4 + 4 + 1 and len(engines(triton)) == 1, "stubs, their watches, the engine"
    triton.close()  # our own connection keeps the engine too
    triton.server.process.kill()
    triton.server.process.wait()
    words.wait_until(lambda: not any(map(alive, left)), timeout_s=20.0)
    triton.server.clean()
    state = triton.server.folder.parent
    again = launch(engine_dir=triton.server.options.engine_dir, models=("tensorrt_llm",))
    assert answers(again, "tensorrt_llm"), f"a server over the same engine directory, state left in {state}"


def test_unload_with_streams_open_ends_them(own: Any, words: Any) -> None:
    """The server waits for the streams that run, and no longer: unloading neither hangs nor cuts an answer."""
    calls = [
        own.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=200, streaming=True)) for _ in range(4)
    ]
    for call in calls:
        call.next()
    start = time.monotonic()
    own.server.control("tensorrt_llm", "unload", timeout_s=20.0)
    for call in calls:
        responses = call.rest(10.0)
        assert responses[-1]["finish_reason"].tolist() == [b"length"]
        call.close()
    assert time.monotonic() - start < 10.0
    assert not answers(own, "tensorrt_llm")
    assert answers(own, "ensemble")
    own.server.control("tensorrt_llm", "load", timeout_s=20.0)
    assert answers(own, "tensorrt_llm")


def test_reloading_while_clients_ask(own: Any) -> None:
    """Answers or clear errors, and all is well afterwards."""
    stop = threading.Event()
    good = [0]

    def ask() -> None:
        while not stop.is_set():
            good[0] += answers(own, "ensemble", 10.0)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        own.server.control("tensorrt_llm", "unload", timeout_s=20.0)
        own.server.control("tensorrt_llm", "load", timeout_s=20.0)
    stop.set()
    for thread in threads:
        thread.join(15.0)
    assert good[0] > 0
    assert all(answers(own, model) for model in MODELS)


def test_reloads_leave_nothing_behind(own: Any, words: Any) -> None:
    """Processes, shared memory, KV blocks and the server's own memory are after five reloads what they were after one;
    before each a stream is cancelled, and a tensor of a wrong type is sent, which 2.51 remembers with its model."""
    server = psutil.Process(own.server.process.pid)

    def reload() -> None:
        call = own.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=500, streaming=True))
        call.next()
        call.cancel()
        tensors = words.token_tensors((21, 22))
        assert "INT64" in own.refusal("tensorrt_llm", {**tensors, "input_ids": np.array([[1, 2]])}).message()
        own.server.control("tensorrt_llm", "unload", timeout_s=20.0)
        own.server.control("tensorrt_llm", "load", timeout_s=20.0)
        assert answers(own, "tensorrt_llm")

    def held() -> tuple[int, int, int, int, int]:
        stubs = sum(len(each) for each in stubs_by_model(server.pid).values())
        regions = len(list(Path("/dev/shm").glob(f"{own.server._shm_prefix}*")))
        return stubs, watches(own), regions, len(engines(own)), own.used_blocks()

    before = held()
    assert before[:2] == (len(MODELS), len(MODELS))
    reload()
    resident = server.memory_info().rss
    for _ in range(4):
        reload()
    words.wait_until(lambda: held() == before, timeout_s=30.0, period_s=0.2)
    assert server.memory_info().rss - resident < 32 << 20


def test_a_server_that_stops_lets_its_streams_finish(launch: Callable[..., Any], words: Any) -> None:
    triton = launch(models=("tensorrt_llm",))
    call = triton.open("tensorrt_llm", words.token_tensors(words.LONG, max_tokens=150, streaming=True))
    first, _ = call.next()
    stopping = threading.Thread(target=triton.server.stop, args=(10.0,))
    stopping.start()
    rest = call.rest(10.0)
    assert len(words.tokens_of([first, *rest])) == 150
    call.close()
    stopping.join(15.0)
    assert not stopping.is_alive()


def test_an_engine_that_cannot_load_says_why(launch: Callable[..., Any], words: Any, tmp_path: Path) -> None:
    engine = words.scripted_engine(tmp_path / "engine", load_error="the weights are missing")
    triton = launch(engine_dir=engine, models=("tensorrt_llm",))
    status, text = triton.post(
        "tensorrt_llm/generate", {"input_ids": [21], "input_lengths": 1, "request_output_len": 5}, 60.0
    )
    assert status >= 400
    assert "the weights are missing" in text
    assert triton.is_ready()
