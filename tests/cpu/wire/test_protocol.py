"""The wire table against the record of the repository that existing clients were written against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptoss_trt.client import protocol
from gptoss_trt.client.protocol import Model, Tensor

RECORD = json.loads((Path(__file__).parents[2] / "data" / "wire_tables.json").read_text(encoding="utf-8"))["models"]
ADDED_INPUTS = {"tensorrt_llm": {"min_length"}, "ensemble": {"min_length"}, "tensorrt_llm_bls": {"min_length"}}
ADDED_OUTPUTS = {
    "tensorrt_llm": {"finish_reason"},
    "ensemble": {"finish_reason"},
    "tensorrt_llm_bls": {"finish_reason"},
}


def flags(tensor: Tensor) -> list[str]:
    return [name for name in ("optional", "ragged", "reshape") if getattr(tensor, name)]


def recorded(rows: list[list]) -> dict[str, tuple]:
    return {name: ("FP32" if dtype == "?" else dtype, tuple(dims), tuple(flag)) for name, dtype, dims, flag in rows}


def declared(tensors: tuple[Tensor, ...]) -> dict[str, tuple]:
    assert len({t.name for t in tensors}) == len(tensors), "a tensor is declared twice"
    return {t.name: (t.dtype, t.dims, tuple(flags(t))) for t in tensors}


@pytest.mark.parametrize("name", sorted(RECORD))
def test_tensors_equal_the_record_and_the_additions(name: str) -> None:
    model = protocol.model(name)
    for kind, added in (("input", ADDED_INPUTS), ("output", ADDED_OUTPUTS)):
        ours = declared(getattr(model, f"{kind}s"))
        assert {n: row for n, row in ours.items() if n not in added.get(name, set())} == recorded(RECORD[name][kind])
        assert set(ours) - {row[0] for row in RECORD[name][kind]} == added.get(name, set())


def test_min_length_has_the_form_of_min_tokens() -> None:
    for name in ADDED_INPUTS:
        model = protocol.model(name)
        assert (
            declared((model.input("min_length"),))["min_length"] == declared((model.input("min_tokens"),))["min_tokens"]
        )


def test_text_names_map_onto_engine_inputs() -> None:
    engine = {t.name for t in protocol.model("tensorrt_llm").inputs}
    text = {t.name for t in protocol.model("tensorrt_llm_bls").inputs}
    assert set(protocol.TEXT_TO_ENGINE) <= text
    assert set(protocol.TEXT_TO_ENGINE.values()) <= engine


def test_refusals_never_hide_a_required_input() -> None:
    for model in protocol.MODELS.values():
        for tensor in model.inputs:
            assert not tensor.refuse or tensor.optional, f"{model.name}.{tensor.name}"


@pytest.mark.parametrize(("name", "nearest"), [("ensembel", "ensemble"), ("tensorrt_lm", "tensorrt_llm")])
def test_unknown_model_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=f"did you mean '{nearest}'"):
        protocol.model(name)


def parse(model: Model, **values: str) -> dict[str, str | bool]:
    return model.parse_parameters(values)


def test_parameters_parse_by_the_type_of_their_default() -> None:
    model = protocol.model("ensemble")
    assert parse(model)["skip_special_tokens"] is True
    assert parse(model, skip_special_tokens="False", engine_dir="/e")["skip_special_tokens"] is False
    assert parse(model, engine_dir="/e")["engine_dir"] == "/e"
    with pytest.raises(protocol.ProtocolError, match="chat_mode is 'yes'; allowed: true, false"):
        parse(model, chat_mode="yes")
    with pytest.raises(
        protocol.ProtocolError, match=r"'skip_specials' does not exist; did you mean 'skip_special_tokens'"
    ):
        parse(model, skip_specials="true")


def test_pipeline_maps_only_declared_tensors() -> None:
    pipeline = protocol.model("pipeline")
    own = {t.name for t in (*pipeline.inputs, *pipeline.outputs)}
    inner: set[str] = set()
    for step in pipeline.steps:
        model = protocol.model(step.model)
        for tensor, source in step.input_map.items():
            assert model.input(tensor)
            assert source in own or source in inner, f"{step.model}.{tensor} reads {source}, which nothing made"
        for tensor, target in step.output_map.items():
            assert model.output(tensor)
            inner.add(target)
    mapped = {source for step in pipeline.steps for source in step.input_map.values()}
    assert {t.name for t in pipeline.inputs} <= mapped
    assert {t.name for t in pipeline.outputs} <= inner


def test_histograms_and_only_they_have_buckets() -> None:
    for family in protocol.METRICS.values():
        assert bool(family.buckets) == (family.kind == "histogram"), family.name
        assert list(family.buckets) == sorted(family.buckets)
        assert bool(family.label) == bool(family.values), family.name
