"""The committed config.pbtxt files against the generator, and the generator against Triton's own protobuf."""

from __future__ import annotations

from importlib import resources

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gptoss_trt.client import protocol
from gptoss_trt.runtime.triton_models.pbtxt import config_text, quote

REPOSITORY = resources.files("gptoss_trt.model_repository")
NAMES = sorted(protocol.MODELS)


def parsed(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("name", NAMES)
def test_committed_config_is_the_generated_one(name: str) -> None:
    committed = (REPOSITORY / name / "config.pbtxt").read_text(encoding="utf-8")
    assert committed == config_text(name), "run: python -m gptoss_trt.runtime.triton_models.pbtxt model_repository"


@pytest.mark.parametrize("name", NAMES)
def test_generated_text_reads_back_as_the_table(name: str) -> None:
    model, config = protocol.model(name), parsed(config_text(name))
    assert config.name == name
    assert config.max_batch_size == model.max_batch_size
    assert config.model_transaction_policy.decoupled == model.decoupled
    assert [t.name for t in config.input] == [t.name for t in model.inputs]
    for ours, theirs in zip(model.inputs, config.input, strict=True):
        assert model_config_pb2.DataType.Name(theirs.data_type) == f"TYPE_{ours.dtype}"
        assert tuple(theirs.dims) == ours.dims
        assert (theirs.optional, theirs.allow_ragged_batch) == (ours.optional, ours.ragged)
        assert theirs.HasField("reshape") == ours.reshape
        assert list(theirs.reshape.shape) == []
    assert [(t.name, model_config_pb2.DataType.Name(t.data_type), tuple(t.dims)) for t in config.output] == [
        (t.name, f"TYPE_{t.dtype}", t.dims) for t in model.outputs
    ]
    assert {k: v.string_value for k, v in config.parameters.items()} == {
        p.name: str(p.default).lower() if isinstance(p.default, bool) else p.default for p in model.parameters
    }
    assert [step.model_name for step in config.ensemble_scheduling.step] == [step.model for step in model.steps]


def test_a_launch_overrides_parameters_policy_and_names() -> None:
    text = config_text("ensemble", {"engine_dir": "/an engine"}, decoupled=False, suffix="_two")
    config = parsed(text)
    assert config.name == "ensemble_two"
    assert config.parameters["engine_dir"].string_value == "/an engine"
    assert not config.model_transaction_policy.decoupled
    steps = parsed(config_text("pipeline", suffix="_two")).ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocessing_two", "tensorrt_llm_two", "postprocessing_two"]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(protocol.ProtocolError, match="no model has a parameter 'engine_di'; did you mean 'engine_dir'"):
        config_text("ensemble", {"engine_di": "/e"})


def test_a_parameter_of_other_models_is_left_out() -> None:
    assert "chat_mode" not in parsed(config_text("tensorrt_llm", {"chat_mode": "true"})).parameters
    assert parsed(config_text("ensemble", {"chat_mode": "true"})).parameters["chat_mode"].string_value == "true"


def test_models_without_a_unary_variant_stay_decoupled() -> None:
    assert parsed(config_text("chat", decoupled=False)).model_transaction_policy.decoupled
    assert not parsed(config_text("preprocessing")).model_transaction_policy.decoupled


@pytest.mark.parametrize("text", ['a "b" \\ c', "tab\tline\n", "Grüße 🙂", ""])
def test_quoted_strings_read_back(text: str) -> None:
    assert parsed(f"name: {quote(text)}").name == text


def test_instances_are_of_models_that_talk_to_the_engine() -> None:
    counts = {name: config_text(name, instances=3).count("count: 3") for name in NAMES}
    assert counts == {name: int("engine_dir" in config_text(name)) for name in NAMES}
    assert counts["tensorrt_llm"] and not counts["postprocessing"], "a true ensemble's last model keeps the order"
