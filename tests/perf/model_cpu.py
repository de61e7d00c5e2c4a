"""Tokens a second of the forward pass on a CPU, at the demo's size: `python tests/perf/model_cpu.py [--threads 1]`.

Builds a synthetic engine in a temporary folder, then prints one JSON line for loading, prefill and decode at each batch
size. Seconds are wall-clock, CPU seconds stand beside them: on a busy machine only those mean something.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.runtime.model import GptOssModel, StepBatch, load_model

DEMO = {
    "num_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_heads": 16,
    "num_kv_heads": 2,
    "head_dim": 64,
    "vocab_size": 201088,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "stop_token_ids": (200002, 199999, 200012),
}
BLOCK_TOKENS = 64
BLOCKS_EACH = 8  # of a stream: 512 tokens
STREAMS = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = 300
STEPS = 10


class Streams:
    """Streams with fixed blocks each, in both pools."""

    def __init__(self, model: GptOssModel, count: int) -> None:
        model.allocate_kv(count * BLOCKS_EACH, count * BLOCKS_EACH, BLOCK_TOKENS)
        self._model = model
        self._lengths = [0] * count

    def step(self, count: int, new: int) -> torch.Tensor:
        """`new` tokens for each of the first `count` streams; logits of each one's last."""
        first = torch.tensor(self._lengths[:count], dtype=torch.int32)
        blocks = torch.arange(count * BLOCKS_EACH, dtype=torch.int32).view(count, BLOCKS_EACH)
        for stream in range(count):
            self._lengths[stream] += new
        return self._model.forward(
            StepBatch(
                token_ids=(torch.arange(count * new) * 613 % DEMO["vocab_size"]).to(torch.int32),
                positions=(first[:, None] + torch.arange(new)).flatten().to(torch.int32),
                query_start=(torch.arange(count + 1) * new).to(torch.int32),
                context_lens=first + new,
                full_blocks=blocks,
                window_blocks=blocks,
                window_first_block=torch.zeros(count, dtype=torch.int32),
                logits_rows=(torch.arange(1, count + 1) * new - 1).to(torch.int32),
            )
        )


def timed(work: Callable[[], object], times: int = 1) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    return {"s": (time.perf_counter() - wall) / times, "cpu_s": (time.process_time() - cpu) / times}


def report(what: str, tokens: int, spent: dict[str, float], threads: int) -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    record = {"what": what, "tokens": tokens, "threads": threads, **{k: round(v, 5) for k, v in spent.items()}}
    if tokens:
        record |= {"tokens_per_s": round(tokens / spent["s"], 1), "tokens_per_cpu_s": round(tokens / spent["cpu_s"], 1)}
    print(json.dumps(record | {"cpu": names[0] if names else platform.processor(), "torch": torch.__version__}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "checkpoint", small_config(**DEMO))
        engine = Path(folder) / "engine"
        build_engine(checkpoint, engine, BuildOptions())
        models: list[GptOssModel] = []
        report("load", 0, timed(lambda: models.append(load_model(engine))), threads)
        streams = Streams(models[0], max(STREAMS))
        streams.step(1, 1)
        report("prefill", PROMPT_TOKENS, timed(lambda: streams.step(1, PROMPT_TOKENS)), threads)
        for count in STREAMS:
            streams.step(count, 1)
            spent = timed(lambda count=count: streams.step(count, 1), STEPS)
            report(f"decode of {count} streams", count, spent, threads)


if __name__ == "__main__":
    main()
