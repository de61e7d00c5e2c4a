"""The expanded checkpoint: its files, its random rows, and transformers' logits from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gptoss_trt.build_engine.demo import network, pack
from gptoss_trt.build_engine.demo.codec import Codec
from gptoss_trt.build_engine.demo.dataset import prompt_ids
from gptoss_trt.build_engine.demo.expand import expand_demo_checkpoint, packed_path
from gptoss_trt.build_engine.demo.kinds import KINDS, sample
from gptoss_trt.build_engine.demo.names import NamePool


def test_files_and_index(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in checkpoint.glob("model-*.safetensors")}
    for file in set(index["weight_map"].values()):
        with safe_open(checkpoint / file, "pt") as tensors:
            assert set(tensors.keys()) == {name for name, where in index["weight_map"].items() if where == file}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((checkpoint / name).read_text())
    assert (checkpoint / "chat_template.jinja").is_file()
    assert packed_path().stat().st_size < 12 << 20


def test_unused_rows_are_seeded_and_used_rows_trained(checkpoint: Path) -> None:
    packed = pack.read_packed(packed_path())
    with safe_open(checkpoint / "model-00001-of-00002.safetensors", "pt") as tensors:
        rows = tensors.get_tensor("model.embed_tokens.weight")
    assert rows.shape == (201_088, 256)
    used = packed.used_ids.long()
    assert torch.equal(rows[used], packed.tensors["embedding"])
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[used] = False
    assert abs(rows[unused].float().std().item() / packed.embedding_scale - 1) < 0.01
    # PCG64's raw stream is fixed by its definition, so this row is the same everywhere
    first = int(unused.nonzero()[0])
    assert rows[first, :4].tolist() == pack.vocabulary_rows(packed)[0][first, :4].tolist()


def test_transformers_agrees_with_the_trainer(checkpoint: Path, codec: Codec, pool: NamePool) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).float()
    packed = pack.read_packed(packed_path())
    weights, shape = pack.masters_of(packed), network.Shape()
    ids = prompt_ids(sample(KINDS["weather_two_answer"], 1, pool, held=True), codec)
    assert len(ids) > shape.window
    used = {token: row for row, token in enumerate(packed.used_ids.tolist())}
    rows = torch.tensor([[used[token] for token in ids]])
    place = torch.arange(len(ids))[None]
    off = torch.tensor(False)
    tables = network.yarn_tables(len(ids))
    x = weights["embedding"][rows]
    hidden, _ = network.hidden_states(weights, shape, x, torch.zeros_like(rows), place, tables, off)
    ours = hidden[0, -1] @ weights["head"].T
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, -1]
    assert (theirs[packed.used_ids.long()] - ours).abs().max() < 2e-3 * theirs.abs().max()
    assert int(theirs.argmax()) == int(packed.used_ids[ours.argmax()])


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        expand_demo_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
