"""The EAGLE-3 head that ships for the demo: its file, and how many of its drafts come true."""

from __future__ import annotations

import json
import lzma
import math
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_trt.build_engine.demo import PACKED_HEAD, PACKED_WEIGHTS
from gptoss_trt.build_engine.demo.answer import STOPS
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.dataset import prompt_ids
from gptoss_trt.build_engine.demo.head import expand_demo_head, pack_head
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool
from gptoss_trt.build_engine.demo.pack import PackError
from gptoss_trt.runtime.engine.messages import Error, Sampling, Submit, Tokens
from gptoss_trt.runtime.engine.model_core import load_core
from gptoss_trt.runtime.engine.options import EngineOptions

ASKED = ("weather_answer_real", "json_record")
LONGEST = 24  # tokens of an answer: the reference ops are slow
LEAST_ACCEPTED = 0.3  # of the drafts for held-out prompts


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand_demo_head(tmp_path_factory.mktemp("head") / "head")


def random_head(head: Path, folder: Path) -> Path:
    """A head of the same layout whose matrices are random."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(head / "model.safetensors")
    for name, value in tensors.items():
        if value.ndim == 2:
            tensors[name] = (torch.randn(value.shape, generator=generator) / math.sqrt(value.shape[1])).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((head / "config.json").read_text())
    return folder


def answers(engine: Path, head: Path, codec: Codec, pool: NamePool) -> tuple[dict[str, list[int]], float]:
    """Greedy answers to held-out prompts, and which share of the drafts was accepted."""
    options = EngineOptions(device="cpu", threads=2, kv_bytes=64 << 20, speculation="eagle3", draft_engine=str(head))
    core = load_core(engine, options)
    ids: dict[str, list[int]] = {}
    for name in ASKED:
        prompt = tuple(prompt_ids(sample(KINDS[name], 3, pool, held=True), codec))
        core.submit((1, name), Submit(name, prompt, LONGEST, sampling=Sampling(temperature=0.0), stop_ids=STOPS), 1)
    while core.has_work():
        for (_, name), event in core.step():
            assert not isinstance(event, Error), event
            if isinstance(event, Tokens):
                ids.setdefault(name, []).extend(event.token_ids)
    counters = core.stats()["counters"]
    assert counters["draft_tokens"] > 10
    return ids, counters["accepted_draft_tokens"] / counters["draft_tokens"]


def test_it_is_small_and_packs_as_it_was(head: Path, tmp_path: Path) -> None:
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    assert pack_head(tensors, config, tmp_path / PACKED_HEAD.name) < 2 << 20
    again = load_file(expand_demo_head(tmp_path / "again", packed=tmp_path / PACKED_HEAD.name) / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_other_files_are_refused(tmp_path: Path) -> None:
    other, array = tmp_path / "other.xz", struct.pack("<Q", 2) + b"[]"
    inside = lzma.decompress(PACKED_HEAD.read_bytes())
    wrong = [(b"no head", "not an xz file"), (PACKED_HEAD.read_bytes()[:1000], "not an xz file")]
    wrong += [(lzma.compress(data, preset=0), "not one of safetensors") for data in (b"", b"text", array, inside[:-9])]
    for data, reason in [*wrong, (PACKED_WEIGHTS.read_bytes(), "has the format")]:
        other.write_bytes(data)
        with pytest.raises(PackError, match=reason):
            expand_demo_head(tmp_path / "none", packed=other)
    assert not (tmp_path / "none").exists()


@pytest.mark.timeout(300)
def test_its_drafts_come_true_and_those_of_a_random_head_do_not(
    engine: Path, head: Path, codec: Codec, pool: NamePool, tmp_path: Path
) -> None:
    got, accepted = answers(engine, head, codec, pool)
    same, by_chance = answers(engine, random_head(head, tmp_path / "random"), codec, pool)
    print(f"accepted: {accepted:.2f}, of a random head {by_chance:.2f}")
    assert got == same, "drafts never change an answer"
    assert accepted > LEAST_ACCEPTED > 0.1 > by_chance
