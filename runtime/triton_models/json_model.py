"""The `chat` and `completions` models: an OpenAI request body in, OpenAI response objects out.

Invariant: the objects are those of runtime/openai; this module moves them. An error before the first chunk is a
TritonError and after it the last response; both are the JSON of an OpenAI error. Importable in the stub only.
"""

from __future__ import annotations

import datetime
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gptoss_trt.runtime.engine.messages import Finished, Tokens
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai import RequestError
from gptoss_trt.runtime.openai.chat_objects import ChatAnswer
from gptoss_trt.runtime.openai.chat_request import prompt_ids, read_chat
from gptoss_trt.runtime.openai.completion_objects import CompletionAnswer
from gptoss_trt.runtime.openai.completion_request import prompt_lists, read_completion
from gptoss_trt.runtime.openai.errors import engine_error
from gptoss_trt.runtime.openai.fields import GenerationFields
from gptoss_trt.runtime.openai.json_object import parse_object
from gptoss_trt.runtime.openai.submission import chat_submit, completion_submit
from gptoss_trt.runtime.triton_models import triton_io
from gptoss_trt.runtime.triton_models.answers import Arrays
from gptoss_trt.runtime.triton_models.engine_model import EngineModel, Jobs, context_tokens
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalCode, RefusalError
from gptoss_trt.runtime.triton_models.triton_io import TritonResponder

Json = dict[str, Any]
ANY_MODEL = "gpt-oss"  # the name in answers to requests that give none
CODES: Mapping[int, RefusalCode] = {404: "NOT_FOUND", 429: "UNAVAILABLE", 500: "INTERNAL", 503: "UNAVAILABLE"}
STATUSES: Mapping[RefusalCode, int] = {"NOT_FOUND": 404, "CANCELLED": 499, "UNAVAILABLE": 503, "INTERNAL": 500}


class JsonAnswer:
    """One engine request's share of an answer: events in, chunks out, or one whole object when not streaming."""

    def __init__(
        self,
        push: Callable[[Tokens | Finished], list[Json]],
        is_complete: Callable[[], bool],
        whole: Callable[[], Json | None],
        *,
        streaming: bool,
    ) -> None:
        self._push = push
        self._is_complete = is_complete
        self._whole = whole
        self._streaming = streaming
        self._chunks: list[Json] = []

    def push(self, tokens: Tokens) -> bool:
        self._chunks += self._push(tokens)
        return self._is_complete()

    def finish(self, end: Finished) -> None:
        self._chunks += self._push(end)

    def take(self) -> Arrays | None:
        objects, self._chunks = self._chunks, []
        if not self._streaming:
            whole = self._whole()
            objects = [] if whole is None else [whole]
        return _response(objects) if objects else None


class JsonResponder(TritonResponder):
    """Turns every error into OpenAI's: a TritonError with that text, or the last response once there has been one."""

    def __init__(self, request: Any, *, decoupled: bool) -> None:
        super().__init__(request, decoupled=decoupled)
        self._begun = False

    def send(self, arrays: Arrays, *, final: bool) -> None:
        self._begun = True
        super().send(arrays, final=final)

    def fail(self, error: RefusalError) -> None:
        body = _error_body(error)
        if self._begun and not error.client_is_gone:
            super().send(_response([body]), final=True)
        else:
            super().fail(RefusalError(json.dumps(body, ensure_ascii=False), error.code, error.engine_code))


class JsonModel(EngineModel):
    """What the two models share: reading the body, and errors in OpenAI's form."""

    def __init__(self, spec_name: str, arguments: Mapping[str, str]) -> None:
        Tokenizer.load()
        super().__init__(spec_name, arguments)
        names = str(self.parameters["served_model_name"])
        self._names = [name.strip() for name in names.split(",") if name.strip()]
        self._context = 0

    def start(self, request: Any, responder: TritonResponder) -> None:
        inputs = Inputs(self.spec, triton_io.request_arrays(request))
        try:
            jobs = self.jobs(self._body(inputs))
        except RequestError as error:
            raise RefusalError(error.message, CODES.get(error.status, "INVALID_ARG")) from error
        self.delivery.start("", responder, jobs)

    def responder(self, request: Any) -> TritonResponder:
        return JsonResponder(request, decoupled=self.decoupled)

    @abstractmethod
    def jobs(self, body: Json) -> Jobs:
        """The engine's requests for a body and who answers them. Raises RequestError."""

    @property
    def max_context(self) -> int:
        self._context = self._context or context_tokens(self.engine_dir, self.client)
        return self._context

    def model_name(self, fields: GenerationFields) -> str:
        """The name that the answer carries. Raises RequestError for a model that is not served here."""
        asked = fields.model
        if asked and self._names and asked not in self._names:
            message = f"the model {asked!r} is not served here; served: {', '.join(self._names)}"
            raise RequestError(404, "model", message, "model_not_found")
        return asked or (self._names[0] if self._names else ANY_MODEL)

    def _body(self, inputs: Inputs) -> Json:
        body = parse_object(inputs.text("request", 0) or "")
        if inputs.has("stream"):
            body["stream"] = inputs.flag("stream", 0)
        return body


class ChatModel(JsonModel):
    """`chat`: /v1/chat/completions bodies."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        super().__init__("chat", arguments)

    def jobs(self, body: Json) -> Jobs:
        chat = read_chat(body)
        name = self.model_name(chat)
        ids = prompt_ids(chat, current_date=datetime.date.today().isoformat())
        submit = chat_submit(chat, self.engine_id(), ids, max_context=self.max_context)
        answer = ChatAnswer(chat, prompt_tokens=len(ids), model=name, usage="last")
        whole = JsonAnswer(
            answer.push,
            lambda: answer.complete,
            lambda: answer.completion() if answer.ended else None,
            streaming=bool(chat.stream),
        )
        return [(submit, [whole])]


class CompletionsModel(JsonModel):
    """`completions`: /v1/completions bodies."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        super().__init__("completions", arguments)

    def jobs(self, body: Json) -> Jobs:
        completion = read_completion(body)
        name = self.model_name(completion)
        prompts = prompt_lists(completion)
        answer = CompletionAnswer(completion, prompts, model=name, usage="last")
        jobs: Jobs = []
        for index, ids in enumerate(prompts):
            submit = completion_submit(completion, self.engine_id(), ids, max_context=self.max_context)
            share = JsonAnswer(
                lambda event, index=index: answer.push(index, event),  # type: ignore[misc]
                lambda index=index: answer.complete_prompt(index),  # type: ignore[misc]
                lambda: answer.completion() if answer.ended else None,
                streaming=bool(completion.stream),
            )
            jobs.append((submit, [share]))
        return jobs


def _response(objects: list[Json]) -> Arrays:
    texts = [json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() for entry in objects]
    return {"response": np.array(texts, dtype=np.object_)}


def _error_body(error: RefusalError) -> Json:
    """OpenAI's error object, with the HTTP status in it for the gateway."""
    cause = error.__cause__
    if isinstance(cause, RequestError):
        known = cause
    elif error.engine_code is not None:
        known = engine_error(error.engine_code, str(error))
    else:
        known = RequestError(STATUSES.get(error.code, 400), None, str(error), error.code.lower())
    body = known.body()
    body["error"]["status"] = known.status
    return body
