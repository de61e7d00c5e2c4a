"""Configurations in both forms, and refusals by key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig

from gptoss_trt.build_engine.model_config import parse_config, read_config
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.build_engine.synthetic import hugging_face_config, openai_config, small_config

CONFIG = small_config()
PATH = Path("config.json")


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_hugging_face_in_both_forms(form: str) -> None:
    parsed = parse_config(hugging_face_config(CONFIG, form), PATH, CONFIG.stop_token_ids)
    assert parsed == CONFIG


def test_openai_has_the_same_numbers() -> None:
    parsed = parse_config(openai_config(CONFIG), PATH, CONFIG.stop_token_ids)
    ids = {"eos_token_id": CONFIG.eos_token_id, "pad_token_id": CONFIG.pad_token_id}
    assert dataclasses.replace(parsed, **ids) == CONFIG


def test_what_transformers_writes(tmp_path: Path) -> None:
    GptOssConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.hidden_size, config.num_heads, config.rope_theta) == (2880, 64, 150000.0)
    assert config.layer_types == ("sliding_attention", "full_attention") * 2
    assert config.max_context == 131072
    assert config.stop_token_ids == HARMONY_STOP_IDS


def test_stop_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(CONFIG)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_config(tmp_path).stop_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 'x'"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(hidden_size="big"), "hidden_size is 'big'; expected a positive integer"),
        (lambda c: c.update(hidden_size=100), "hidden_size 100 is not a multiple of 32"),
        (lambda c: c.update(intermediate_size=33), "intermediate_size 33 is not a multiple of 32"),
        (lambda c: c.pop("vocab_size"), "vocab_size is None"),
        (lambda c: c.update(num_attention_heads=9), "9 is not a multiple of num_key_value_heads 2"),
        (lambda c: c.update(head_dim=15), "head_dim 15 is odd"),
        (lambda c: c.update(num_experts_per_tok=9), "9 experts per token of 8"),
        (lambda c: c.update(model_type="llama"), "model_type is 'llama'; this build implements 'gpt_oss' only"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types .* expected 2 of"),
        (lambda c: c.update(layer_types=["linear", "full_attention"]), "layer_types"),
        (lambda c: c.update(layer_types=[]), "layer_types .* expected 2 of"),
        (lambda c: c.pop("rope_scaling"), "rope_scaling is None"),
        (lambda c: c["rope_scaling"].update(rope_type="llama3"), "rope_scaling: rope_type is 'llama3'"),
        (lambda c: c["rope_scaling"].update(truncate=True), "truncate is True; gpt-oss leaves"),
        (lambda c: c["rope_scaling"].update(factor=-1), "factor is -1; expected a positive number"),
        (lambda c: c["rope_scaling"].update(attention_factor=1.0), "attention_factor is 1.0"),
        (lambda c: c.update(rope_theta=True), "rope_theta is True"),
        (lambda c: c.update(eos_token_id=-3), "eos_token_id is -3; expected a token id"),
        (lambda c: c.pop("num_local_experts"), "neither num_local_experts"),
    ],
)
def test_refusals_name_file_and_key(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    raw = hugging_face_config(CONFIG)
    change(raw)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        parse_config(raw, PATH)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "holds list"), (None, "No such file")])
def test_files_that_are_no_configuration(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_config(tmp_path)
