"""Decode cells through tritonserver and, under the same load, at its engine's own socket.

    python tests/perf/served_decode.py engine/ --out FILE    # serves the engine meanwhile
    gptoss-trt serve engine/ --state-dir state --instances 4 --json    # or one that runs: its state folder is printed
    python tests/perf/served_decode.py engine/ --url grpc://127.0.0.1:8001 --state state/server-8000 --out FILE

One JSON line for each way and concurrency: `tok_s` and `ms` over the time in which every stream was decoding (the cells
of results/h200.jsonl are measured so), `all_tok_s` from the first submission to the last token with the prompts in it,
`tpot_ms`, of each stream (last - first) / (tokens - 1), which has others' prompts in it, tokens a response, times to
the first token, and the CPU seconds that each kind of process spent a second. All cells are measured once, then again:
a cell's last line has the best so far. Streams are spread over client processes: one Python process is no client for
20,000 tokens a second. Temperature 1, random ids.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import multiprocessing
import queue
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from serving import served

from gptoss_trt.client.api import AsyncClient
from gptoss_trt.client.bench.workload import Lengths, Request, synthetic
from gptoss_trt.client.connect import connect_async
from gptoss_trt.client.protocol import END_ID_NEVER
from gptoss_trt.client.requests import Sampling
from gptoss_trt.runtime.engine import messages
from gptoss_trt.runtime.engine.client import EngineClient

WAYS = ("tensorrt_llm", "engine")
STEP_TOKENS = 8192  # of the server started here: prompts of several streams in one step
WARM_TOKENS = 8  # of every stream, before the time counts
ANSWER_S = 60.0

Arrivals = list[list[tuple[float, int]]]  # for each stream, (time.perf_counter, tokens) of each response


@dataclass(frozen=True)
class Load:
    """What one client process sends at once. `way`: a model of the server, or `engine`, its socket."""

    way: str
    streams: int
    input_tokens: int
    output_tokens: int
    seed: int

    def requests(self) -> list[Request]:
        lengths = Lengths.parse(str(self.input_tokens)), Lengths.parse(str(self.output_tokens))
        form = "ensemble" if self.way == "ensemble" else "tensorrt_llm"
        return list(itertools.islice(synthetic(form, *lengths, self.seed), self.streams))


def client_process(pipe: Connection, url: str, engine: Path, state: Path) -> None:
    """Answers each Load from the pipe with Arrivals, until None comes; both ways stay connected meanwhile."""
    direct = EngineClient(engine, state_dir=state, start=False)
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(_connected(url))
    while (load := pipe.recv()) is not None:
        requests = load.requests()
        pipe.send("ready")
        pipe.recv()
        if load.way == "engine":
            pipe.send(_ask_engine(direct, load, requests))
        else:
            pipe.send(loop.run_until_complete(_ask_server(client, load, requests)))
    direct.close()


async def _connected(url: str) -> AsyncClient:
    return connect_async(url)


async def _ask_server(client: AsyncClient, load: Load, requests: list[Request]) -> Arrivals:
    async def stream(number: int, request: Request) -> list[tuple[float, int]]:
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=load.seed + number, end_id=END_ID_NEVER)
        options: dict[str, Any] = {"model": load.way, "timeout_s": ANSWER_S}
        arrivals, seen = [], 0
        if request.input_ids is not None:
            async with client.stream_tokens(request.input_ids, request.max_tokens, sampling, **options) as tokens:
                async for piece in tokens:
                    if piece.ids:
                        arrivals.append((time.perf_counter(), len(piece.ids)))
            return arrivals
        async with client.stream_text(request.prompt or "", request.max_tokens, sampling, **options) as text:
            async for fragment in text:
                if (fragment.output_tokens or 0) > seen:
                    arrivals.append((time.perf_counter(), (fragment.output_tokens or 0) - seen))
                    seen = fragment.output_tokens or 0
        return arrivals

    return list(await asyncio.gather(*(stream(number, request) for number, request in enumerate(requests))))


def _ask_engine(client: EngineClient, load: Load, requests: list[Request]) -> Arrivals:
    events: queue.SimpleQueue[tuple[int, float, messages.Event]] = queue.SimpleQueue()
    arrivals: Arrivals = [[] for _ in requests]

    def sink_of(number: int) -> Any:
        return lambda event: events.put((number, time.perf_counter(), event))

    for number, request in enumerate(requests):
        sampling, name = messages.Sampling(seed=load.seed + number), f"direct-{load.seed}-{number}"
        submit = messages.Submit(name, request.input_ids or (), request.max_tokens, sampling=sampling)
        client.submit(submit, sink_of(number))
    left = len(requests)
    while left:
        number, at, event = events.get(timeout=ANSWER_S)
        if isinstance(event, messages.Error):
            raise RuntimeError(f"{event.code}: {event.message}")
        if isinstance(event, messages.Tokens):
            arrivals[number].append((at, len(event.token_ids)))
        left -= isinstance(event, messages.Finished)
    return arrivals


class Clients:
    """Client processes that send at the same moment."""

    def __init__(self, count: int, url: str, engine: Path, state: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=client_process, args=(theirs, url, engine, state), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def ask(self, loads: list[Load]) -> tuple[float, Arrivals]:
        """When the loads were let go, and the arrivals of all their streams. Raises EOFError for a client that died."""
        used = list(zip(self._pipes, loads, strict=False))
        for pipe, load in used:
            pipe.send(load)
        for pipe, _ in used:
            pipe.recv()
        began = time.perf_counter()
        for pipe, _ in used:
            pipe.send("go")
        return began, [stream for pipe, _ in used for stream in pipe.recv()]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def kind_of(process: psutil.Process) -> str | None:
    """Which part of the server a process is; None for others."""
    line = " ".join(process.cmdline())
    for kind, sign in (("stubs", "triton_python_backend_stub"), ("engine", "runtime.engine.process")):
        if sign in line:
            return kind
    return "server" if process.name().startswith("tritonserver") else None


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of each kind of process."""
    spent: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            kind = kind_of(process)
            if kind is not None:
                times = process.cpu_times()
                spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return spent


def figures(began: float, arrivals: Arrivals, spent: dict[str, float]) -> dict[str, Any]:
    """The line's figures. `tok_s` is None when the streams never decoded all at once."""
    counts = [sum(tokens for _, tokens in stream) for stream in arrivals]
    firsts = sorted(stream[0][0] - began for stream in arrivals)
    between = sorted(
        (stream[-1][0] - stream[0][0]) / max(1, count - 1) for stream, count in zip(arrivals, counts, strict=True)
    )
    ended = max(stream[-1][0] for stream in arrivals)
    begin = max(_time_of_token(stream, WARM_TOKENS) for stream in arrivals)
    end = min(stream[-1][0] for stream in arrivals)
    inside = [(at, tokens) for stream in arrivals for at, tokens in stream if begin < at <= end]
    steady = sum(tokens for _, tokens in inside) / (end - begin) if end > begin else None
    wall = ended - began
    return {
        "tok_s": round(steady, 1) if steady else None,
        "ms": round(1e3 * len(arrivals) / steady, 4) if steady else None,
        "steady_s": round(max(0.0, end - begin), 3),
        "all_tok_s": round(sum(counts) / wall, 1),
        "wall_s": round(wall, 3),
        "tokens_a_response": round(sum(tokens for _, tokens in inside) / max(1, len(inside)), 3),
        "tpot_ms": {"p50": round(between[len(between) // 2] * 1e3, 3), "max": round(between[-1] * 1e3, 3)},
        "ttft_ms": {"p50": round(firsts[len(firsts) // 2] * 1e3, 2), "max": round(firsts[-1] * 1e3, 2)},
        "short_answers": sum(count != max(counts) for count in counts),
        "cpus": {kind: round(seconds / wall, 3) for kind, seconds in sorted(spent.items())},
    }


def _time_of_token(stream: list[tuple[float, int]], number: int) -> float:
    seen = 0
    for at, tokens in stream:
        seen += tokens
        if seen >= number:
            return at
    return stream[-1][0]


def measure(clients: Clients, way: str, streams: int, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    shares = [
        streams // options.processes + (number < streams % options.processes) for number in range(options.processes)
    ]
    loads = [
        Load(way, share, options.input_tokens, options.output_tokens, seed + 1000 * number)
        for number, share in enumerate(shares)
        if share
    ]
    before = cpu_seconds()
    began, arrivals = clients.ask(loads)
    spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in cpu_seconds().items()}
    return figures(began, arrivals, spent)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="the engine directory that the server serves")
    parser.add_argument("--url", default="grpc://127.0.0.1:8001", help="of a server that runs; default: %(default)s")
    parser.add_argument("--state", type=Path, help="its state folder, as `serve --json` prints it; default: serve here")
    parser.add_argument("--instances", type=int, default=4, help="of a server started here; default: %(default)s")
    parser.add_argument("--concurrency", default="1,8,32,64,128", help="default: %(default)s")
    parser.add_argument("--input-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=8, help="client processes; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=2, help="of each cell, the best stands; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="none begins later; default: %(default)s")
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="models, and `engine` for the engine's socket; default: %(default)s"
    )
    parser.add_argument("--note", action="append", default=[], metavar="KEY=VALUE", help="goes into every line")
    parser.add_argument("--out", type=Path, help="lines are appended to this file too")
    return parser.parse_args()


def measure_all(options: argparse.Namespace, url: str, state: Path, deadline: float) -> None:
    """Every cell, then every cell again; none begins behind `deadline` (time.monotonic)."""
    shape = {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens}
    notes = dict(note.split("=", 1) for note in options.note)
    clients = Clients(options.processes, url, options.engine, state)
    ways = options.ways.split(",")
    cells = [(way, streams) for streams in map(int, options.concurrency.split(",")) for way in ways]
    for way in ways:  # a server is ready ahead of its engine
        clients.ask([Load(way, 1, options.input_tokens, WARM_TOKENS, 1000 * n) for n in range(options.processes)])
    tries: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number, (way, streams) in enumerate(cells * options.repeats, start=1):
        if time.monotonic() > deadline:
            break
        done = tries[way, streams]
        done.append(measure(clients, way, streams, options, number * 1_000_000))
        best = max(done, key=lambda line: line["tok_s"] or 0.0) | {"tries_tok_s": [line["tok_s"] for line in done]}
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        line = json.dumps({"way": way, "concurrency": streams, **shape, **best, **notes, "date": date})
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    clients.close()


def main() -> None:
    options = parsed()
    deadline = time.monotonic() + options.seconds
    if options.state is not None:
        measure_all(options, options.url, options.state, deadline)
        return
    most = max(map(int, options.concurrency.split(",")))
    chosen = (f"max_batch={most}", f"step_tokens={STEP_TOKENS}")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.engine, Path(folder), chosen, options.instances) as server,
    ):
        options.note.append(f"instances={options.instances}")
        measure_all(options, f"grpc://{server['grpc']}", Path(server["state"]), deadline)


if __name__ == "__main__":
    main()
