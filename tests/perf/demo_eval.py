"""Exact match of the demo's held-out samples through a built engine, greedy, kind by kind.

Run: python tests/perf/demo_eval.py --samples 200 [--kinds sum,reverse] [--engine DIR] [--json FILE]
Without --engine the shipped weights are expanded and built into a temporary folder first. 200 samples of all kinds take
about an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.demo.answer import STOPS, Visible, expected, visible
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.conversation import Conversation
from gptoss_trt.build_engine.demo.dataset import document, prompt_ids
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.runtime.engine.messages import Error, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore, load_core
from gptoss_trt.runtime.engine.options import EngineOptions

GREEDY = Sampling(temperature=0.0)
ROOM_TOKENS = 64  # more than the expected step needs, so that a long wrong answer shows as one


def answers(core: ModelCore, chats: list[Conversation], codec: Codec) -> list[Visible]:
    """The visible answer to each conversation; all of them run together in the engine."""
    written: dict[str, list[int]] = {}
    for index, chat in enumerate(chats):
        prompt = prompt_ids(chat, codec)
        length = len(document(chat, codec, target_only=True).ids) - len(prompt)
        submit = Submit(str(index), tuple(prompt), length + ROOM_TOKENS, sampling=GREEDY, stop_ids=STOPS)
        written[str(index)] = []
        core.submit((0, str(index)), submit, time.time_ns())
    while core.has_work():
        for _, event in core.step():
            if isinstance(event, Error):
                raise RuntimeError(f"the engine answered {event}")
            if isinstance(event, Tokens):
                written[event.request_id].extend(event.token_ids)
    return [visible(written[str(index)], codec) for index in range(len(chats))]


def _engine(folder: Path) -> Path:
    checkpoint = expand_demo_checkpoint(folder / "checkpoint")
    build_engine(checkpoint, folder / "engine", BuildOptions())
    return folder / "engine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=200, help="held-out samples of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds")
    parser.add_argument("--engine", type=Path, help="a built engine of the demo")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args()
    kinds = [KINDS[name] for name in options.kinds.split(",")]
    codec = Codec()
    pool = NamePool.build(codec)
    counts: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        core = load_core(
            options.engine or _engine(Path(folder)), EngineOptions(device=options.device, threads=options.threads)
        )
        for kind in kinds:
            began = time.monotonic()
            chats = [sample(kind, number, pool, held=True) for number in range(options.samples)]
            got = answers(core, chats, codec)
            wrong = [(chat, seen) for chat, seen in zip(chats, got, strict=True) if seen != expected(chat.target)]
            counts[kind.name] = (len(chats) - len(wrong), len(chats))
            share = counts[kind.name][0] / len(chats)
            mark = "" if share >= kind.level else f"  below {kind.level}"
            print(f"{kind.name:24s} {share:.3f} of {len(chats)}  {time.monotonic() - began:.1f} s{mark}", flush=True)
            for chat, seen in wrong[:3]:
                print(f"    {chat.exchanges[-1].user!r}: {expected(chat.target)}, got {seen}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"all: {sum(right for right, _ in counts.values())} of {sum(total for _, total in counts.values())}")


if __name__ == "__main__":
    main()
