"""How soon a cancelled stream gives its KV blocks back, through a running tritonserver.

    gptoss-trt serve engine/ --state-dir state --json    # prints the URLs and the server's state folder
    python tests/perf/served_cancel.py engine/ --url grpc://127.0.0.1:8001 --state state/server-8000 --streams 1,64

A JSON line for each number of streams: milliseconds from the client's cancellation of all of them to the engine's
count of no block in use, of several tries. The engine is asked at its own socket, every 2 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from gptoss_trt.client.connect import connect_async
from gptoss_trt.client.protocol import END_ID_NEVER
from gptoss_trt.client.requests import Sampling
from gptoss_trt.runtime.engine.client import EngineClient

PROMPT_TOKENS = 128
MOST_TOKENS = 8000  # more than any try waits for
LIMIT_S = 10.0


def used_blocks(engine: EngineClient) -> int:
    return int(engine.stats()["kv"]["full"]["used"])


async def one_try(url: str, engine: EngineClient, streams: int) -> float:
    """Milliseconds from the cancellation to no block in use."""
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> None:
        prompt = [(number * 7919 + place * 31) % 190_000 for place in range(PROMPT_TOKENS)]
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=number, end_id=END_ID_NEVER)
        options: dict[str, Any] = {"model": "tensorrt_llm", "timeout_s": 60.0}
        async with client.stream_tokens(prompt, MOST_TOKENS, sampling, **options) as tokens:
            async for _ in tokens:
                begun.release()
                break
            async for _ in tokens:
                pass

    async with connect_async(url) as client:
        tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
        for _ in tasks:
            await asyncio.wait_for(begun.acquire(), LIMIT_S)
        began = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while used_blocks(engine):
            if time.perf_counter() - began > LIMIT_S:
                raise RuntimeError(f"{used_blocks(engine)} blocks still in use {LIMIT_S:.0f} s after the cancellation")
            await asyncio.sleep(0.002)
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--url", default="grpc://127.0.0.1:8001")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    engine = EngineClient(options.engine, state_dir=options.state, start=False)
    for streams in map(int, options.streams.split(",")):
        times = [asyncio.run(one_try(options.url, engine, streams)) for _ in range(options.tries)]
        line = {
            "streams": streams,
            "ms": [round(ms, 1) for ms in times],
            "median_ms": round(statistics.median(times), 1),
        }
        print(json.dumps(line), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
