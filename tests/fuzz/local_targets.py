"""Targets that run in this process: frames, OpenAI bodies, engine directories, checkpoints, the scheduler.

Invariant: each refuses by its own error type only. Files are made in a folder of the run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mutate
import torch

from gptoss_trt.build_engine import inspection
from gptoss_trt.build_engine.builder import BuildOptions, build_engine
from gptoss_trt.build_engine.engine_folder import hash_file
from gptoss_trt.build_engine.safetensors_file import CheckpointError
from gptoss_trt.build_engine.spec import MANIFEST_NAME, SpecError
from gptoss_trt.build_engine.synthetic import INDEX_NAME, small_config, write_checkpoint
from gptoss_trt.reference.mxfp4 import FormatError
from gptoss_trt.runtime.engine import frames
from gptoss_trt.runtime.engine.frames import FrameError, FrameReader, FrameType, Hello
from gptoss_trt.runtime.engine.messages import Cancel, Error, Finished, Guide, Sampling, Submit, Tokens, Usage
from gptoss_trt.runtime.model.loader import LoadError, load_weights
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.chat_request import prompt_ids, read_chat
from gptoss_trt.runtime.openai.completion_request import prompt_lists, read_completion
from gptoss_trt.runtime.openai.response_request import chat_body, read_response
from gptoss_trt.runtime.openai.submission import chat_submit, completion_submit

Case = tuple[str, Callable[[], Any]]
CONTEXT = 4096
SIMULATOR = Path(__file__).parents[1] / "cpu" / "engine" / "scheduler_simulator.py"

SUBMIT = Submit(
    "id",
    (1, 2, 3),
    7,
    sampling=Sampling(temperature=0.5, top_k=3, seed=9),
    stop_ids=(5,),
    stop_sequences=((1, 2),),
    logit_bias=((4, -1.5),),
    guides=(Guide("regex", "a+"),),
)
MESSAGES: tuple[tuple[FrameType, Any], ...] = (
    (FrameType.HELLO, Hello(1, 2)),
    (FrameType.SUBMIT, SUBMIT),
    (FrameType.CANCEL, Cancel("id")),
    (FrameType.TOKENS, [Tokens("id", 0, (1, 2))]),
    (FrameType.FINISHED, [Finished("id", 0, "stop", Usage(1, 2))]),
    (FrameType.ERROR, Error(None, "UNAVAILABLE", "text")),
    (FrameType.STATS, [1, {"requests": {"active": 1}}]),
)
SINGLE = {FrameType.HELLO: Hello, FrameType.SUBMIT: Submit, FrameType.CANCEL: Cancel, FrameType.ERROR: Error}
LISTS = {FrameType.TOKENS: Tokens, FrameType.FINISHED: Finished}


class Frames:
    """Frames of the engine protocol, damaged, cut anywhere, and read as the two sides read them."""

    name = "frames"
    allowed: tuple[type[BaseException], ...] = (FrameError,)

    def case(self, generator: random.Random) -> Case:
        chosen = generator.choices(MESSAGES, k=generator.randrange(1, 4))
        data = mutate.damage(b"".join(frames.encode(kind, body) for kind, body in chosen), generator)
        cuts = sorted(generator.randrange(len(data) + 1) for _ in range(generator.randrange(4)))
        return data.hex(), lambda: self._read(data, [0, *cuts, len(data)])

    @staticmethod
    def _read(data: bytes, cuts: list[int]) -> None:
        reader = FrameReader(frames.REQUEST_LIMIT_BYTES)
        for start, end in itertools.pairwise(cuts):
            for kind, body in reader.feed(data[start:end]):
                if kind in SINGLE:
                    frames.decode(SINGLE[kind], body)
                elif kind in LISTS:
                    frames.decode_each(LISTS[kind], body)
                else:
                    frames.decode_query(body)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "x",
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 10,
        "stop": ["x"],
        "n": 2,
        "seed": 3,
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
    },
    "completions": {
        "model": "x",
        "prompt": ["a", "b"],
        "max_tokens": 5,
        "logprobs": 2,
        "echo": True,
        "stop": ["x"],
        "n": 2,
        "logit_bias": {"5": 1.0},
        "stream": True,
    },
    "responses": {
        "model": "x",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "instructions": "Be brief",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
    },
}


class Bodies:
    """Bodies of the OpenAI routes, changed, and read up to the engine's request, which must fit into a frame."""

    name = "bodies"
    allowed: tuple[type[BaseException], ...] = (RequestError,)

    def case(self, generator: random.Random) -> Case:
        route = generator.choice(tuple(BODIES))
        body = mutate.change(BODIES[route], generator)
        return f"{route} {json.dumps(body)}", lambda: self._read(route, body)

    @staticmethod
    def _read(route: str, body: Any) -> None:
        if route == "completions":
            completion = read_completion(body)
            submits = [
                completion_submit(completion, "id", ids, max_context=CONTEXT) for ids in prompt_lists(completion)
            ]
        else:
            chat = read_chat(chat_body(read_response(body), []) if route == "responses" else body)
            submits = [chat_submit(chat, "id", prompt_ids(chat, current_date="2026-01-01"), max_context=CONTEXT)]
        for submit in submits:
            frames.decode(Submit, frames.encode(FrameType.SUBMIT, submit)[frames.HEADER.size :])


def change_header(file: Path, generator: random.Random) -> str:
    """Changes the header of a safetensors file as bytes or as JSON (with a length that fits), or cuts the file."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    deed = generator.randrange(4)
    if deed == 0:
        cut = data[: generator.randrange(len(data))]
        file.write_bytes(cut)
        return f"{file.name} cut to {len(cut)} of {len(data)} bytes"
    if deed == 1:
        head = mutate.damage(data[: 8 + length], generator)
        file.write_bytes(head + data[8 + length :])
        return f"{file.name} header bytes {head[:200].hex()}"
    header = json.dumps(mutate.change(json.loads(data[8 : 8 + length]), generator)).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    return f"{file.name} header {header[:400]!r}"


def change_json(file: Path, generator: random.Random) -> str:
    """Changes a JSON file as bytes or as a value."""
    data = file.read_bytes()
    if generator.random() < 0.2:
        changed = mutate.damage(data, generator)
    else:
        changed = json.dumps(mutate.change(json.loads(data), generator)).encode()
    file.write_bytes(changed)
    return f"{file.name} {_difference(data, changed)}"


def _difference(before: bytes, after: bytes) -> str:
    """Where two texts begin to differ, for a report."""
    try:
        old, new = json.loads(before), json.loads(after)
    except (ValueError, RecursionError):
        return repr(after[:300])
    if not isinstance(new, dict):
        return repr(after[:300])
    changes = {key: new.get(key, "(removed)") for key in {*old, *new} if old.get(key) != new.get(key)}
    return json.dumps(changes)[:500]


class Engines:
    """An engine directory with a changed manifest or weight file: described, verified, loaded."""

    name = "engine"
    allowed: tuple[type[BaseException], ...] = (SpecError, CheckpointError, LoadError, FormatError)

    def __init__(self, folder: Path) -> None:
        checkpoint = write_checkpoint(folder / "checkpoint", small_config())
        self._good, self._work = folder / "good", folder / "work"
        build_engine(checkpoint, self._good, BuildOptions())

    def case(self, generator: random.Random) -> Case:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._good, self._work)
        if generator.random() < 0.6:
            return change_json(self._work / MANIFEST_NAME, generator), self._open
        given = change_header(self._work / "rank0.safetensors", generator)
        if generator.random() < 0.7:
            self._sign()
            given += " (with its new hash in the manifest)"
        return given, self._open

    def _sign(self) -> None:
        path = self._work / MANIFEST_NAME
        manifest = json.loads(path.read_text(encoding="utf-8"))
        file = self._work / "rank0.safetensors"
        manifest["files"][file.name] = dataclasses.asdict(hash_file(file))
        path.write_text(json.dumps(manifest), encoding="utf-8")

    def _open(self) -> None:
        problems: BaseException | None = None
        for read in (
            lambda: inspection.describe(self._work),
            lambda: inspection.verify(self._work),
            lambda: load_weights(self._work, 0, torch.device("cpu"), 1),
        ):
            try:
                read()
            except self.allowed as error:
                problems = error
        if problems is not None:
            raise problems


class Checkpoints:
    """A checkpoint with a changed configuration, index or weight file: described, built."""

    name = "checkpoint"
    allowed: tuple[type[BaseException], ...] = (SpecError, CheckpointError, FormatError)

    def __init__(self, folder: Path) -> None:
        self._good = [
            write_checkpoint(folder / layout, small_config(), layout=layout, shards=shards)  # type: ignore[arg-type]
            for layout, shards in (("hf_mxfp4", 2), ("openai", 1), ("hf_bf16", 1), ("modelopt_fp8", 1))
        ]
        self._work, self._out = folder / "work", folder / "out"

    def case(self, generator: random.Random) -> Case:
        good = generator.choice(self._good)
        for folder in (self._work, self._out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, self._work)
        texts = [path for path in sorted(self._work.rglob("*.json")) if path.name in ("config.json", INDEX_NAME)]
        if generator.random() < 0.6:
            given = change_json(generator.choice(texts), generator)
        else:
            given = change_header(generator.choice(sorted(self._work.rglob("*.safetensors"))), generator)
        return f"{good.name}: {given}", self._open

    def _open(self) -> None:
        inspection.describe(self._work)
        build_engine(self._work, self._out, BuildOptions(workers=1))


class Schedules:
    """The scheduler's simulator with random sizes and loads; its own assertions are the judge."""

    name = "scheduler"
    allowed: tuple[type[BaseException], ...] = ()

    def __init__(self, steps: int = 300) -> None:
        self._simulator = _module(SIMULATOR)
        self._steps = steps

    def case(self, generator: random.Random) -> Case:
        shape = generator.choice(list(self._simulator.SHAPES.values()))
        shape = replace(
            shape,
            arrivals=shape.arrivals * generator.uniform(0.5, 2.0),
            cancels=generator.choice((0.0, 0.02, 0.3)),
            failures=generator.choice((0.0, 0.002, 0.05)),
            max_queue=generator.choice((1, 12, 100)),
            prefix_cache=generator.random() < 0.8,
        )
        seed = generator.getrandbits(32)
        return f"Simulator({shape}, {seed}).run({self._steps})", lambda: self._simulator.Simulator(shape, seed).run(
            self._steps
        )


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
