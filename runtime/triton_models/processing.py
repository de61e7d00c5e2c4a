"""The `preprocessing` and `postprocessing` models: text to the tensors of `tensorrt_llm`, and its tensors to text.

Invariant: they encode and decode exactly as the fused text models do. Importable in the python backend's stub only.
Must not know the engine.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE
from gptoss_trt.client import protocol
from gptoss_trt.runtime.harmony import TextStream, Tokenizer
from gptoss_trt.runtime.launch.parent_watch import ParentWatch
from gptoss_trt.runtime.triton_models import triton_io
from gptoss_trt.runtime.triton_models.answers import Arrays
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError
from gptoss_trt.runtime.triton_models.word_lists import dense_bias, pack

PAD_ID = 199999  # <|endoftext|>


class _Processing(ABC):
    """One instance of either model, `name` in the wire table."""

    def __init__(self, name: str, arguments: Mapping[str, str]) -> None:
        self._spec = protocol.model(name)
        self._parameters = triton_io.parameters(self._spec, arguments)
        self._tokenizer = Tokenizer.load()
        self._server_watch = ParentWatch(os.getppid())

    @abstractmethod
    def _tensors(self, arrays: Arrays) -> Arrays:
        """Outputs for the inputs of one request. Raises RefusalError."""

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [_answered(request, self._tensors) for request in requests]

    def finalize(self) -> None:
        self._server_watch.close()


class Preprocessing(_Processing):
    """`preprocessing`: tokenises QUERY and word lists. An END_ID or PAD_ID that is not set becomes the model's own."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        super().__init__("preprocessing", arguments)

    def _tensors(self, arrays: Arrays) -> Arrays:
        inputs = Inputs(self._spec, arrays)
        rows = range(inputs.batch_size)
        prompts = [self._encode_prompt(inputs, row) for row in rows]
        lengths = np.array([[len(ids)] for ids in prompts], dtype=np.int32)
        ids = np.full((len(prompts), int(lengths.max())), PAD_ID, dtype=np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        ends = [inputs.scalar("END_ID", row) for row in rows]
        pads = [inputs.scalar("PAD_ID", row) for row in rows]
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": np.zeros((len(prompts), 0), dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.zeros((len(prompts), 1), dtype=np.int32),
            "BAD_WORDS_IDS": self._words(inputs, "BAD_WORDS_DICT"),
            "STOP_WORDS_IDS": self._words(inputs, "STOP_WORDS_DICT"),
            "EMBEDDING_BIAS": self._bias(inputs),
            "REQUEST_OUTPUT_LEN": arrays["REQUEST_OUTPUT_LEN"].reshape(-1, 1),
            "OUT_END_ID": np.array([[HARMONY_STOP_IDS[0] if end is None else end] for end in ends], dtype=np.int32),
            "OUT_PAD_ID": np.array([[PAD_ID if pad is None else pad] for pad in pads], dtype=np.int32),
        }

    def _encode_prompt(self, inputs: Inputs, row: int) -> list[int]:
        text = inputs.text("QUERY", row)
        if not text:
            raise RefusalError("QUERY is empty")
        return self._tokenizer.encode(text)

    def _words(self, inputs: Inputs, name: str) -> Any:
        encode = self._tokenizer.encode
        return pack([[encode(word) for word in inputs.texts(name, row)] for row in range(inputs.batch_size)])

    def _bias(self, inputs: Inputs) -> Any:
        rows = range(inputs.batch_size)
        words = [[self._tokenizer.encode(word) for word in inputs.texts("EMBEDDING_BIAS_WORDS", row)] for row in rows]
        given = [inputs.row("EMBEDDING_BIAS_WEIGHTS", row) for row in rows]
        weights = [[] if weight is None else weight.reshape(-1).tolist() for weight in given]
        if not any(words) and not any(weights):
            return np.zeros((inputs.batch_size, 0), dtype=np.float32)
        return np.stack(
            [dense_bias(word, weight, VOCABULARY_SIZE) for word, weight in zip(words, weights, strict=True)]
        )


class Postprocessing(_Processing):
    """TOKENS_BATCH [B, sequences, length] and SEQUENCE_LENGTH [B, sequences] to OUTPUT [B * sequences].

    Each call stands alone, so a character cut by two calls is shown as U+FFFD twice: that is the limit of `pipeline`.
    """

    def __init__(self, arguments: Mapping[str, str]) -> None:
        super().__init__("postprocessing", arguments)
        self._skip_special = bool(self._parameters["skip_special_tokens"])

    def _tensors(self, arrays: Arrays) -> Arrays:
        Inputs(self._spec, arrays)
        tokens, lengths = arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"]
        if tokens.shape[:2] != lengths.shape[:2]:
            raise RefusalError(
                f"TOKENS_BATCH has the shape {list(tokens.shape)} and SEQUENCE_LENGTH {list(lengths.shape)}; "
                "the first two must agree"
            )
        rows = tokens.reshape(lengths.size, tokens.shape[2])  # the last response of a stream may hold no token
        texts = [self._text(row, int(length)) for row, length in zip(rows, lengths.reshape(-1), strict=True)]
        return {"OUTPUT": np.array(texts, dtype=np.object_)}

    def _text(self, row: Any, length: int) -> bytes:
        if not 0 <= length <= row.size:
            raise RefusalError(f"SEQUENCE_LENGTH is {length}; it must lie in 0..{row.size}, the length of TOKENS_BATCH")
        stream = TextStream(skip_special_tokens=self._skip_special)
        try:
            return (stream.push(row[:length].tolist()) + stream.finish()).encode()
        except ValueError as error:
            raise RefusalError(f"TOKENS_BATCH: {error}") from error


def _answered(request: Any, tensors: Callable[[Arrays], Arrays]) -> Any:
    try:
        return triton_io.response(tensors(triton_io.request_arrays(request)))
    except RefusalError as error:
        return triton_io.error_response(error)
