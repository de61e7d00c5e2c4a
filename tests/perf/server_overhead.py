"""What the server costs: tokens a second through the Triton models over a scripted engine, on this machine's CPU.

    python tests/perf/server_overhead.py                     # every model, 1, 16 and 64 streams, steps of 5 and 0.1 ms
    python tests/perf/server_overhead.py --model ensemble --streams 64 --step-ms 5

One JSON line for each measurement: tokens a second over all streams, how many tokens came in a response, time to the
first token, and the server's and engine's CPU time a token. `bound` is streams * 1000 / step_ms, what the engine gives.
Client, server and engine share the cores, as they do in a trial on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, start_server

MODELS = ("tensorrt_llm", "ensemble", "pipeline")
PROMPT = "Go on for ever"
CYCLE = list(range(1000, 1008))


def scripted_engine(folder: Path, step_ms: float) -> Path:
    folder.mkdir(parents=True)
    plan = {"step_ms": step_ms, "max_context": 1 << 16, "default": {"tokens": CYCLE, "cycle": True}}
    (folder / "scripted.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


@contextlib.contextmanager
def served(step_ms: float) -> Iterator[TritonServer]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = ("tensorrt_llm", "ensemble", "preprocessing", "postprocessing", "pipeline")
        engine = scripted_engine(folder / "engine", step_ms)
        options = ServerOptions(engine, folder / "state", http_port=0, grpc_port=0, metrics_port=0, models=models)
        server = start_server(options)
        try:
            yield server
        finally:
            server.stop(3.0)


def inputs(model: str, tokens: int) -> list[Any]:
    if model == "tensorrt_llm":
        arrays = {
            "input_ids": np.array([[1, 2, 3, 4]], dtype=np.int32),
            "input_lengths": np.array([[4]], dtype=np.int32),
            "request_output_len": np.array([[tokens]], dtype=np.int32),
            "streaming": np.array([[True]]),
        }
    else:
        arrays = {
            "text_input": np.array([[PROMPT.encode()]], dtype=np.object_),
            "max_tokens": np.array([[tokens]], dtype=np.int32),
            "stream": np.array([[True]]),
        }
    made = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


class Streams:
    """Requests on one gRPC connection, counted as they arrive."""

    def __init__(self, url: str, model: str, count: int, tokens: int) -> None:
        self.first: dict[str, float] = {}
        self.responses = 0
        self.error: Exception | None = None
        self._left = count
        self._done = threading.Event()
        self._client = grpcclient.InferenceServerClient(url)
        self._client.start_stream(self._arrived)
        request = inputs(model, tokens)
        output = "sequence_length" if model == "tensorrt_llm" else "text_output"
        self.start = time.monotonic()
        for index in range(count):
            self._client.async_stream_infer(
                model,
                request,
                outputs=[grpcclient.InferRequestedOutput(output)],
                request_id=str(index),
                enable_empty_final_response=True,
            )

    def _arrived(self, result: Any, error: Exception | None) -> None:
        if error is not None:
            self.error = error
            self._done.set()
            return
        reply = result.get_response()
        self.responses += bool(reply.outputs)
        self.first.setdefault(reply.id, time.monotonic() - self.start)
        if reply.parameters["triton_final_response"].bool_param:
            self._left -= 1
            if not self._left:
                self._done.set()

    def seconds(self, timeout_s: float = 300.0) -> float:
        if not self._done.wait(timeout_s) or self.error is not None:
            raise RuntimeError(f"the streams did not finish: {self.error or f'{timeout_s} s passed'}")
        elapsed = time.monotonic() - self.start
        self._client.stop_stream()
        self._client.close()
        return elapsed


def cpu_seconds(server: TritonServer) -> float:
    """CPU time of the server, its stubs and the engine."""
    assert server.process is not None
    top = psutil.Process(server.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (top, *top.children(recursive=True)))


def measure(server: TritonServer, model: str, count: int, tokens: int, step_ms: float) -> dict[str, Any]:
    before = cpu_seconds(server)
    streams = Streams(server.grpc_url, model, count, tokens)
    elapsed = streams.seconds()
    cpu_s = cpu_seconds(server) - before
    first = sorted(streams.first.values())
    return {
        "model": model,
        "streams": count,
        "step_ms": step_ms,
        "tokens_per_s": round(count * tokens / elapsed),
        "bound_tokens_per_s": round(count * 1000 / step_ms),
        "tokens_per_response": round(count * tokens / streams.responses, 2),
        "cpu_us_per_token": round(cpu_s * 1e6 / (count * tokens)),
        "first_token_p50_ms": round(first[len(first) // 2] * 1000, 1),
        "first_token_p99_ms": round(first[min(len(first) - 1, int(len(first) * 0.99))] * 1000, 1),
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--streams", type=int, action="append", help="default: 1, 16, 64")
    parser.add_argument("--step-ms", type=float, action="append", help="default: 5 and 0.1")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    chosen = parser.parse_args()
    for step_ms in chosen.step_ms or (5.0, 0.1):
        with served(step_ms) as server:
            for model in chosen.model or MODELS:
                measure(server, model, 1, 20, step_ms)  # the first request of a model is not like the others
                for count in chosen.streams or (1, 16, 64):
                    print(json.dumps(measure(server, model, count, chosen.tokens, step_ms)), flush=True)


if __name__ == "__main__":
    main()
