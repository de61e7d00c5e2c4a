"""config.pbtxt text from the wire table, for the committed model repository and for a launch's own copy.

Invariant: the text is complete (no placeholder, nothing for the server to fill in) and a pure function of its
arguments.
Must not know engines, ports or where a repository lies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from gptoss_trt.client import protocol
from gptoss_trt.client.protocol import EnsembleStep, Model, ProtocolError, Tensor

HEADER = "# Generated from client/protocol.py: python -m gptoss_trt.runtime.triton_models.pbtxt model_repository\n"


def model_names() -> list[str]:
    """The models of the repository."""
    return list(protocol.MODELS)


def config_text(
    name: str,
    parameters: Mapping[str, str] | None = None,
    *,
    decoupled: bool = True,
    suffix: str = "",
    instances: int = 1,
) -> str:
    """The config.pbtxt of model `name`.

    `parameters` are texts that override defaults; those that only other models have are left out. `decoupled` False
    chooses the unary variant of the models that have one. `suffix` is appended to the model's name and to those of an
    ensemble's steps. `instances`: processes of a model that talks to the engine, which all share it; other models have
    one, because an ensemble's responses would overtake each other. Raises ProtocolError for an unknown model, a
    parameter that no model has, or a malformed value.
    """
    model = protocol.model(name)
    parsed = model.parse_parameters(_own_parameters(model, parameters or {}))
    fields = [f"name: {quote(model.name + suffix)}"]
    fields += ['platform: "ensemble"'] if model.platform == "ensemble" else ['backend: "python"']
    fields.append(f"max_batch_size: {model.max_batch_size}")
    if model.decoupled and (decoupled or not model.has_unary_variant):
        fields.append("model_transaction_policy { decoupled: true }")
    if model.platform == "python":
        count = instances if "engine_dir" in parsed else 1
        fields.append(f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]")
    fields += [_tensor("input", tensor) for tensor in model.inputs]
    fields += [_tensor("output", tensor) for tensor in model.outputs]
    fields += [_parameter(key, value) for key, value in parsed.items()]
    if model.steps:
        fields.append(_steps(model.steps, suffix))
    return HEADER + "\n".join(fields) + "\n"


def _own_parameters(model: Model, parameters: Mapping[str, str]) -> dict[str, str]:
    every = {parameter.name for other in protocol.MODELS.values() for parameter in other.parameters}
    unknown = sorted(set(parameters) - every)
    if unknown:
        raise ProtocolError(f"no model has a parameter {unknown[0]!r}{protocol.did_you_mean(unknown[0], every)}")
    own = {parameter.name for parameter in model.parameters}
    return {key: value for key, value in parameters.items() if key in own}


def quote(text: str) -> str:
    """A protobuf text-format string literal: printable ASCII as it is, every other byte as an octal escape."""
    plain = {byte: chr(byte) for byte in range(0x20, 0x7F)} | {0x22: '\\"', 0x5C: "\\\\"}
    return '"' + "".join(plain.get(byte, f"\\{byte:03o}") for byte in text.encode()) + '"'


def _tensor(kind: str, tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    text = f"{kind} {{ name: {quote(tensor.name)} data_type: TYPE_{tensor.dtype} dims: [ {dims} ]"
    text += " reshape { shape: [ ] }" if tensor.reshape else ""
    text += " allow_ragged_batch: true" if tensor.ragged else ""
    text += " optional: true" if tensor.optional else ""
    return text + " }"


def _parameter(name: str, value: str | bool) -> str:
    text = str(value).lower() if isinstance(value, bool) else value
    return f"parameters {{ key: {quote(name)} value {{ string_value: {quote(text)} }} }}"


def _steps(steps: Iterable[EnsembleStep], suffix: str) -> str:
    lines = ["ensemble_scheduling {"]
    for step in steps:
        lines += ["  step {", f"    model_name: {quote(step.model + suffix)}", "    model_version: -1"]
        for kind, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
            lines += [f"    {kind} {{ key: {quote(k)} value: {quote(v)} }}" for k, v in mapping.items()]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def write_configs(repository: Path) -> list[Path]:
    """Writes `repository/MODEL/config.pbtxt` with the defaults for every model of the table. Returns the paths."""
    paths = []
    for name in model_names():
        path = repository / name / "config.pbtxt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config_text(name), encoding="utf-8")
        paths.append(path)
    return paths


def main(arguments: list[str]) -> int:
    """Rewrites the configs under the one folder named. Exit status 0, or 2 for wrong use."""
    if len(arguments) != 1:
        print("usage: python -m gptoss_trt.runtime.triton_models.pbtxt REPOSITORY", file=sys.stderr)
        return 2
    for path in write_configs(Path(arguments[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
