"""Targets between server and engine: what a model's tokens become for the client, and tensors as engine requests.

Invariant: whatever tokens come, an answer is the same for any chunking of them. Needs no server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import mutate
import numpy as np
from target import FaultError

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.client import protocol
from gptoss_trt.runtime.engine import frames
from gptoss_trt.runtime.engine.frames import FrameType
from gptoss_trt.runtime.engine.messages import Finished, Submit, TokenLogprobs, Tokens, Usage
from gptoss_trt.runtime.engine.validation import MAX_SEQUENCES
from gptoss_trt.runtime.harmony import TextStream, Tokenizer
from gptoss_trt.runtime.openai.chat_objects import ChatAnswer
from gptoss_trt.runtime.openai.chat_request import read_chat
from gptoss_trt.runtime.openai.completion_objects import CompletionAnswer
from gptoss_trt.runtime.openai.completion_request import read_completion
from gptoss_trt.runtime.triton_models import generation
from gptoss_trt.runtime.triton_models.answers import Place, Results, TextAnswer
from gptoss_trt.runtime.triton_models.generation import Wanted
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError

Case = tuple[str, Callable[[], Any]]
PIECES = (
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>", "<|endoftext|>",
    "analysis", "final", "commentary", "assistant", " to=functions.f", "json", '{"a": 1}', "The end", " stop", " here",
    " 🙂", "é", "\n", "user", "<|channel|>final<|message|>", "<|start|>assistant<|channel|>analysis<|message|>",
)  # fmt: skip
STOPS = (["stop"], ["p he", "end"], ["🙂"], [" "], ["}"], ["never"], [])
Parts = Sequence[Sequence[int]]
REQUIRED = {
    "tensorrt_llm": ("input_ids", "input_lengths", "request_output_len"),
    "ensemble": ("text_input", "max_tokens"),
}


class Answers:
    """Tokens that a model might write, in several chunkings: the answers must be one, log-probabilities included."""

    name = "answers"
    allowed: tuple[type[BaseException], ...] = ()

    def case(self, generator: random.Random) -> Case:
        text = "".join(generator.choices(PIECES, k=generator.randrange(1, 14)))
        ids = Tokenizer.load().encode(text)
        ids += [generator.randrange(201_088) for _ in range(generator.choice((0, 0, 1, 3)))]
        end = next((place for place, number in enumerate(ids) if number in HARMONY_STOP_IDS), len(ids))
        ids = ids[: end + 1]  # an engine ends there
        stop, logprobs = generator.choice(STOPS), generator.random() < 0.5
        reason = generator.choice(("stop", "length", "cancelled"))
        cuts = [self._cut(ids, generator) for _ in range(2)]
        makers = {"chat": self._chat, "completion": self._completion, "text": self._text}
        kind = generator.choice(tuple(makers))

        def run() -> None:
            alone = makers[kind]([[number] for number in ids], stop, logprobs, reason)
            for parts in cuts:
                if (other := makers[kind](parts, stop, logprobs, reason)) != alone:
                    raise FaultError(f"{parts}: {other} instead of {alone}")

        return f"{kind} {text!r} {ids} stop {stop} logprobs {logprobs} {reason}", run

    @staticmethod
    def _cut(ids: list[int], generator: random.Random) -> Parts:
        parts, place = [], 0
        while place < len(ids):
            size = generator.randrange(1, 9)
            parts.append(ids[place : place + size])
            place += size
        return parts

    @staticmethod
    def _tokens(part: Sequence[int], logprobs: bool) -> Tokens:
        entries = tuple(TokenLogprobs(-0.5, ((number, -0.5),)) for number in part) if logprobs else None
        return Tokens("r", 0, tuple(part), entries)

    def _chat(self, parts: Parts, stop: list[str], logprobs: bool, reason: Any) -> Any:
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "stop": stop, "logprobs": logprobs}
        answer = ChatAnswer(read_chat(body), prompt_tokens=1)
        chunks: list[Any] = []
        for part in parts:
            chunks += answer.push(self._tokens(part, logprobs))
            if answer.complete:
                reason = "cancelled"
                break
        chunks += answer.push(Finished("r", 0, reason, Usage(1, 1)))
        whole = answer.completion()["choices"][0]
        streamed: dict[str, Any] = {"content": "", "reasoning": "", "arguments": "", "logprobs": []}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                streamed[name] += delta.get(name) or ""
            streamed["arguments"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            streamed["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        message = whole["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        told = {
            "content": message["content"] or "",
            "reasoning": message["reasoning"] or "",
            "arguments": "".join(call["arguments"] for call in calls),
            "logprobs": (whole["logprobs"] or {"content": []})["content"],
        }
        if told != streamed:
            raise FaultError(f"the stream says {streamed}, the whole {told}")
        return json.dumps([told, [call["name"] for call in calls], whole["finish_reason"]])

    def _completion(self, parts: Parts, stop: list[str], logprobs: bool, reason: Any) -> Any:
        body = {"prompt": "x", "stop": stop, **({"logprobs": 1} if logprobs else {})}
        answer = CompletionAnswer(read_completion(body), [[1]])
        for part in parts:
            answer.push(0, self._tokens(part, logprobs))
            if answer.complete_prompt(0):
                break
        answer.push(0, Finished("r", 0, reason, Usage(1, 1)))
        return answer.completion()["choices"]

    def _text(self, parts: Parts, stop: list[str], logprobs: bool, reason: Any) -> Any:
        want = Wanted(False, True, logprobs, False, False, True)
        answer = TextAnswer(
            Results(Place(0, 0), want, 1), TextStream(), streaming=False, prompt_text="", stop_words=stop, stop_ids=()
        )
        for part in parts:
            if answer.push(self._tokens(part, logprobs)):
                break
        answer.finish(Finished("r", 0, reason, Usage(1, 1)))
        taken = answer.take()
        assert taken is not None
        return {name: array.tolist() for name, array in taken.items()}


class Tensors:
    """Tensors of any value, type and shape for the token and text models, read up to the engine's request."""

    name = "tensors"
    allowed: tuple[type[BaseException], ...] = (RefusalError,)

    def case(self, generator: random.Random) -> Case:
        spec = protocol.model(generator.choice(tuple(REQUIRED)))
        rows = generator.choice((1, 1, 1, 2))
        arrays = {}
        for name in (*REQUIRED[spec.name], *(generator.choice(spec.inputs).name for _ in range(3))):
            tensor = spec.input(name)
            dims = [generator.choice((1, 1, 3, 0)) if dim == -1 else dim for dim in tensor.dims]
            shape = [rows, *dims] if generator.random() < 0.95 else generator.choice(([], [rows], [0, 1], [rows, 2, 2]))
            arrays[name] = self._filled(shape, protocol.NUMPY_NAMES[tensor.dtype], generator)
        shown = {
            name: (array.dtype.name, array.shape, array.reshape(-1)[:4].tolist()) for name, array in arrays.items()
        }
        return f"{spec.name} {shown}"[:2000], lambda: self._read(spec, arrays)

    @staticmethod
    def _filled(shape: list[int], dtype: str, generator: random.Random) -> Any:
        if dtype == "object":
            return np.full(shape, generator.choice(mutate.TEXTS).encode("utf-8", "surrogatepass"), dtype=object)
        if generator.random() < 0.05:
            dtype = generator.choice(("int64", "float64", "bool", "int8"))
        kind = np.dtype(dtype)
        if kind.kind == "f":
            with np.errstate(over="ignore"):
                return np.full(shape, generator.choice(mutate.FLOATS)).astype(kind)
        if kind.kind == "b":
            return np.full(shape, generator.random() < 0.5)
        limits = np.iinfo(kind)
        number = generator.choice(tuple(n for n in mutate.NUMBERS if n <= limits.max))
        return np.full(shape, number if generator.random() < 0.7 or not limits.min else limits.min, dtype=kind)

    @staticmethod
    def _read(spec: Any, arrays: dict[str, Any]) -> None:
        inputs = Inputs(spec, arrays)
        for row in range(inputs.batch_size):
            want = generation.wanted(inputs, row, exclude_input_default=False)
            submit = generation.submit(inputs, row, (1, 2), want=want)
            if not 1 <= submit.n <= MAX_SEQUENCES:
                raise FaultError(f"answers would be made for {submit.n} sequences")
            inputs.text("text_input", row)
            for name in ("stop_words", "bad_words", "embedding_bias_words"):
                inputs.texts(name, row)
            frames.decode(Submit, frames.encode(FrameType.SUBMIT, submit)[frames.HEADER.size :])
