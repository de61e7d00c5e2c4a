"""What speculation gains: tokens per second (on a CPU: per CPU second) while decoding, by text, batch and drafter.

Run: python tests/perf/speculation.py --engine DIR [--kinds repeat,story] [--batches 1,4,16] [--json FILE]
                                      [--drafters none,ngram,draft,eagle3] [--draft-engine DIR] [--head DIR]
The engine is a built engine of the demo; held-out samples of its kinds are answered greedily. Without --draft-engine
the engine drafts for itself, which it never does unless --free-drafts says so: that shows the most that can be
accepted, and costs as many passes as it saves. Every line says how many answers differ from those without speculation
(sums in another order may turn a near tie).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptoss_trt.build_engine.demo.answer import STOPS
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.dataset import document, prompt_ids
from gptoss_trt.build_engine.demo.head import expand_demo_head
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.runtime.engine.core import EngineCore
from gptoss_trt.runtime.engine.messages import Error, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import load_core
from gptoss_trt.runtime.engine.options import EngineOptions

USUAL_KINDS = "repeat,reverse,story,json_record,weather_answer_real"
ROOM_TOKENS = 16
KV_BYTES = 512 << 20


@dataclass
class Cell:
    """Answers of a kind, a batch at a time."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    tokens: int = 0  # behind the first of each answer
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    steps: int = 0


def submits_of(kind: str, count: int, codec: Codec, pool: NamePool) -> list[Submit]:
    submits = []
    for number in range(count):
        chat = sample(KINDS[kind], number, pool, held=True)
        prompt = prompt_ids(chat, codec)
        length = len(document(chat, codec, target_only=True).ids) - len(prompt)
        name = f"{kind}{number}"
        submits.append(
            Submit(name, tuple(prompt), length + ROOM_TOKENS, sampling=Sampling(temperature=0.0), stop_ids=STOPS)
        )
    return submits


def run_batch(core: EngineCore, submits: list[Submit], cell: Cell) -> None:
    """Answers some requests together; the clock runs from when all of them decode."""
    written: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    for submit in submits:
        core.submit((0, submit.request_id), submit, time.time_ns())
    began, began_cpu, before, first_step = 0.0, 0.0, 0, 0
    while core.has_work():
        if not began and all(written.values()):
            began, began_cpu, before = time.perf_counter(), time.process_time(), sum(map(len, written.values()))
            first_step = core.stats()["iteration_counter"]
        for _, event in core.step():
            if isinstance(event, Error):
                raise RuntimeError(f"the engine answered {event}")
            if isinstance(event, Tokens):
                written[event.request_id].extend(event.token_ids)
    cell.seconds += time.perf_counter() - began
    cell.cpu_seconds += time.process_time() - began_cpu
    cell.tokens += sum(map(len, written.values())) - before
    cell.steps += core.stats()["iteration_counter"] - first_step
    cell.answers |= written


def drafted(core: EngineCore) -> tuple[int, int]:
    counters = core.stats()["counters"]
    return counters["draft_tokens"], counters["accepted_draft_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--engine", type=Path, required=True, help="a built engine of the demo")
    parser.add_argument("--draft-engine", type=Path, help="its draft engine; the engine itself when not given")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of it, for the drafter eagle3; else what ships")
    parser.add_argument("--kinds", default=USUAL_KINDS, help="comma-separated kinds of the demo")
    parser.add_argument("--batches", default="1,4,16", help="comma-separated numbers of requests at a time")
    parser.add_argument("--drafters", default="none,ngram,draft", help="comma-separated ways of drafting, none first")
    parser.add_argument("--draft-tokens", type=int, default=0, help="most tokens of a draft; 0: the engine's choice")
    parser.add_argument("--free-drafts", action="store_true", help="draft as if a pass of a drafter took no time")
    parser.add_argument("--samples", type=int, default=4, help="requests of each cell, at least a whole batch")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="file to add the records to")
    options = parser.parse_args()
    batches = [int(part) for part in options.batches.split(",")]
    codec = Codec()
    pool = NamePool.build(codec)
    with tempfile.TemporaryDirectory() as folder:
        cores = {name: _core(options, name, max(batches), Path(folder)) for name in options.drafters.split(",")}
    for batch in batches:
        for kind in options.kinds.split(","):
            submits = submits_of(kind, max(options.samples, batch), codec, pool)
            cells = {name: Cell() for name in cores}
            before = {name: drafted(core) for name, core in cores.items()}
            for first in range(0, len(submits), batch):
                for name, core in cores.items():  # in turn, so that a machine that others use slows all alike
                    run_batch(core, submits[first : first + batch], cells[name])
            for name, core in cores.items():
                after = drafted(core)
                drafts = after[0] - before[name][0], after[1] - before[name][1]
                _report(options, (name, kind, batch), cells[name], next(iter(cells.values())), drafts)


def _core(options: argparse.Namespace, drafter: str, max_batch: int, folder: Path) -> EngineCore:
    draft_engine = options.draft_engine or options.engine if drafter == "draft" else ""
    if drafter == "eagle3":
        draft_engine = options.head or expand_demo_head(folder / "head")
    core = load_core(
        options.engine,
        EngineOptions(
            device=options.device,
            max_batch=max_batch,
            threads=options.threads,
            kv_bytes=KV_BYTES,
            speculation=drafter,
            draft_engine=str(draft_engine),
            draft_tokens=0 if drafter == "none" else options.draft_tokens,
            prefix_cache=False,
        ),
    )
    speculator = core._core._scheduler._speculator  # type: ignore[attr-defined]
    if options.free_drafts and speculator is not None:
        speculator.pass_cost = 0.0
    return core


def _report(
    options: argparse.Namespace, names: tuple[str, str, int], cell: Cell, usual: Cell, drafts: tuple[int, int]
) -> None:
    drafter, kind, batch = names
    on_gpu = options.device == "cuda"
    # On a CPU that others use wall time says little.
    rate, usual_rate = ((c.tokens / (c.seconds if on_gpu else c.cpu_seconds)) for c in (cell, usual))
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "speculation": drafter,
        **({"head": str(options.head or "shipped")} if drafter == "eagle3" else {}),
        "free_drafts": options.free_drafts,
        "kind": kind,
        "batch": batch,
        "answers": len(cell.answers),
        "tokens": cell.tokens,
        "steps": cell.steps,
        "tokens_a_step": round(cell.tokens / cell.steps, 2),
        "tok_s": round(cell.tokens / cell.seconds, 1),
        "tok_cpu_s": round(cell.tokens / cell.cpu_seconds, 1),
        "gain": round(rate / usual_rate, 3),
        "draft_tokens": drafts[0],
        "accepted_draft_tokens": drafts[1],
        "acceptance": round(drafts[1] / drafts[0], 3) if drafts[0] else None,
        "different_answers": sum(ids != usual.answers[name] for name, ids in cell.answers.items()),
    }
    print(json.dumps(record), flush=True)
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
