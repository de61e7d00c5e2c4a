"""The `tensorrt_llm` model: token ids in, token ids out.

Invariant: a stop request is answered at once and ends what runs under its Triton request id. Importable in the python
backend's stub only. Must not know text.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from gptoss_trt.client.protocol import STOP_REQUEST_INPUT
from gptoss_trt.runtime.engine.messages import IDS, IdArray, Submit
from gptoss_trt.runtime.triton_models import generation, triton_io
from gptoss_trt.runtime.triton_models.answers import Place, TokenAnswer
from gptoss_trt.runtime.triton_models.engine_model import EngineModel, Jobs
from gptoss_trt.runtime.triton_models.generation import Wanted
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError
from gptoss_trt.runtime.triton_models.triton_io import TritonResponder
from gptoss_trt.runtime.triton_models.word_lists import sparse_bias, unpack


class TokenModel(EngineModel):
    """`tensorrt_llm` over the engine process."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        super().__init__("tensorrt_llm", arguments)

    def start(self, request: Any, responder: TritonResponder) -> None:
        arrays = triton_io.request_arrays(request)
        if STOP_REQUEST_INPUT in arrays and np.any(arrays[STOP_REQUEST_INPUT]):
            self._stop(request.request_id(), responder)
            return
        inputs = Inputs(self.spec, arrays)
        triton_id = request.request_id()
        jobs: Jobs = []
        for row in range(inputs.batch_size):
            want = generation.wanted(
                inputs, row, exclude_input_default=bool(self.parameters["exclude_input_in_output"])
            )
            submit = self._submit(inputs, row, want)
            self.require_one_response(inputs.batch_size, submit.n, want.streaming)
            submit = dataclasses.replace(submit, request_id=self.engine_id("" if row else triton_id))
            answers = [TokenAnswer(Place(row, index), want, submit.token_ids) for index in range(submit.n)]
            jobs.append((submit, answers))
        self.delivery.start(triton_id, responder, jobs)

    def _stop(self, triton_id: str, responder: TritonResponder) -> None:
        if not triton_id:
            raise RefusalError("a stop request must carry the id of the request that it stops, and it has none")
        if not self.delivery.stop(triton_id):
            self.client.cancel(triton_id)  # it may run in another model's instance
        responder.close()

    def _submit(self, inputs: Inputs, row: int, want: Wanted) -> Submit:
        submit = generation.submit(inputs, row, _prompt(inputs, row), want=want)
        stop_words = inputs.row("stop_words_list", row)
        bad_words = inputs.row("bad_words_list", row)
        bias = inputs.row("embedding_bias", row)
        return dataclasses.replace(
            submit,
            stop_sequences=() if stop_words is None else unpack("stop_words_list", stop_words),
            bad_sequences=() if bad_words is None else unpack("bad_words_list", bad_words),
            logit_bias=() if bias is None else sparse_bias("embedding_bias", bias, self.vocab_size),
        )


def _prompt(inputs: Inputs, row: int) -> IdArray:
    """The first input_lengths ids of the row."""
    ids = inputs.row("input_ids", row)
    if ids is None:
        raise RefusalError("input_ids is missing; every request but a stop request needs it")
    length = inputs.scalar("input_lengths", row)
    if not 0 <= length <= ids.size:
        raise RefusalError(f"input_lengths is {length}; it must lie in 0..{ids.size}, the length of input_ids")
    return array(IDS, ids.reshape(-1)[:length].astype(np.int32, copy=False).tobytes())
