"""Scripted servers on loopback: a gRPC one that speaks Triton's protocol and a bare HTTP one.

A script is a generator of steps. gRPC steps are dicts of outputs (a response), ("status", code, text) which aborts the
call, ("error", text) which puts an error text into the stream, and numbers (seconds to wait). HTTP steps are bytes,
numbers, and "drop" (the connection is closed without an end). Servers record what they saw.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

DTYPES = {"b": "BOOL", "i": "INT32", "f": "FP32", "O": "BYTES"}
MAX_WAIT_S = 20.0


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def response_of(request, outputs, *, final):
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    for name, value in outputs.items():
        array = np.asarray(value, dtype=object if isinstance(value[0], str) else None)
        if array.dtype.kind == "i":
            array = array.astype(np.int32)
        datatype = DTYPES[array.dtype.kind]
        entry = response.outputs.add(name=name, datatype=datatype)
        entry.shape.extend(array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        response.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


def inputs_of(request):
    values = {}
    for entry, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if entry.datatype == "BYTES":
            array = deserialize_bytes_tensor(raw)
        else:
            array = np.frombuffer(raw, dtype=triton_to_np_dtype(entry.datatype))
        values[entry.name] = (entry.datatype, array.reshape(tuple(entry.shape)))
    return values


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`scripts[model](inputs)` yields the steps; `seen` holds (request, inputs, metadata), `cancelled` the ids."""

    def __init__(self) -> None:
        self.scripts: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.cancelled: list[str] = []
        self.ready_models: set[str] = set()
        self.ready = True
        self.target = ""
        self.final_marks = True
        self._finished: set[str] = set()

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name in self.ready_models)

    def ModelStreamInfer(self, request_iterator, context):
        for request in request_iterator:
            inputs = inputs_of(request)
            self.seen.append((request, inputs, dict(context.invocation_metadata())))
            context.add_callback(lambda request_id=request.id: self._ended(request_id))
            yield from self._play(request, inputs, context)

    def _ended(self, request_id):
        if request_id not in self.cancelled and request_id not in self._finished:
            self.cancelled.append(request_id)

    def _play(self, request, inputs, context):
        for step in self.scripts[request.model_name](inputs):
            if isinstance(step, int | float):
                deadline = time.monotonic() + step
                while time.monotonic() < deadline and context.is_active():
                    time.sleep(0.005)
            elif isinstance(step, dict):
                yield response_of(request, step, final=False if self.final_marks else None)
            elif step[0] == "error":
                yield service_pb2.ModelStreamInferResponse(error_message=step[1])
            elif step[0] == "status":
                context.abort(step[1], step[2])
            elif step[0] == "cut":
                return
        if self.final_marks:
            yield response_of(request, {}, final=True)
        self._finished.add(request.id)


@pytest.fixture
def triton():
    fake = FakeTriton()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(grace=0).wait(MAX_WAIT_S)


class FakeHttp:
    """`script(path, body)` gives (status, content type, steps); `seen` holds (path, body, headers)."""

    def __init__(self) -> None:
        self.script: Any = None
        self.seen: list[Any] = []
        self.broken_pipes = 0
        self.url = ""


@pytest.fixture
def web():
    fake = FakeHttp()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_arguments):
            return

        def do_GET(self):
            self._answer(None)

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body):
            fake.seen.append((self.path, body, dict(self.headers)))
            status, kind, steps = fake.script(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self._play(steps)
            except (BrokenPipeError, ConnectionResetError):
                fake.broken_pipes += 1
                self.close_connection = True

        def _play(self, steps):
            for step in steps:
                if step == "drop":
                    self.close_connection = True
                    return
                if isinstance(step, bytes):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(step), step))
                    self.wfile.flush()
                else:
                    time.sleep(step)
            self.wfile.write(b"0\r\n\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join(MAX_WAIT_S)


def event(**values) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


@pytest.fixture
def sse():
    return event


@pytest.fixture
def until():
    return wait_for
