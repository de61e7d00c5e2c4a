"""What dense weights in FP8 do to the demo's final logits: divergence and top-1 agreement against dense BF16.

    python tests/perf/dense_formats.py --samples 8

Held-out samples of all kinds, each answer read along with its prompt (teacher-forced), so both formats see the same
text. One JSON line a format: `fp8_block128`, and `lm_head`, where the layers keep BF16. Per written token: nats of
KL(BF16 || FP8), mean, 99th percentile and largest; the share whose best token is the same; the largest margin, in
probability, that BF16 had for its own best token where it is not. Without --engine the shipped weights are expanded.
Four minutes of a core for each sample of a kind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.dataset import document, prompt_ids
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.runtime.model import GptOssModel, StepBatch, load_model

BLOCK_TOKENS = 64
MOST_TOKENS = 2048


def logits_of(model: GptOssModel, ids: list[int], written: int) -> torch.Tensor:
    """fp32 [written, V]: what the model thinks at each of the last `written` tokens of one text, before it sees it."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    count = len(ids) - 1
    blocks = torch.arange(-(-count // BLOCK_TOKENS), dtype=torch.int32)[None]
    return model.forward(
        StepBatch(
            token_ids=ints(ids[:-1]),
            positions=ints(list(range(count))),
            query_start=ints([0, count]),
            context_lens=ints([count]),
            full_blocks=blocks,
            window_blocks=blocks,
            window_first_block=ints([0]),
            logits_rows=ints(list(range(count - written, count))),
        )
    )


class Comparison:
    """Logits of a format against BF16's, token by token."""

    def __init__(self) -> None:
        self._nats: list[torch.Tensor] = []
        self._margins: list[torch.Tensor] = []  # of tokens whose best differs
        self._agreeing = 0

    def add(self, wanted: torch.Tensor, got: torch.Tensor) -> None:
        wide, seen = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
        self._nats.append((wide.exp() * (wide - seen)).sum(-1))
        best, other = wanted.argmax(-1), got.argmax(-1)
        row = torch.arange(len(best))
        differs = best != other
        self._agreeing += int((~differs).sum())
        self._margins.append((wide[row, best].exp() - wide[row, other].exp())[differs])

    def record(self, name: str) -> dict[str, float | str]:
        nats, margins = torch.cat(self._nats), torch.cat(self._margins)
        return {
            "dense": name,
            "tokens": len(nats),
            "kl_mean": float(f"{nats.mean():.4g}"),
            "kl_p99": float(f"{nats.quantile(0.99):.4g}"),
            "kl_max": float(f"{nats.max():.4g}"),
            "top1_agreement": round(self._agreeing / len(nats), 5),
            "largest_margin_lost": round(float(margins.max()), 4) if len(margins) else 0.0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=8, help="held-out samples of each kind")
    parser.add_argument("--checkpoint", type=Path, help="an expanded checkpoint of the demo")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--json", type=Path, help="file for the lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    codec = Codec()
    pool = NamePool.build(codec)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = options.checkpoint or expand_demo_checkpoint(folder / "checkpoint")
        models = {}
        for dense in ("bf16", "fp8_block128", "lm_head"):
            if dense != "lm_head":
                build_engine(checkpoint, folder / dense, BuildOptions(dense=dense))  # type: ignore[arg-type]
            models[dense] = load_model(folder / (dense if dense != "lm_head" else "bf16"))
            models[dense].allocate_kv(MOST_TOKENS // BLOCK_TOKENS, MOST_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)
        fp8, head = models["fp8_block128"], models["lm_head"]
        head._final_norm, head._lm_head = fp8._final_norm, fp8._lm_head
        compared = {dense: Comparison() for dense in models if dense != "bf16"}
        for kind in KINDS.values():
            for number in range(options.samples):
                chat = sample(kind, number, pool, held=True)
                ids = document(chat, codec, target_only=True).ids
                written = len(ids) - len(prompt_ids(chat, codec))
                wanted = logits_of(models["bf16"], ids, written)
                for dense, comparison in compared.items():
                    comparison.add(wanted, logits_of(models[dense], ids, written))
    lines = [json.dumps(comparison.record(dense)) for dense, comparison in compared.items()]
    print("\n".join(lines))
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
