"""The wire: HTTP bodies and gRPC messages, damaged, sent to a real tritonserver over a scripted engine.

Invariant: every request ends within the limit with an answer or an error of the caller's kind; an INTERNAL error, a
traceback or a server that no longer answers is a fault. Must not know how a model reads its inputs.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import mutate
from local_targets import BODIES
from target import FaultError
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_trt.client.requests import Call, text_values, token_values
from gptoss_trt.client.tensors import encode_request
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, start_server

ANSWER_S = 15.0
DEATH_S = 3.0  # from a broken connection to the end of the process
GOOD_EVERY = 20  # cases between two looks whether a good request is answered
SCRIPT = {"step_ms": 1.0, "max_context": 4096, "full_blocks": 8192, "block_tokens": 64, "default": {"echo": True}}
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "chat", "completions", "preprocessing", "postprocessing")
GENERATE: dict[str, Any] = {
    "tensorrt_llm": {"input_ids": [21, 22], "input_lengths": 2, "request_output_len": 5, "temperature": 0.5},
    "ensemble": {"text_input": "hello", "max_tokens": 5, "top_p": 0.5, "stop_words": ["x"], "stream": False},
    "tensorrt_llm_bls": {"text_input": "hello", "max_tokens": 5},
}
CALLS = (
    Call("tensorrt_llm", token_values((21, 22, 23), 5, stream=True, stop_sequences=((5, 6),)), "fuzz"),
    Call("ensemble", text_values("hello", 5, stream=True, stop_words=("x",)), "fuzz"),
    Call("chat", {"request": json.dumps(BODIES["chat"]), "stream": True}, "fuzz"),
    Call("completions", {"request": json.dumps(BODIES["completions"]), "stream": False}, "fuzz"),
)
CARELESS = re.compile(
    r"Traceback|object has no attribute|unsupported operand|NoneType|not subscriptable|KeyError|IndexError|"
    r"list index|unexpected keyword|\binternal error\b|: cannot reshape|could not be started|"
    r"(chat|completions|ensemble|_llm|_bls|processing) failed: ",
    re.IGNORECASE,
)


BROKEN = re.compile(r"socket closed|failed to connect|connection re|recvmsg|broken pipe|goaway", re.IGNORECASE)
# What tritonserver answers with status 500 before a model sees the request.
TRITONS_OWN = re.compile(
    r"failed to parse the request JSON|Unable to parse|attempt to access (JSON )?non-|parameter key", re.IGNORECASE
)


class BrokenConnectionError(Exception):
    """The connection ended without an answer."""


class Wire:
    """A server that gets damaged requests. `close` stops it."""

    name = "wire"
    allowed: tuple[type[BaseException], ...] = ()

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._engine = Path(self._folder.name) / "engine"
        self._engine.mkdir()
        (self._engine / "scripted.json").write_text(json.dumps(SCRIPT), encoding="utf-8")
        self._cases = 0
        self._start()

    def _start(self) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        state = Path(self._folder.name) / "state"
        self.server: TritonServer = start_server(ServerOptions(self._engine, state_dir=state, models=MODELS, **ports))
        self._http = httpx.Client(base_url=self.server.http_url, timeout=ANSWER_S)
        self._channel = grpc.insecure_channel(self.server.grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _stop(self) -> None:
        self._http.close()
        self._channel.close()
        self.server.stop(drain_s=2.0)

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def case(self, generator: random.Random) -> tuple[str, Callable[[], Any]]:
        if generator.random() < 0.5:
            model, body = _http_body(generator)
            route = generator.choice(("generate", "generate_stream"))
            return f"POST {model}/{route} {body!r}", lambda: self._checked(lambda: self._post(model, route, body))
        request = _grpc_message(generator)
        return f"{request.model_name} {_described(request)}", lambda: self._checked(lambda: self._infer(request))

    def _checked(self, send: Callable[[], None]) -> None:
        """Sends, and looks after the server, which is started anew when a request has ended it."""
        try:
            send()
            self._cases += 1
            if self._cases % GOOD_EVERY == 0:
                self._ask_well()
        except BrokenConnectionError as error:
            if self._has_died():
                text = f"the server died with status {self.server.process.returncode}; {self.server.log_tail(3)}"  # type: ignore[union-attr]
                self._stop()
                self._start()
                raise FaultError(text) from error
            raise FaultError(str(error)) from error

    def _ask_well(self) -> None:
        try:
            good = self._http.post("/v2/models/ensemble/generate", json=GENERATE["ensemble"])
        except httpx.HTTPError as error:
            raise BrokenConnectionError(f"a good request got no answer: {error}") from error
        if good.status_code != 200 or good.json()["text_output"] != "hellohello":  # the prompt, and its echo
            raise FaultError(f"a good request got {good.status_code} {good.text[:200]}")

    def _has_died(self) -> bool:
        assert self.server.process is not None
        until = time.monotonic() + DEATH_S
        while self.server.process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.server.process.poll() is not None

    def _post(self, model: str, route: str, body: bytes) -> None:
        try:
            answer = self._http.post(f"/v2/models/{model}/{route}", content=body)
        except httpx.TimeoutException as error:
            raise FaultError(f"no answer in {ANSWER_S:.0f} s") from error
        except httpx.TransportError as error:
            raise BrokenConnectionError(f"the connection broke: {error}") from error
        _judge(str(answer.status_code), answer.text)

    def _infer(self, request: service_pb2.ModelInferRequest) -> None:
        metadata = [("triton_grpc_error", "true")]
        try:
            for reply in self._stub.ModelStreamInfer(iter([request]), timeout=ANSWER_S, metadata=metadata):
                _judge("OK", reply.error_message)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise FaultError(f"no end in {ANSWER_S:.0f} s: {details}") from error
            if code is grpc.StatusCode.UNAVAILABLE and BROKEN.search(details):
                raise BrokenConnectionError(f"the connection broke: {details}") from error
            _judge(code.name, details)


def _judge(status: str, text: str) -> None:
    if TRITONS_OWN.search(text):
        return
    if status in ("INTERNAL", "500", "UNKNOWN", "DATA_LOSS") or CARELESS.search(text):
        raise FaultError(f"answered with {status} {text[:250]}")


def _http_body(generator: random.Random) -> tuple[str, bytes]:
    if generator.random() < 0.5:
        model = generator.choice(("chat", "completions"))
        body = BODIES[model] if generator.random() < 0.3 else mutate.change(BODIES[model], generator)
        text = json.dumps({**body, "stream": False} if isinstance(body, dict) else body)
        if generator.random() < 0.2:
            text = mutate.damage(text.encode(), generator).decode("latin-1")
        outer: Any = {"request": text, "stream": generator.random() < 0.5}
    else:
        model = generator.choice(tuple(GENERATE))
        outer = mutate.change(GENERATE[model], generator)
    data = json.dumps(outer).encode()
    return model, mutate.damage(data, generator) if generator.random() < 0.2 else data


def _grpc_message(generator: random.Random) -> service_pb2.ModelInferRequest:
    request = encode_request(generator.choice(CALLS))
    for _ in range(generator.choice((1, 1, 2, 3))):
        index = generator.randrange(len(request.inputs))
        entry, deed = request.inputs[index], generator.randrange(8)
        if deed == 0:
            request.raw_input_contents[index] = mutate.damage(request.raw_input_contents[index], generator)
        elif deed == 1:
            del entry.shape[:]
            entry.shape.extend(generator.choice(([], [0], [1], [-1], [1, 0], [1, 1], [2, 1], [1, 1, 1], [1, 2**40])))
        elif deed == 2:
            entry.datatype = generator.choice(("INT64", "FP32", "BYTES", "BOOL", "", "FP16", "nonsense"))
        elif deed == 3:
            entry.name = generator.choice(("", "input_ids", "nonsense", "stop", "x" * 5000, "request"))
        elif deed == 4:
            request.inputs.add(name=entry.name, datatype=entry.datatype, shape=entry.shape)
            request.raw_input_contents.append(request.raw_input_contents[index])
        elif deed == 5 and len(request.inputs) > 1:
            del request.inputs[index]
            del request.raw_input_contents[index]
        elif deed == 6:
            request.parameters[
                generator.choice(("priority", "timeout", "sequence_id", "x"))
            ].int64_param = generator.choice((-1, 0, 1, 2**40))
        else:
            request.outputs.add(name=generator.choice(("text_output", "output_ids", "nonsense", "")))
    return request


def _described(request: service_pb2.ModelInferRequest) -> str:
    inputs = [f"{entry.name}:{entry.datatype}{list(entry.shape)}" for entry in request.inputs]
    return (
        f"{inputs} outputs {[entry.name for entry in request.outputs]} raw {request.SerializeToString().hex()[:1500]}"
    )
