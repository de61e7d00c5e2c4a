"""Trains a small EAGLE-3 head for the demo on a CPU and writes it in the published layout, and packed as it ships.

Run: python tests/perf/eagle_demo.py --engine DIR --out HEAD [--documents 600] [--minutes 8]
then: python tests/perf/speculation.py --engine DIR --head HEAD --drafters none,eagle3

The head learns from the engine's own hidden states over training samples of the demo's kinds, in chains of three as it
is used: in step s a position's feature is the head's own output of step s - 1 one position before, and its keys are
those of step 1 up to where the chain began, then the chain's own. The draft vocabulary is what the answers use most.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gptoss_trt.build_engine.demo import PACKED_HEAD
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.dataset import document
from gptoss_trt.build_engine.demo.head import expand_demo_head, pack_head
from gptoss_trt.build_engine.demo.kinds import random_kind, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.runtime.model import GptOssModel, StepBatch, load_model
from gptoss_trt.runtime.model.taps import FeatureTap

LAYERS = (1, 2, 3)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE = 256, 4, 2, 64, 512
THETA, EPS = 10000.0, 1e-5
CHAIN = 3
DRAFT_VOCABULARY = 1024  # 96% of what the demo writes
BLOCK_TOKENS, LONGEST = 64, 512
BATCH, RATE = 12, 2e-3


@dataclass
class Text:
    """A document: its ids [n], the target's hidden states [n, 3 H], and which tokens the model writes [n]."""

    ids: torch.Tensor
    features: torch.Tensor
    learn: torch.Tensor


def collect(model: GptOssModel, count: int, seconds: float) -> list[Text]:
    """Documents with the engine's hidden states, as many as come in time."""
    model.tap = FeatureTap(LAYERS, LONGEST, model.config.hidden_size, torch.device("cpu"))
    blocks = LONGEST // BLOCK_TOKENS
    model.allocate_kv(blocks, blocks, BLOCK_TOKENS)
    codec, rng = Codec(), random.Random(5)
    pool = NamePool.build(codec)
    texts: list[Text] = []
    began = time.monotonic()
    while len(texts) < count and time.monotonic() - began < seconds:
        chat = sample(random_kind(rng), 1_000_000 + rng.randrange(1 << 30), pool, held=False)
        found = document(chat, codec)
        n = len(found.ids)
        if n <= LONGEST:
            _read(model, found.ids)
            features = model.tap.features[:n].clone()
            texts.append(Text(torch.tensor(found.ids), features, torch.tensor(found.learn)))
    return texts


def _read(model: GptOssModel, ids: list[int]) -> None:
    n = len(ids)
    table = torch.arange(-(-n // BLOCK_TOKENS), dtype=torch.int32)[None]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    model.forward(
        StepBatch(ints(ids), ints(list(range(n))), ints([0, n]), ints([n]), table, table, ints([0]), ints([n - 1]))
    )


class Head(nn.Module):
    """The head in fp32, over whole documents."""

    def __init__(self, embedding: torch.Tensor, vocabulary: int) -> None:
        super().__init__()
        self.embedding = embedding
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        self.fc = nn.Linear(len(LAYERS) * embedding.shape[1], HIDDEN, bias=False)
        self.qkv = nn.ModuleDict({name: nn.Linear(2 * HIDDEN, size, bias=False) for name, size in sizes.items()})
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, vocabulary, bias=False)
        names = ("input", "hidden", "after", "last")
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(HIDDEN)) for name in names})

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
        """What `lm_head` reads in each step of a chain [B, n - 1, hidden]: at place p of step s for token p + 2."""
        rows = self.fc(features[:, :-1])
        embedded = self._norm(self.embedding[ids[:, 1:]], "input")
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for _ in range(CHAIN):
            rows = self._layer(embedded, rows, keys, values)
            outputs.append(self._norm(rows, "last"))
            rows = functional.pad(rows[:, :-1], (0, 0, 1, 0))
        return outputs

    def _layer(
        self, embedded: torch.Tensor, rows: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        b, n, _ = rows.shape
        x = torch.cat((embedded, self._norm(rows, "hidden")), -1)
        q, k, v = (self.qkv[name](x).view(b, n, -1, HEAD_DIM).transpose(1, 2) for name in "qkv")
        q, k = _rotated(q), _rotated(k)
        keys.append(k.repeat_interleave(HEADS // KV_HEADS, 1))
        values.append(v.repeat_interleave(HEADS // KV_HEADS, 1))
        mask = _mask(n, len(keys))
        attended = functional.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
        rows = rows + self.out(attended.transpose(1, 2).flatten(2))
        normed = self._norm(rows, "after")
        return rows + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.norms[name], EPS)

    def checkpoint(self, draft_ids: torch.Tensor, vocabulary: int) -> dict[str, torch.Tensor]:
        """The tensors by their published names, bf16."""
        weights = {
            "fc": self.fc.weight,
            **{f"midlayer.self_attn.{name}_proj": layer.weight for name, layer in self.qkv.items()},
            "midlayer.self_attn.o_proj": self.out.weight,
            "midlayer.mlp.gate_proj": self.gate.weight,
            "midlayer.mlp.up_proj": self.up.weight,
            "midlayer.mlp.down_proj": self.down.weight,
            "lm_head": self.lm_head.weight,
            "midlayer.input_layernorm": self.norms["input"],
            "midlayer.hidden_norm": self.norms["hidden"],
            "midlayer.post_attention_layernorm": self.norms["after"],
            "norm": self.norms["last"],
        }
        tensors = {f"{name}.weight": value.detach().bfloat16().contiguous() for name, value in weights.items()}
        known = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, draft_ids, True)
        return tensors | {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": known}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.arange(x.shape[2])[:, None] * frequency
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def _mask(n: int, step: int) -> torch.Tensor:
    """Which keys a place sees in a step of the chain: bool [n, step * n]."""
    place, key = torch.arange(n)[:, None], torch.arange(n)[None]
    parts = [key <= place - (step - 1)]
    parts += [key == place - (step - earlier) for earlier in range(2, step + 1)]
    mask = torch.cat(parts, 1)
    return mask | ~mask.any(1, keepdim=True)  # a place before the chain's beginning: its output is not used


def batches(texts: list[Text], rng: random.Random) -> list[list[Text]]:
    """Documents of like lengths together, in random order."""
    order = sorted(texts, key=lambda text: (len(text.ids) // 32, rng.random()))
    found = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    rng.shuffle(found)
    return found


def loss_of(head: Head, batch: list[Text], to_draft: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """The chain's loss over the tokens that the model writes, and the share of right guesses in each step."""
    ids = nn.utils.rnn.pad_sequence([text.ids for text in batch], batch_first=True)
    features = nn.utils.rnn.pad_sequence([text.features.float() for text in batch], batch_first=True)
    learn = nn.utils.rnn.pad_sequence([text.learn for text in batch], batch_first=True)
    total = torch.zeros(())
    right = []
    for step, rows in enumerate(head(ids, features)):
        targets = torch.full(rows.shape[:2], -1)
        targets[:, step:-1] = to_draft[ids[:, 2 + step :]]
        wanted = torch.zeros_like(targets, dtype=torch.bool)
        wanted[:, step:-1] = learn[:, 2 + step :]
        chosen, goals = head.lm_head(rows[wanted]), targets[wanted]
        total = total + 0.8**step * functional.cross_entropy(chosen, goals, ignore_index=-1)
        right.append(float((chosen.argmax(-1) == goals).float().mean()))
    return total, right


def train(head: Head, texts: list[Text], to_draft: torch.Tensor, seconds: float) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rng, began, epoch = random.Random(1), time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        seen: list[list[float]] = []
        for batch in batches(texts, rng):
            spent = time.monotonic() - began
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (epoch * 20 + len(seen) + 1) / 20) * max(0.02, 1 - spent / seconds)
            loss, right = loss_of(head, batch, to_draft)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            seen.append(right)
            if spent > seconds:
                break
        epoch += 1
        shares = torch.tensor(seen).mean(0).tolist()
        print(f"epoch {epoch}, {spent:.0f} s: right in each step " + " ".join(f"{s:.3f}" for s in shares), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--engine", type=Path, required=True, help="a built engine of the demo")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=8.0, help="for training; collecting takes as long at most")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = load_model(options.engine)
    with torch.inference_mode():
        texts = collect(model, options.documents, 60 * options.minutes)
    texts = [Text(text.ids.clone(), text.features.clone(), text.learn.clone()) for text in texts]
    counts = Counter(token for text in texts for token in text.ids[text.learn].tolist())
    draft_ids = torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCABULARY)))
    written = sum(counts.values())
    covered = sum(counts[token] for token in draft_ids.tolist()) / written
    print(f"{len(texts)} documents, {written} tokens to learn, {covered:.3f} in {len(draft_ids)} ids", flush=True)
    to_draft = torch.full((model.config.vocab_size,), -1)
    to_draft[draft_ids] = torch.arange(len(draft_ids))
    head = Head(model.embedding.float(), len(draft_ids))
    train(head, texts, to_draft, 60 * options.minutes)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": WIDE, "num_hidden_layers": 1,
        "vocab_size": model.config.vocab_size, "draft_vocab_size": len(draft_ids), "rms_norm_eps": EPS,
        "rope_theta": THETA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    size = pack_head(head.checkpoint(draft_ids, model.config.vocab_size), config, options.out / PACKED_HEAD.name)
    expand_demo_head(options.out, packed=options.out / PACKED_HEAD.name)
    print(f"wrote {options.out}, {sum(p.numel() for p in head.parameters())} parameters, {size} bytes packed")


if __name__ == "__main__":
    main()
