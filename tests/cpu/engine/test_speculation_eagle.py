"""The EAGLE-3 head on a small engine: what is loaded, the chain against a plain fp32 form of it, and exact output."""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.synthetic import small_config, write_checkpoint
from gptoss_trt.ops.prepare import RopeConfig
from gptoss_trt.runtime.engine.core import EngineCore, EngineLoadError
from gptoss_trt.runtime.engine.messages import IDS, Error, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import ModelCore, load_core
from gptoss_trt.runtime.engine.options import EngineOptions
from gptoss_trt.runtime.engine.scheduler import Work
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.speculation.eagle_head import HeadConfig
from gptoss_trt.runtime.engine.speculation.length import StepCost
from gptoss_trt.runtime.engine.steps import assemble
from gptoss_trt.runtime.engine.table_rows import TableRows
from gptoss_trt.runtime.model import load_model
from gptoss_trt.runtime.model.taps import FeatureTap

OPTIONS = EngineOptions(threads=1, kv_bytes=8 << 20, max_batch=8, step_tokens=40, block_tokens=16, device="cpu")
CONFIG = small_config(num_layers=8)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, DRAFT_VOCABULARY = 96, 4, 2, 64, 160, 50
FREE = StepCost(((1, 1.0), (1000, 1.0)))
ROUNDING = 0.08  # of logits that spread over some units

Tensors = dict[str, torch.Tensor]


def head_json(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDE,
        "vocab_size": CONFIG.vocab_size,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_hidden_layers": 1,
        **changes,
    }


def head_tensors(seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn((rows, columns), generator=generator) / math.sqrt(columns)).bfloat16()

    def gain() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).bfloat16()

    ids = torch.randperm(CONFIG.vocab_size, generator=generator)[:DRAFT_VOCABULARY].sort().values
    return {
        "fc.weight": matrix(HIDDEN, 3 * CONFIG.hidden_size),
        "midlayer.input_layernorm.weight": gain(),
        "midlayer.hidden_norm.weight": gain(),
        "midlayer.post_attention_layernorm.weight": gain(),
        "norm.weight": gain(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(WIDE, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(WIDE, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, WIDE),
        "lm_head.weight": matrix(DRAFT_VOCABULARY, HIDDEN) * 3,
        "embed_tokens.weight": matrix(CONFIG.vocab_size, HIDDEN) * 8,
        "d2t": ids - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.zeros(CONFIG.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }


def write_head(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_json(**changes)))
    save_file(tensors or head_tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    write_checkpoint(folder / "checkpoint", CONFIG)
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions())
    return folder / "engine"


def load(engine_dir: Path, head: Path | None) -> EngineCore:
    if head is None:
        return load_core(engine_dir, OPTIONS)
    return load_core(engine_dir, dataclasses.replace(OPTIONS, speculation="eagle3", draft_engine=str(head)))


def inner(core: EngineCore) -> ModelCore:
    found = core._core  # type: ignore[attr-defined]
    assert isinstance(found, ModelCore)
    return found


def submits() -> list[Submit]:
    """Greedy and sampled requests, the last two with a beginning that the cache knows and with siblings."""
    generator = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(0, 290, (n,), generator=generator).tolist()) for n in (3, 33, 90)]
    prompts += [(*prompts[2][:64], 5, 6), prompts[2][:70]]
    return [
        Submit(
            f"r{number}",
            prompt,
            22,
            sampling=Sampling(temperature=0.7 * (number % 2), seed=number),
            n=1 + number // 4,
            logprobs=20,
        )
        for number, prompt in enumerate(prompts)
    ]


def answers(core: EngineCore) -> dict[tuple[str, int], list[tuple[int, dict[int, float]]]]:
    got: dict[tuple[str, int], list[tuple[int, dict[int, float]]]] = {}
    for submit in submits():
        core.submit((1, submit.request_id), submit, 1)
        for _ in range(4):
            take(core, got)
    while core.has_work():
        take(core, got)
    return got


def take(core: EngineCore, got: dict[tuple[str, int], list[tuple[int, dict[int, float]]]]) -> None:
    for (_, name), event in core.step():
        assert not isinstance(event, Error), event
        if isinstance(event, Tokens):
            assert event.logprobs is not None
            pairs = zip(event.token_ids, event.logprobs, strict=True)
            got.setdefault((name, event.sequence), []).extend((token, dict(entry.top)) for token, entry in pairs)


class Recorder:
    """Remembers what a drafter was asked and what it drafted."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.seen: list[tuple[list[int], int, bool, list[int]]] = []  # tokens, computed, greedy, draft

    def draft(self, wanted: Any) -> list[list[int]]:
        drafts: list[list[int]] = self.drafter.draft(wanted)
        for (sequence, _), draft in zip(wanted, drafts, strict=True):
            greedy = sequence.request.submit.sampling.temperature == 0.0
            self.seen.append((list(sequence.tokens), sequence.computed, greedy, list(draft)))
        return drafts


def features_of(engine_dir: Path, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """The target's hidden states of all tokens, computed at once."""
    model = load_model(engine_dir)
    model.tap = FeatureTap(layers, 400, CONFIG.hidden_size, torch.device("cpu"))
    model.allocate_kv(40, 40, 16)
    request = Request((0, "r"), Submit("r", tuple(tokens), 1), 0, 0, 0, b"")
    sequence = Sequence(request, 0, array(IDS, tokens))
    sequence.table.full = sequence.table.window = list(range(-(-len(tokens) // 16)))
    model.forward(assemble([Work(sequence, 0, len(tokens), 1)], TableRows(16, CONFIG.sliding_window), "cpu"))
    return model.tap.features[: len(tokens)].clone()


class PlainHead:
    """The head in fp32 without a cache: all positions each time."""

    def __init__(self, tensors: Tensors, before: bool) -> None:
        self.w = {name: tensor.float() for name, tensor in tensors.items()}
        self.before = before
        self.ids = tensors["d2t"] + torch.arange(DRAFT_VOCABULARY)

    def chain(self, tokens: list[int], features: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Logits of the first `count` tokens behind `tokens`, `features` being those of all but the last."""
        inputs, rows = list(tokens[1:]), features.float() @ self.w["fc.weight"].T
        out = []
        for _ in range(count):
            hidden = self.layer(inputs, rows)
            out.append(self.norm(hidden[-1:], "norm")[0] @ self.w["lm_head.weight"].T)
            inputs.append(int(self.ids[out[-1].argmax()]))
            rows = torch.cat((rows, hidden[-1:]))
        return out

    def layer(self, inputs: list[int], rows: torch.Tensor) -> torch.Tensor:
        w, n = self.w, len(inputs)
        normed = self.norm(rows, "midlayer.hidden_norm")
        residual = normed if self.before else rows
        embedded = self.norm(w["embed_tokens.weight"][inputs], "midlayer.input_layernorm")
        x = torch.cat((embedded, normed), 1)
        q, k, v = (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        q = self.rotated(q.view(n, HEADS, HEAD_DIM))
        k = self.rotated(k.view(n, KV_HEADS, HEAD_DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.view(n, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        hidden = torch.ones(n, n).triu(1).bool()
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        residual = residual + attended.flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        normed = self.norm(residual, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
        up = normed @ w["midlayer.mlp.up_proj.weight"].T
        return residual + (gate * up) @ w["midlayer.mlp.down_proj.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    @staticmethod
    def rotated(x: torch.Tensor) -> torch.Tensor:
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = (torch.arange(len(x))[:, None] * frequency)[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


@pytest.mark.parametrize("before", [False, True], ids=["norm after residual", "norm before residual"])
def test_chains_are_those_of_the_plain_form(engine_dir: Path, tmp_path: Path, before: bool) -> None:
    """Prompts in chunks, rejected drafts, blocks shared with others and siblings included."""
    core = load(engine_dir, write_head(tmp_path / "head", norm_before_residual=before))
    speculator = inner(core)._scheduler._speculator
    assert speculator is not None
    speculator._cost, speculator.pass_cost = FREE, 0.0
    recorder = Recorder(speculator._drafter)
    speculator._drafter = recorder
    answers(core)
    plain = PlainHead(head_tensors(), before)
    ids = plain.ids.tolist()
    checked = equal = 0
    layers = HeadConfig.read(tmp_path / "head", CONFIG).features
    assert layers == (2, 4, 5)
    for tokens, computed, greedy, draft in recorder.seen[::7]:
        assert computed == len(tokens) - 1 and all(token in ids for token in draft)
        if not greedy or not draft:
            continue
        features = features_of(engine_dir, tokens[:-1], layers)
        for token, logits in zip(draft, plain.chain(tokens, features, len(draft)), strict=True):
            checked += 1
            behind = float(logits.max() - logits[ids.index(token)])
            assert behind < ROUNDING, f"token {token} is {behind:.3f} below the plain form's best"
            equal += behind == 0.0
            if behind:
                break  # the chains differ from here on
    assert checked > 10 and equal > 0.8 * checked


def test_tokens_are_those_without_a_head(engine_dir: Path, tmp_path: Path) -> None:
    core = load(engine_dir, write_head(tmp_path / "head"))
    speculator = inner(core)._scheduler._speculator
    assert speculator is not None
    speculator._cost, speculator.pass_cost = FREE, 0.0
    usual, got = answers(load(engine_dir, None)), answers(core)
    assert core.stats()["counters"]["draft_tokens"] > 100
    assert got.keys() == usual.keys()
    for key, expected in usual.items():
        pairs = enumerate(zip(expected, got[key], strict=True))
        first = next(((place, a, b) for place, (a, b) in pairs if a[0] != b[0]), None)
        if first is not None:
            place, (token, best), (other, _) = first
            assert best[token] - best[other] < 0.05, f"{key}: token {place} is {token}, {other} with a head"


def test_a_tap_holds_what_enters_a_layer(engine_dir: Path) -> None:
    tokens = [7, 8, 9]
    features = features_of(engine_dir, tokens, (0, 5, 5))
    assert torch.equal(features[:, : CONFIG.hidden_size], load_model(engine_dir).embedding[tokens])
    later, again = features[:, CONFIG.hidden_size :].chunk(2, 1)
    assert bool((later != 0).any()) and torch.equal(later, again)
    tap = FeatureTap((0,), 2, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="3 tokens; the tap holds 2"):
        tap.take(0, torch.zeros(3, 4))


def test_other_spellings_of_the_layout_are_read(engine_dir: Path, tmp_path: Path) -> None:
    tensors = {f"model.{name.replace('midlayer', 'layers.0')}": t for name, t in head_tensors().items()}
    for name in ("lm_head.weight", "d2t", "t2d"):
        tensors[name] = tensors.pop(f"model.{name}")
    load(engine_dir, write_head(tmp_path / "a", tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}))
    assert HeadConfig.read(tmp_path / "a", CONFIG).features == (1, 2, 4)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    load(engine_dir, write_head(tmp_path / "b", rope_scaling=yarn, rope_theta=150000.0))
    assert HeadConfig.read(tmp_path / "b", CONFIG).rope == RopeConfig(HEAD_DIM)  # gpt-oss's own rotation


def without(name: str) -> Tensors:
    tensors = head_tensors()
    del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "changes", "text"),
    [
        (lambda: without("fc.weight"), {}, "lacks fc.weight"),
        (lambda: head_tensors() | {"extra.weight": torch.zeros(2)}, {}, "extra.weight belongs to no EAGLE-3 head"),
        (lambda: head_tensors() | {"norm.weight": torch.zeros(5)}, {}, r"norm.weight is \(5,\), expected \(96,\)"),
        (lambda: without("d2t"), {}, "50 of 320 tokens and no d2t"),
        (lambda: head_tensors() | {"d2t": torch.full((50,), 300)}, {}, "d2t gives ids 300 to 349"),
        (lambda: without("embed_tokens.weight"), {}, f"has no embed_tokens; the engine's are {CONFIG.hidden_size}"),
        (head_tensors, {"vocab_size": 999}, "vocabulary of 999 tokens, the engine has 320"),
        (head_tensors, {"num_hidden_layers": 2}, "has 2 layers"),
        (head_tensors, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (head_tensors, {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "truncate false"),
        (head_tensors, {"rope_scaling": {"rope_type": "yarn", "truncate": False}}, "no entry 'factor'"),
        (head_tensors, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"layers \[1, 2, 9\]"),
        (head_tensors, {"hidden_size": None}, "size of hidden is None"),
    ],
)
def test_what_is_wrong_with_a_head_is_said(
    engine_dir: Path, tmp_path: Path, tensors: Callable[[], Tensors], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(EngineLoadError, match=text):
        load(engine_dir, write_head(tmp_path / "head", tensors(), **changes))


def test_an_absent_head_is_said(engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match="cannot be loaded"):
        load(engine_dir, tmp_path / "absent")
