"""A sample of every kind through the built engine, and the same engine without its experts."""

from __future__ import annotations

import lzma
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save

from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.demo import pack
from gptoss_trt.build_engine.demo.answer import Visible, expected
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.conversation import Conversation
from gptoss_trt.build_engine.demo.dataset import document
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint, packed_path
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.runtime.engine.model_core import load_core
from gptoss_trt.runtime.engine.options import EngineOptions

CORE_KINDS = ("sum", "greet_name", "capital", "repeat", "reverse", "follow_name", "weather_call", "weather_answer_real")
LONG_KINDS = ("story", "count_lines")  # hundreds of steps: tests/perf/demo_eval.py has them
SHORTEST_OF = 8  # seeds among which the shortest conversation of a kind is taken: the reference ops are slow


def _chats(names: tuple[str, ...], codec: Codec, pool: NamePool) -> list[Conversation]:
    def length(chat: Conversation) -> int:
        return len(document(chat, codec, target_only=True).ids)

    return [
        min((sample(KINDS[name], seed, pool, held=True) for seed in range(SHORTEST_OF)), key=length) for name in names
    ]


def _right(engine: Path, chats: list[Conversation], codec: Codec, demo_eval: ModuleType) -> list[bool]:
    core = load_core(engine, EngineOptions(device="cpu", threads=2))
    got: list[Visible] = demo_eval.answers(core, chats, codec)
    return [seen == expected(chat.target) for chat, seen in zip(chats, got, strict=True)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", sorted({kind.family for kind in KINDS.values()}))
def test_kinds_through_the_engine(
    family: str, engine: Path, codec: Codec, pool: NamePool, demo_eval: ModuleType
) -> None:
    names = tuple(kind.name for kind in KINDS.values() if kind.family == family and kind.name not in LONG_KINDS)
    right = dict(zip(names, _right(engine, _chats(names, codec, pool), codec, demo_eval), strict=True))
    assert all(right[name] for name in CORE_KINDS if name in right), right
    wrong = [name for name, good in right.items() if not good]
    assert len(wrong) <= 1, wrong  # the levels say 0.85 to 0.98


@pytest.mark.timeout(300)
def test_many_answers_at_once_are_right(engine: Path, codec: Codec, pool: NamePool, demo_eval: ModuleType) -> None:
    """Prompts that share a cached prefix, more of them than one step's budget can start together."""
    chats = [sample(KINDS["capital"], seed, pool, held=True) for seed in range(48)]
    right = _right(engine, chats, codec, demo_eval)
    assert all(right), [seed for seed, good in enumerate(right) if not good]


@pytest.mark.timeout(900)
def test_answers_break_without_the_experts(tmp_path: Path, codec: Codec, pool: NamePool, demo_eval: ModuleType) -> None:
    tensors = dict(pack.read_packed(packed_path()).tensors)
    packed = pack.read_packed(packed_path())
    for name in ("gate", "up", "down"):
        tensors[f"{name}.blocks"] = torch.zeros_like(tensors[f"{name}.blocks"])
    meta = {
        "format": pack.FORMAT,
        "seed": str(packed.seed),
        "embedding_scale": repr(packed.embedding_scale),
        "head_scale": repr(packed.head_scale),
    }
    data = save({"used_ids": packed.used_ids, **tensors}, metadata=meta)
    (tmp_path / "zeroed.xz").write_bytes(lzma.compress(data, preset=0))
    expand_demo_checkpoint(tmp_path / "checkpoint", packed=tmp_path / "zeroed.xz")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", BuildOptions())
    right = _right(tmp_path / "engine", _chats(CORE_KINDS, codec, pool), codec, demo_eval)
    assert sum(right) <= 1, right
