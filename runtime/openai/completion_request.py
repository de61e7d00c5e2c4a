"""/v1/completions bodies: raw prompts as text, ids, or lists of either.

Owns the reading of prompts. Invariant: special-token text in a prompt becomes special ids, because such clients send
Harmony that way; ids outside the vocabulary are refused. Must not know HTTP or chat messages.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE
from gptoss_trt.runtime.harmony import Tokenizer
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.fields import MAX_LOGPROBS, GenerationFields, read_fields
from gptoss_trt.runtime.openai.guided import AnswerFormat, answer_format

DEFAULT_MAX_TOKENS = 16  # OpenAI's own
MAX_PROMPTS = 256


class CompletionRequest(GenerationFields):
    """A checked body. `prompts` has the token ids of each prompt; choices are numbered prompt by prompt."""

    prompt: Any
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    _format: AnswerFormat | None = PrivateAttr(default=None)

    @property
    def wanted_format(self) -> AnswerFormat | None:
        """What the text must be, if the request says so."""
        return self._format

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


def read_completion(request: Any) -> CompletionRequest:
    """The checked form of a completion request. Raises RequestError."""
    completion = read_fields(CompletionRequest, request)
    limit = completion.token_limit
    if limit < 0 or (limit == 0 and not completion.echo):
        raise RequestError(
            400, "max_tokens", f"max_tokens is {limit}; at least 1 is needed (0 with echo)", "invalid_value"
        )
    if completion.min_tokens > limit:
        raise RequestError(400, "min_tokens", f"min_tokens is {completion.min_tokens}; max_tokens is {limit}")
    _prompt_list(completion.prompt)
    completion._format = answer_format(completion, {})
    if completion._format is not None and completion.ignore_eos:
        raise RequestError(400, "ignore_eos", f"ignore_eos and {completion._format.param} exclude each other")
    return completion


def prompt_lists(completion: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt. Raises RequestError for an empty one."""
    encode = Tokenizer.load().encode
    prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in _prompt_list(completion.prompt)]
    for index, ids in enumerate(prompts):
        if not ids:
            raise RequestError(400, "prompt", f"prompt {index} is empty: it has 0 tokens", "invalid_value")
    return prompts


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt", "prompt must be a string, a list of token ids, or a non-empty list of these")
    if all(_is_integer(item) for item in prompt):
        return [_checked_ids(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(400, "prompt", f"prompt holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}")
    return [_one_prompt(item, index) for index, item in enumerate(prompt)]


def _one_prompt(item: Any, index: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(_is_integer(number) for number in item):
        return _checked_ids(item)
    raise RequestError(400, "prompt", f"prompt[{index}] is neither a string nor a list of token ids", "invalid_type")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_ids(ids: list[int]) -> list[int]:
    for number in ids:
        if not 0 <= number < VOCABULARY_SIZE:
            raise RequestError(400, "prompt", f"prompt holds the id {number}; ids lie in 0..{VOCABULARY_SIZE - 1}")
    return ids
