"""From a checked request to the engine's Submit.

Owns the defaults of the OpenAI routes (temperature 1, top_p 1) and the guides. Invariant: what a request asks for
reaches the engine or is refused here by name. Must not know sockets or HTTP.
"""

from __future__ import annotations

import json
import re

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.runtime.engine.messages import Guide, Sampling, Submit
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.harmony.render import response_schema
from gptoss_trt.runtime.openai.chat_request import ChatRequest
from gptoss_trt.runtime.openai.completion_request import CompletionRequest
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.fields import GenerationFields

_END, _MESSAGE, _CONSTRAIN = 200007, 200008, 200003
# Ways in which a model opens its answer. A guide begins behind any of them.
_FINAL_HEADERS = (
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|constrain|>json<|message|>",
    "<|channel|>final json<|message|>",
)


def chat_submit(chat: ChatRequest, request_id: str, token_ids: list[int], *, max_context: int) -> Submit:
    """The engine's request for one chat turn. `max_context`: tokens of prompt and answer together.

    Without a limit the answer may fill the context. Stop strings stay with the text layer (ChatAnswer): they concern
    the visible answer, and the engine sees tokens only. Raises RequestError when the request does not fit.
    """
    return Submit(
        request_id=request_id,
        token_ids=tuple(token_ids),
        max_tokens=_fitting_limit(chat.token_limit, len(token_ids), max_context),
        min_tokens=chat.min_tokens,
        sampling=sampling(chat),
        stop_ids=tuple(dict.fromkeys((*HARMONY_STOP_IDS, *chat.stop_token_ids))),
        logit_bias=chat.bias,
        logprobs=chat.top_logprobs if chat.logprobs else None,
        n=chat.n,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
        guides=_guides(chat),
    )


def completion_submit(
    completion: CompletionRequest, request_id: str, token_ids: list[int], *, max_context: int
) -> Submit:
    """The engine's request for one prompt of a completion. `ignore_eos` leaves only the request's own stop ids.

    max_tokens 0 (echo) asks for one token, which the answer leaves out: the engine has no request without one.
    """
    harmony = () if completion.ignore_eos else HARMONY_STOP_IDS
    limit = max(1, completion.token_limit)
    return Submit(
        request_id=request_id,
        token_ids=tuple(token_ids),
        max_tokens=_fitting_limit(limit, len(token_ids), max_context),
        min_tokens=completion.min_tokens,
        sampling=sampling(completion),
        stop_ids=tuple(dict.fromkeys((*harmony, *completion.stop_token_ids))),
        logit_bias=completion.bias,
        logprobs=completion.logprobs,
        prompt_logprobs=completion.logprobs if completion.echo else None,
        n=completion.n,
        priority=completion.priority,
        cache_salt=completion.cache_salt,
    )


def sampling(fields: GenerationFields) -> Sampling:
    """How tokens are chosen. top_k -1 means off, as 0 does; a negative seed is taken modulo 2**64."""
    return Sampling(
        temperature=fields.temperature,
        top_k=max(0, fields.top_k),
        top_p=fields.top_p,
        min_p=fields.min_p,
        seed=None if fields.seed is None else fields.seed % 2**64,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
    )


def _fitting_limit(limit: int | None, prompt_tokens: int, max_context: int) -> int:
    room = max_context - prompt_tokens
    if room < 1 or (limit is not None and limit > room):
        asked = f" + max_tokens {limit} = {prompt_tokens + limit}" if limit is not None else ""
        raise RequestError(
            400,
            "messages" if limit is None or room < 1 else "max_tokens",
            f"prompt of {prompt_tokens} tokens{asked}; the context is {max_context} tokens",
            "context_length_exceeded",
        )
    return room if limit is None else limit


def _guides(chat: ChatRequest) -> tuple[Guide, ...]:
    """Grammars over the final channel's text, or over the name of a forced call; never over analysis."""
    encode = Tokenizer.load().encode
    end_ids = (_END, *HARMONY_STOP_IDS)
    wanted = response_schema(chat.body())
    if wanted is not None:
        name, _, schema = wanted
        plain_object = name == "json_object" and schema == {"type": "object"}
        kind, grammar = ("json_object", "") if plain_object else ("json_schema", json.dumps(schema))
        return tuple(
            Guide("json_object" if kind == "json_object" else "json_schema", grammar, tuple(encode(header)), end_ids)
            for header in _FINAL_HEADERS
        )
    names = chat.forced_tools
    if len(names) > 1:
        return (Guide("regex", f"({'|'.join(map(re.escape, names))}) ?", (), (_CONSTRAIN, _MESSAGE)),)
    return ()
