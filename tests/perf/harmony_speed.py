"""Microseconds that parsing and detokenising cost per token, on one core: `python tests/perf/harmony_speed.py`.

Prints one JSON line per chunk size, with the processor's name. The bound of the project is 5 us a token.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

from gptoss_trt.runtime.harmony import HarmonyStream, TextStream, Tokenizer

PROSE = "The harbour was quiet. Zwölf Möwen saßen auf der Mauer, 日本の港でも同じです 😀. def f(x): return x + 1\n"
BOUND_US = 5.0


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def completion(tokenizer: Tokenizer, tokens: int) -> list[int]:
    text = PROSE * 40
    parts = [
        f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{text}<|end|><|start|>assistant",
        f"<|channel|>final<|message|>{text}<|end|><|start|>assistant",
    ]
    ids = tokenizer.encode("".join(parts))
    return (ids * (tokens // len(ids) + 1))[:tokens]


def parse(ids: list[int], chunk: int) -> None:
    stream = HarmonyStream(["f"])
    for start in range(0, len(ids), chunk):
        stream.push(ids[start : start + chunk])
    stream.finish("length")


def detokenise(ids: list[int], chunk: int) -> None:
    stream = TextStream()
    for start in range(0, len(ids), chunk):
        stream.push(ids[start : start + chunk])
    stream.finish()


def main() -> None:
    tokenizer = Tokenizer.load()
    ids = completion(tokenizer, 100_000)
    for name, work in (("harmony_stream", parse), ("text_stream", detokenise)):
        for chunk in (1, 4, 32):
            times = []
            for _ in range(3):
                start = time.process_time()
                work(ids, chunk)
                times.append((time.process_time() - start) * 1e6 / len(ids))
            record = {"benchmark": name, "chunk_tokens": chunk, "us_per_token": round(min(times), 2)}
            record |= {
                "us_bound": BOUND_US,
                "tokens": len(ids),
                "cpu": processor(),
                "python": platform.python_version(),
            }
            print(json.dumps(record))


if __name__ == "__main__":
    main()
