"""Every op has a GPU implementation, and each takes its op's arguments in the schema's order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gptoss_trt.ops import dispatch
from gptoss_trt.ops.schemas import SCHEMAS

ROOT = Path(__file__).parents[3]


def schema_names(op: str) -> list[str]:
    return [argument.split()[-1] for argument in SCHEMAS[op].arguments.split(", ")]


@pytest.mark.parametrize("op", sorted(SCHEMAS))
def test_a_triton_implementation_takes_the_schemas_arguments(op: str) -> None:
    target = dispatch._TARGETS[op, "triton"]
    module, _, function = target.partition(":")
    path = ROOT / "plugins" / (module.removeprefix("gptoss_trt.").replace(".", "/") + ".py")
    (node,) = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert [argument.arg for argument in node.args.args] == schema_names(op)
