"""Writes a load for `gptoss-trt bench serve --dataset`: prompt and answer lengths like those of public chat traces.

    python tests/perf/trace_dataset.py --requests 1024 --out trace.jsonl

Lengths are log-normal with the medians that the Splitwise paper (Patel et al., ISCA 2024) gives of Azure's conversation
trace, 1,020 tokens in and 129 out; the spread (sigma 1.0 and 0.9) and the caps are ours. Half of the prompts begin with
one of four system prompts of 512 tokens, as tenants' prompts do: that is what a prefix cache can save. Ids are random.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

MEDIAN_IN, SIGMA_IN, MOST_IN = 1020, 1.0, 16_384
MEDIAN_OUT, SIGMA_OUT, MOST_OUT = 129, 0.9, 1024
SYSTEM_PROMPTS, SYSTEM_TOKENS, SYSTEM_SHARE = 4, 512, 0.5
IDS = 190_000  # ordinary tokens of the vocabulary


def lengths(draw: random.Random) -> tuple[int, int]:
    """Tokens of one prompt and of its answer."""
    tokens_in = min(MOST_IN, max(8, round(draw.lognormvariate(math.log(MEDIAN_IN), SIGMA_IN))))
    tokens_out = min(MOST_OUT, max(2, round(draw.lognormvariate(math.log(MEDIAN_OUT), SIGMA_OUT))))
    return tokens_in, tokens_out


def write(path: Path, requests: int, seed: int) -> None:
    """JSON lines of `requests` requests, equal for equal seeds."""
    draw = random.Random(seed)
    systems = [draw.choices(range(IDS), k=SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(requests):
            tokens_in, tokens_out = lengths(draw)
            system = draw.choice(systems) if draw.random() < SYSTEM_SHARE else []
            ids = system[: tokens_in - 1] + draw.choices(range(IDS), k=max(1, tokens_in - len(system)))
            file.write(json.dumps({"input_ids": ids, "max_tokens": tokens_out}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write(options.out, options.requests, options.seed)


if __name__ == "__main__":
    main()
