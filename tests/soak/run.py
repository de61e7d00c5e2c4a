"""A real tritonserver under load for a given time, disturbed on purpose; every answer is checked against its question.

Closes with `soak: N requests, L lost, M mixed, C cancelled, R engine restarts, memory +X MiB` and exits 1 if anything
was lost or mixed, if the server did not come back, kept requests, or grew beyond the limit. A request is lost when it
got neither its answer nor an error in time, or an error without a disturbance that excuses it. A JSON line with the
date, the commit and all counts is appended to --output.

    python tests/soak/run.py --seconds 600                       # the demo engine
    python tests/soak/run.py --seconds 60 --engine scripted --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from disturb import MEMORY_COLUMNS, Disturber, Memory, stub_processes
from load import OUTCOMES, Clients, Load, Seen
from questions import DemoQuestions, Question, ScriptedQuestions, Source, demo_candidates, scripted_engine
from windows import Windows

from gptoss_trt.build_engine.spec import Manifest
from gptoss_trt.runtime.engine.client import EngineClient
from gptoss_trt.runtime.engine.location import EngineHome
from gptoss_trt.runtime.launch.demo import demo_engine
from gptoss_trt.runtime.launch.tritonserver import ServerOptions, TritonServer, start_server

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("tensorrt_llm", "ensemble", "chat", "completions")
RELOADED = ("chat", "completions")  # tensorrt_llm publishes the metrics, ensemble tells when the server is back
DEMO_QUESTIONS = 24
IDLE_TIMEOUT_S = 15.0


def main() -> int:
    """Runs the soak; returns the exit status."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server is stopped then too
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if options.engine == "demo":
            engine = demo_engine(ROOT / ".cache" / "demo", note)
        else:
            engine = scripted_engine(Path(folder) / "engine", options.step_ms)
        with running(engine, Path(folder) / "state") as server:
            result = asyncio.run(soak(server, options))
            if result["problems"]:
                keep_logs(server, options.output)
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "engine": options.engine,
        "streams": options.streams,
        "seconds": options.seconds,
        "seed": options.seed,
        **result,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
    for problem in result["problems"]:
        note(problem)
    print(record["line"])
    return 1 if result["problems"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--engine", choices=("demo", "scripted"), default="demo")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds that an answer may take")
    parser.add_argument("--http-share", type=float, default=0.3, help="of the requests; the others are gRPC")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the scripted engine")
    parser.add_argument("--memory-limit-mib", type=float, default=256.0, help="growth that fails the run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "soak" / "results.jsonl")
    return parser.parse_args()


@contextlib.contextmanager
def running(engine: Path, state: Path) -> Iterator[TritonServer]:
    """A server over the engine on free ports of the loopback."""
    server = start_server(
        ServerOptions(engine, state_dir=state, http_port=0, grpc_port=0, metrics_port=0, models=MODELS)
    )
    try:
        server.first_answer()
        yield server
    finally:
        server.stop(drain_s=3.0)


def keep_logs(server: TritonServer, output: Path) -> None:
    """Copies the logs of server and engine beside the output of a run that failed."""
    for log in (server.log_path, EngineHome.of(server.options.engine_dir, server.folder).log):
        if log.exists():
            shutil.copy(log, output.with_suffix(f".{log.name}"))


async def soak(server: TritonServer, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run against a server that is ready."""
    clients, windows = Clients(server.grpc_url, server.http_url, options.http_share), Windows()
    source: Source = ScriptedQuestions(options.seed)
    if options.engine == "demo":
        known = await demo_questions(clients, options.seed)
        source = DemoQuestions(options.seed, known, Manifest.read(server.options.engine_dir).model.max_context)
    load = Load(clients, source, windows, streams=options.streams, deadline_s=options.deadline, seed=options.seed)
    disturber, memory = Disturber(server, windows, RELOADED), Memory(server)
    watch = asyncio.create_task(memory.watch())
    start = time.monotonic()
    await asyncio.gather(load.run(start + options.seconds), disturber.run(options.seconds))
    took_s = time.monotonic() - start
    watch.cancel()
    await clients.close()
    problems = disturber.problems + load.tally.examples + await asyncio.to_thread(left_over, server)
    return report(load, disturber, memory, problems, options.memory_limit_mib) | {"took_s": round(took_s, 1)}


def report(load: Load, disturber: Disturber, memory: Memory, problems: list[str], limit_mib: float) -> dict[str, Any]:
    """Counts, the closing line, and what makes the run fail."""
    tally, growth = load.tally, memory.growth_mib()
    counts = {outcome: tally.outcomes[outcome] for outcome in OUTCOMES}
    restarts = max(0, len(memory.engines) - 1)
    if growth > limit_mib:
        problems.append(f"memory grew by {growth:.0f} MiB; the limit is {limit_mib:.0f}")
    if not counts["answered"] or not counts["cancelled"]:
        problems.append("nothing was answered, or nothing cancelled")
    if restarts < disturber.kills or not disturber.kills:
        problems.append(f"{disturber.kills} engines were killed and {restarts} restarted")
    line = (
        f"soak: {tally.requests} requests, {counts['lost']} lost, {counts['mixed']} mixed, {counts['cancelled']} "
        f"cancelled, {restarts} engine restarts, memory {growth:+.0f} MiB"
    )
    latencies = sorted(tally.latencies_s) or [0.0]
    return {
        "line": line,
        "requests": tally.requests,
        **counts,
        "kills": disturber.kills,
        "restarts": restarts,
        "reloads": disturber.reloads,
        "recoveries_s": [round(seconds, 2) for seconds in disturber.recoveries_s],
        "latency_p50_s": round(statistics.median(latencies), 3),
        "latency_p99_s": round(latencies[int(0.99 * (len(latencies) - 1))], 3),
        "oldest_metrics_s": max(memory.page_ages_s),
        "memory_growth_mib": round(growth, 1),
        "memory_mib": {"columns": MEMORY_COLUMNS, "rows": thinned(memory.samples)},
        "errors": dict(tally.errors.most_common(20)),
        "problems": problems,
    }


def thinned(samples: list[Any], rows: int = 30) -> list[Any]:
    return samples[:: max(1, -(-len(samples) // rows))]


def left_over(server: TritonServer) -> list[str]:
    """What is still held after every client has gone: requests and blocks of the engine, stubs of models that were
    reloaded."""
    engine = EngineClient(server.options.engine_dir, state_dir=server.folder, start=False)
    until = time.monotonic() + IDLE_TIMEOUT_S
    try:
        while True:
            stats = engine.stats()
            held = {
                "requests": stats["requests"]["active"],
                "blocks": stats["kv"]["full"]["used"],
                "draining stubs": len(stub_processes(server)[1]),
            }
            if not any(held.values()):
                return []
            if time.monotonic() > until:
                return [f"{IDLE_TIMEOUT_S:.0f} s after the last client are held: {held}"]
            time.sleep(0.1)
    finally:
        engine.close()


async def demo_questions(clients: Clients, seed: int) -> list[Question]:
    """Sums that the demo model gets right when asked a few at a time, with its whole answers."""
    slots = asyncio.Semaphore(4)

    async def ask(question: Question, number: str) -> Question | None:
        async with slots:
            seen, source = Seen(question), clients.grpc(question.call(120.0))
            while (record := await source.receive()) is not None:
                seen.take(record)
        answer = seen.answer
        text = answer if isinstance(answer, str) else demo_text(answer)
        return replace(question, answer=answer) if text.rstrip(".").endswith(number) else None

    asked = await asyncio.gather(*(ask(*candidate) for candidate in demo_candidates(seed, DEMO_QUESTIONS)))
    known = [question for question in asked if question is not None]
    note(f"{len(known)} of {len(asked)} sums are right at leisure")
    if len(known) < len(asked) // 2:
        raise RuntimeError("the demo model gets most sums wrong: there is nothing to check answers against")
    return known


def demo_text(ids: tuple[int, ...]) -> str:
    from gptoss_trt.runtime.harmony import Tokenizer

    return Tokenizer.load().decode(ids, skip_special_tokens=True)


def commit() -> str:
    """The commit of the working tree, with + when files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
