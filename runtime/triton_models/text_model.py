"""The `ensemble` and `tensorrt_llm_bls` models: text in, text out, in one model over the engine.

Invariant: `text_output` holds whole characters; a stop word never shows, also where it spans tokens. In chat mode the
text is one user turn and the answer its final channel. Importable in the python backend's stub only.
"""

from __future__ import annotations

import dataclasses
import datetime
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.runtime.engine.messages import IDS, IdArray, Submit
from gptoss_trt.runtime.harmony import TextStream, Tokenizer
from gptoss_trt.runtime.triton_models import generation, triton_io
from gptoss_trt.runtime.triton_models.answers import Decoder, Place, Results, TextAnswer
from gptoss_trt.runtime.triton_models.engine_model import EngineModel, Jobs
from gptoss_trt.runtime.triton_models.generation import Wanted
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError
from gptoss_trt.runtime.triton_models.triton_io import TritonResponder


class TextModel(EngineModel):
    """A text model over the engine process; `spec_name` is `ensemble` or `tensorrt_llm_bls`."""

    def __init__(self, spec_name: str, arguments: Mapping[str, str]) -> None:
        self._tokenizer = Tokenizer.load()
        super().__init__(spec_name, arguments)
        self._skip_special = bool(self.parameters["skip_special_tokens"])
        self._chat = bool(self.parameters["chat_mode"])

    def start(self, request: Any, responder: TritonResponder) -> None:
        inputs = Inputs(self.spec, triton_io.request_arrays(request))
        triton_id = request.request_id()
        jobs: Jobs = []
        for row in range(inputs.batch_size):
            want = generation.wanted(
                inputs, row, exclude_input_default=bool(self.parameters["exclude_input_in_output"])
            )
            submit = self._submit(inputs, row, want)
            self.require_one_response(inputs.batch_size, submit.n, want.streaming)
            submit = dataclasses.replace(submit, request_id=self.engine_id("" if row else triton_id))
            answers = [self._answer(inputs, Place(row, index), want, submit) for index in range(submit.n)]
            jobs.append((submit, answers))
        self.delivery.start(triton_id, responder, jobs)

    def _submit(self, inputs: Inputs, row: int, want: Wanted) -> Submit:
        submit = generation.submit(inputs, row, self._prompt(inputs, row), want=want)
        encode = self._tokenizer.encode
        stop_words = tuple(tuple(encode(word)) for word in inputs.texts("stop_words", row))
        return dataclasses.replace(
            submit,
            # Text decides where a stop word ends; the engine's match saves steps and finds special tokens.
            stop_sequences=stop_words,
            stop_ids=tuple(dict.fromkeys((*submit.stop_ids, *HARMONY_STOP_IDS))) if self._chat else submit.stop_ids,
            bad_sequences=tuple(tuple(encode(word)) for word in inputs.texts("bad_words", row)),
            logit_bias=self._bias(inputs, row),
        )

    def _prompt(self, inputs: Inputs, row: int) -> IdArray:
        text = inputs.text("text_input", row)
        if not text:
            raise RefusalError("text_input is empty")
        if not self._chat:
            return array(IDS, self._tokenizer.encode(text))
        from gptoss_trt.runtime.harmony import render_chat

        request = {"messages": [{"role": "user", "content": text}]}
        return array(IDS, render_chat(request, current_date=datetime.date.today().isoformat()))

    def _bias(self, inputs: Inputs, row: int) -> tuple[tuple[int, float], ...]:
        words = inputs.texts("embedding_bias_words", row)
        given = inputs.row("embedding_bias_weights", row)
        weights = [] if given is None else given.reshape(-1).tolist()
        if len(words) != len(weights):
            raise RefusalError(f"embedding_bias_words has {len(words)} words and embedding_bias_weights {len(weights)}")
        bias: dict[int, float] = {}
        for word, weight in zip(words, weights, strict=True):
            for token in self._tokenizer.encode(word):
                bias[token] = bias.get(token, 0.0) + weight
        return tuple(bias.items())

    def _answer(self, inputs: Inputs, place: Place, want: Wanted, submit: Submit) -> TextAnswer:
        repeat_prompt = not (want.streaming or want.exclude_input or self._chat)
        return TextAnswer(
            Results(place, want, len(submit.token_ids)),
            self._decoder(),
            streaming=want.streaming,
            prompt_text=self._decode(submit.token_ids) if repeat_prompt else "",
            stop_words=inputs.texts("stop_words", place.batch_index),
            stop_ids=submit.stop_ids,
        )

    def _decoder(self) -> Decoder:
        if not self._chat:
            return TextStream(skip_special_tokens=self._skip_special)
        from gptoss_trt.runtime.triton_models.final_channel import FinalChannel

        return FinalChannel()

    def _decode(self, token_ids: Iterable[int]) -> str:
        stream = TextStream(skip_special_tokens=self._skip_special)
        return stream.push(token_ids) + stream.finish()
