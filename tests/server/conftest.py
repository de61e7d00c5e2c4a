"""One real tritonserver over a scripted engine for the whole tier, and what its tests say to it."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, start_server

LONG_TEXT = "Go on for ever"  # a prompt with this text is answered like LONG
LONG = (1, 2, 3, 4)  # a prompt with these ids is answered with 11, 12, ... 18 for ever
FAILS = (1, 2, 3, 5)  # ... with an error after three tokens
CRASHES = (1, 2, 3, 6)  # ... with the death of the engine after three tokens
CHUNKS = (1, 2, 3, 7)  # ... in chunks of 1, 3 and 2 tokens a step
REFUSED = (1, 2, 3, 8)
HANGS = (1, 2, 3, 9)  # ... with a step that never ends after three tokens
CYCLE = tuple(range(11, 19))
GREETING = "Say hello"  # a prompt with this text is answered with reasoning and then content
CALLS_TOOL = "What is the weather"
BREAKS = "Break in the middle"  # ... with an error after some content
ANALYSIS = "The user wants a greeting."
CONTENT = "Hello 🙂, how are you?"
ARGUMENTS = '{"city": "Paris"}'
HELLO = f"<|channel|>analysis<|message|>{ANALYSIS}<|end|><|start|>assistant<|channel|>final<|message|>{CONTENT}"
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
encode = Tokenizer.load().encode
STEP_MS = 5.0
SCRIPTED: dict[str, Any] = {
    "step_ms": STEP_MS,
    "max_context": 4096,
    "full_blocks": 8192,
    "block_tokens": 64,
    "default": {"echo": True},
    "scripts": [
        {"match": LONG, "tokens": CYCLE, "cycle": True},
        {"match": encode(LONG_TEXT), "tokens": CYCLE, "cycle": True},
        {"match": encode(GREETING), "tokens": encode(HELLO)},
        {"match": encode(CALLS_TOOL), "tokens": [*encode(CALL), 200012, *CYCLE], "end": []},
        {
            "match": encode(BREAKS),
            "tokens": encode(HELLO),
            "fault": {"kind": "error", "after": 18, "message": "it broke"},
        },
        {"match": FAILS, "tokens": CYCLE, "cycle": True, "fault": {"kind": "error", "after": 3, "message": "it broke"}},
        {"match": CRASHES, "tokens": CYCLE, "cycle": True, "fault": {"kind": "crash", "after": 3}},
        {"match": HANGS, "tokens": CYCLE, "cycle": True, "fault": {"kind": "hang", "after": 3}},
        {"match": CHUNKS, "tokens": CYCLE, "cycle": True, "chunk": [1, 3, 2]},
        {
            "match": REFUSED,
            "tokens": CYCLE,
            "fault": {"kind": "refuse", "code": "RESOURCE_EXHAUSTED", "message": "full"},
        },
    ],
}
Tensors = dict[str, np.ndarray]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)


class Call:
    """One request on a gRPC stream of its own.

    Errors come in band. The header triton_grpc_error, which makes them gRPC statuses, is not used: with it,
    tritonserver 2.51 dies of signal 11 when a client cancels while its error is on the way.
    """

    def __init__(self, url: str, model: str, tensors: Tensors, request_id: str, outputs: list[str] | None) -> None:
        self._results: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self.arrived: list[float] = []
        self.client = grpcclient.InferenceServerClient(url)
        self.client.start_stream(self._on_result)
        self.send(model, tensors, request_id, outputs)

    def send(self, model: str, tensors: Tensors, request_id: str = "", outputs: list[str] | None = None) -> None:
        wanted = None if outputs is None else [grpcclient.InferRequestedOutput(name) for name in outputs]
        self.client.async_stream_infer(
            model, infer_inputs(tensors), request_id=request_id, outputs=wanted, enable_empty_final_response=True
        )

    def _on_result(self, result: Any, error: Exception | None) -> None:
        self.arrived.append(time.monotonic())
        self._results.put((result, error))

    def next(self, timeout_s: float = 20.0) -> tuple[Tensors, bool]:
        """The next response's outputs and whether it is the last. Raises the server's error."""
        result, error = self._results.get(timeout=timeout_s)
        if error is not None:
            raise error
        reply = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in reply.outputs}
        return outputs, reply.parameters["triton_final_response"].bool_param

    def rest(self, timeout_s: float = 20.0) -> list[Tensors]:
        """All responses up to the last one, without an empty last one."""
        responses = []
        final = False
        while not final:
            outputs, final = self.next(timeout_s)
            if outputs:
                responses.append(outputs)
        return responses

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def close(self) -> None:
        """Ends the stream. A client that is left to the garbage collector can deadlock the whole test process."""
        self.client.stop_stream()
        self.client.close()


def infer_inputs(tensors: Tensors) -> list[Any]:
    inputs = []
    for name, array in tensors.items():
        tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Triton:
    """What a test says to a server."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.engine = EngineClient(server.options.engine_dir, state_dir=server.folder, start=False)

    def open(self, model: str, tensors: Tensors, request_id: str = "", outputs: list[str] | None = None) -> Call:
        return Call(self.server.grpc_url, model, tensors, request_id, outputs)

    def ask(
        self, model: str, tensors: Tensors, request_id: str = "", outputs: list[str] | None = None
    ) -> list[Tensors]:
        """All responses to one request."""
        call = self.open(model, tensors, request_id, outputs)
        try:
            return call.rest()
        finally:
            call.close()

    def refusal(self, model: str, tensors: Tensors) -> InferenceServerException:
        """The error that the request must be answered with, as its only response."""
        call = self.open(model, tensors)
        try:
            with pytest.raises(InferenceServerException) as caught:
                call.rest()
            return caught.value
        finally:
            call.close()

    def post(self, path: str, body: Any, timeout_s: float = 20.0) -> tuple[int, str]:
        """Status and text of an HTTP POST to /v2/models/`path`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.http_url}/v2/models/{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def used_blocks(self) -> int:
        return int(self.engine.stats()["kv"]["full"]["used"])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.server.http_url}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def close(self) -> None:
        self.engine.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0, period_s: float = 0.005) -> float:
    """Seconds until `condition` held. Fails after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not so within {timeout_s} s"
        time.sleep(period_s)
    return time.monotonic() - start


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def scripted_engine(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scripted.json").write_text(json.dumps({**SCRIPTED, **changes}), encoding="utf-8")
    return folder


def token_tensors(*prompts: tuple[int, ...], max_tokens: int = 8, **more: Any) -> Tensors:
    """Inputs of `tensorrt_llm` for prompts of equal length. Extra values are repeated for each prompt."""
    count = len(prompts)
    tensors = {
        "input_ids": np.array(prompts, dtype=np.int32),
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], dtype=np.int32),
        "request_output_len": np.full((count, 1), max_tokens, dtype=np.int32),
    }
    return {**tensors, **scalars(count, **more)}


def text_tensors(*prompts: str, max_tokens: int = 32, **more: Any) -> Tensors:
    """Inputs of the text models. A list of strings is a word list."""
    count = len(prompts)
    tensors = {
        "text_input": np.array([[prompt.encode()] for prompt in prompts], dtype=np.object_),
        "max_tokens": np.full((count, 1), max_tokens, dtype=np.int32),
    }
    return {**tensors, **scalars(count, **more)}


def scalars(count: int, **values: Any) -> Tensors:
    """[count, 1] arrays: bool, INT32 (seed UINT64), FP32, strings; lists as [count, n]; arrays as they are."""
    return {name: _array(count, name, value) for name, value in values.items()}


def _array(count: int, name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    row = list(value) if isinstance(value, list) else [value]
    if isinstance(row[0], str):
        return np.array([[text.encode() for text in row]] * count, dtype=np.object_)
    kind = {bool: np.bool_, int: np.uint64 if name == "seed" else np.int32, float: np.float32}[type(row[0])]
    return np.array([row] * count, dtype=kind)


def tokens_of(responses: list[Tensors], sequence: int = 0, batch: int = 0) -> list[int]:
    """The token ids of one sequence over all its responses."""
    ids: list[int] = []
    for response in responses:
        if response["sequence_index"][0, 0] == sequence and response["batch_index"][0, 0] == batch:
            ids += response["output_ids"][0, 0].tolist()
    return ids


def json_tensors(body: Any, stream: bool | None = None) -> Tensors:
    """Inputs of `chat` and `completions`."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    tensors = {"request": np.array([text], dtype=np.object_)}
    return tensors if stream is None else {**tensors, "stream": np.array([stream])}


def objects_of(responses: list[Tensors]) -> list[dict[str, Any]]:
    """The JSON objects of `chat` and `completions` responses, in order."""
    return [json.loads(text) for response in responses for text in response["response"]]


def text_of(responses: list[Tensors]) -> str:
    return b"".join(response["text_output"][0] for response in responses).decode()


class Words:
    """The functions above, for tests, which cannot import a conftest."""

    LONG_TEXT, GREETING, CALLS_TOOL, BREAKS = LONG_TEXT, GREETING, CALLS_TOOL, BREAKS
    ANALYSIS, CONTENT, ARGUMENTS = ANALYSIS, CONTENT, ARGUMENTS
    LONG, FAILS, CRASHES, HANGS, CHUNKS, REFUSED = LONG, FAILS, CRASHES, HANGS, CHUNKS, REFUSED
    CYCLE, STEP_MS = CYCLE, STEP_MS
    Triton = Triton
    token_tensors = staticmethod(token_tensors)
    text_tensors = staticmethod(text_tensors)
    scalars = staticmethod(scalars)
    tokens_of = staticmethod(tokens_of)
    text_of = staticmethod(text_of)
    json_tensors = staticmethod(json_tensors)
    objects_of = staticmethod(objects_of)
    wait_until = staticmethod(wait_until)
    infer_inputs = staticmethod(infer_inputs)
    scripted_engine = staticmethod(scripted_engine)
    free_ports = staticmethod(free_ports)


@pytest.fixture(scope="session")
def words() -> type[Words]:
    return Words


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Triton]]:
    """Starts a server of its own over a scripted engine (or `engine_dir`); all are stopped at the end."""
    started: list[Triton] = []

    def start(engine_dir: Path | None = None, **options: Any) -> Triton:
        folder = tmp_path_factory.mktemp("server")
        engine = engine_dir or scripted_engine(folder / "engine", **options.pop("script", {}))
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        triton = Triton(start_server(ServerOptions(engine, state_dir=folder / "state", **ports, **options)))
        started.append(triton)
        return triton

    yield start
    for triton in started:
        triton.close()
    running = [triton.server for triton in started if triton.server.process.poll() is None]
    stops = [threading.Thread(target=server.stop, args=(3.0,)) for server in running]
    for stop in stops:
        stop.start()
    for stop in stops:
        stop.join()


@pytest.fixture(scope="session")
def triton(launch: Callable[..., Triton]) -> Triton:
    """The tier's server, over a scripted engine with steps of 5 ms."""
    return launch()
