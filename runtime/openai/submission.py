"""From a checked request to the engine's Submit.

Owns the defaults of the OpenAI routes (temperature 1, top_p 1) and the guides. Invariant: what a request asks for
reaches the engine or is refused here by name. Must not know sockets or HTTP.
"""

from __future__ import annotations

from array import array

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.runtime.engine.messages import IDS, Guide, Sampling, Submit
from gptoss_trt.runtime.openai.chat_request import ChatRequest
from gptoss_trt.runtime.openai.completion_request import CompletionRequest
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.fields import GenerationFields
from gptoss_trt.runtime.openai.guided import call_rules, forced_guide, plain_guide, turn_guide


def chat_submit(chat: ChatRequest, request_id: str, token_ids: list[int], *, max_context: int) -> Submit:
    """The engine's request for one chat turn. `max_context`: tokens of prompt and answer together.

    Without a limit the answer may fill the context. Stop strings stay with the text layer (ChatAnswer): they concern
    the visible answer, and the engine sees tokens only. Raises RequestError when the request does not fit.
    """
    return Submit(
        request_id=request_id,
        token_ids=array(IDS, token_ids),
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
    stop_ids = tuple(dict.fromkeys((*harmony, *completion.stop_token_ids)))
    limit = max(1, completion.token_limit)
    return Submit(
        request_id=request_id,
        token_ids=array(IDS, token_ids),
        max_tokens=_fitting_limit(limit, len(token_ids), max_context),
        min_tokens=completion.min_tokens,
        sampling=sampling(completion),
        stop_ids=stop_ids,
        logit_bias=completion.bias,
        logprobs=completion.logprobs,
        prompt_logprobs=completion.logprobs if completion.echo else None,
        n=completion.n,
        priority=completion.priority,
        cache_salt=completion.cache_salt,
        guides=plain_guide(completion.wanted_format, stop_ids),
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
    """The grammar of the turn, or of a forced call's name and arguments; never of analysis."""
    rules = call_rules(chat.tools)
    forced = chat.forced_tools
    if forced:
        return forced_guide([rule for rule in rules if rule.name in forced])
    offered = chat.tools_offered
    return turn_guide(chat.wanted_format, [rule for rule in rules if rule.name in offered.names], offered.builtins)
