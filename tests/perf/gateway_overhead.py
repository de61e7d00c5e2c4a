"""What the gateway costs: tokens a second through it and through the bare server, over a scripted engine.

    python tests/perf/gateway_overhead.py                     # 1, 16 and 64 streams, steps of 5 ms
    python tests/perf/gateway_overhead.py --streams 64 --workers 2

One JSON line for each measurement, with the way (`server`: the `chat` model over gRPC; `gateway`: the same body over
HTTP), tokens a second, time to the first chunk, and the CPU time a token of the gateway and of everything else behind
it. `loss` is what the gateway takes from the server's rate at the same number of streams. Client, gateway, server and
engine share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from gptoss_trt.runtime.launch.tritonserver import ServerOptions, start_server
from gptoss_trt.runtime.openai.gateway.options import GatewayOptions
from gptoss_trt.runtime.openai.gateway.process import start_gateway
from gptoss_trt.runtime.openai.gateway.triton import TritonModels

CYCLE = list(range(1000, 1008))
HEADER = [200005, 17196, 200008]  # the final channel


def body(tokens: int) -> bytes:
    messages = [{"role": "user", "content": "Go on for ever"}]
    return json.dumps({"messages": messages, "stream": True, "max_tokens": tokens}).encode()


def cpu_seconds(pid: int) -> float:
    top = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:2]) for process in (top, *top.children(recursive=True)))


async def through_server(url: str, tokens: int) -> float:
    """Seconds to the first chunk of one stream, after reading all of it. The channel is the stream's own."""
    models = TritonModels(url)
    start, first = time.monotonic(), 0.0
    async for _ in models.ask("chat", body(tokens), stream=True).batches():
        first = first or time.monotonic() - start
    await models.close()
    return first


async def through_gateway(url: str, tokens: int) -> float:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = body(tokens)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    start, first = time.monotonic(), 0.0
    writer.write(head.encode() + data)
    tail = b""
    while piece := await reader.read(65536):
        tail = (tail + piece)[-4096:]
        if not first and b"data: " in piece:
            first = time.monotonic() - start
    if b"data: [DONE]" not in tail:
        raise RuntimeError(f"the stream did not end as it should: {tail[-500:]!r}")
    writer.close()
    return first


async def measure(way: str, url: str, streams: int, tokens: int, pids: dict[str, int]) -> dict[str, Any]:
    ask = through_gateway if way == "gateway" else through_server
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    start = time.monotonic()
    firsts = sorted(await asyncio.gather(*(ask(url, tokens) for _ in range(streams))))
    elapsed = time.monotonic() - start
    total = streams * tokens
    return {
        "way": way,
        "streams": streams,
        "tokens_per_s": round(total / elapsed),
        "first_chunk_p50_ms": round(firsts[len(firsts) // 2] * 1000, 1),
        "first_chunk_max_ms": round(firsts[-1] * 1000, 1),
        "cpu_us_per_token": {n: round((cpu_seconds(p) - before[n]) * 1e6 / total) for n, p in pids.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--workers", type=int, default=1, help="the gateway's --api-workers")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = folder / "engine"
        engine.mkdir()
        script = {"tokens": HEADER + CYCLE * (chosen.tokens // len(CYCLE) + 1)}
        plan = {"step_ms": chosen.step_ms, "max_context": 1 << 16, "default": script}
        (engine / "scripted.json").write_text(json.dumps(plan), encoding="utf-8")
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        server = start_server(ServerOptions(engine, folder / "state", models=("chat", "completions"), **ports))
        gateway = None
        try:
            options = GatewayOptions(grpc_url=server.grpc_url, port=0, api_workers=chosen.workers)
            gateway = start_gateway(options, folder / "log")
            assert server.process is not None
            pids = {"server": server.process.pid, "gateway": gateway.process.pid}
            asyncio.run(through_gateway(gateway.url, 8))
            for streams in chosen.streams:
                rates = []
                for way, url in (("server", server.grpc_url), ("gateway", gateway.url)):
                    line = asyncio.run(measure(way, url, streams, chosen.tokens, pids))
                    rates.append(line["tokens_per_s"])
                    line |= {"step_ms": chosen.step_ms, "workers": chosen.workers, "cores": os.cpu_count()}
                    if way == "gateway":
                        line["loss"] = round(1 - rates[1] / rates[0], 3)
                    print(json.dumps({**line, "load_before": round(os.getloadavg()[0], 1)}), flush=True)
        finally:
            if gateway is not None:
                gateway.stop()
            server.stop(3.0)


if __name__ == "__main__":
    main()
