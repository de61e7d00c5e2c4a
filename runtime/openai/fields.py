"""What chat and completion requests have in common: sampling, stops, limits, and how a body is read.

Owns ranges and the parameters that are refused or ignored by name. Invariant: a parameter is served, or ignored because
it cannot change the answer, or refused; it is never dropped in silence. Must not know messages or prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE
from gptoss_trt.runtime.openai.errors import RequestError, did_you_mean

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20

# Served elsewhere or not at all: refused unless they ask for nothing.
REFUSED = {
    "audio": "gpt-oss gives text only",
    "best_of": "is not supported; use n",
    "chat_template": "is not supported; the prompt is Harmony",
    "function_call": "is not supported; use tool_choice",
    "functions": "is not supported; use tools",
    "guided_grammar": "is not supported; use response_format",
    "length_penalty": "belongs to beam search, which is not supported",
    "logits_processors": "is not supported",
    "prediction": "is not supported",
    "suffix": "is not supported",
    "use_beam_search": "is not supported",
    "web_search_options": "is not supported",
}
# They do not change the answer: bookkeeping of OpenAI's own service.
IGNORED = frozenset(
    {
        *(
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        ),
        *("add_special_tokens", "request_id", "spaces_between_special_tokens"),
    }
)

Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STOPS),
]
_ID_DIGITS = len(str(VOCABULARY_SIZE))  # int() refuses texts of thousands of them by an error of its own
TokenId = Annotated[int, Field(ge=0, lt=VOCABULARY_SIZE)]


class StreamOptions(BaseModel):
    """`stream_options`. Obfuscation pads OpenAI's own streams; asking for none of it is all that is accepted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationFields(BaseModel):
    """Parameters of both endpoints. A null means the default, as OpenAI's clients send it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = ""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(default_factory=dict)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    priority: int = 0
    cache_salt: str = ""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(key), value) for key, value in self.logit_bias.items())


Model = TypeVar("Model", bound=GenerationFields)


def read_fields(model: type[Model], request: Any) -> Model:
    """Reads a body into `model`. Raises RequestError 400 with the parameter's place, the value and the limit."""
    if not isinstance(request, Mapping):
        raise RequestError(400, None, f"the body is {type(request).__name__}, not a JSON object", "invalid_type")
    known = {name: value for name, value in request.items() if name in model.model_fields and value is not None}
    for name in sorted(request.keys() - model.model_fields.keys(), key=str):
        _check_other(name, request[name], model)
    try:
        fields = model.model_validate(known)
    except ValidationError as error:
        raise refusal_of(error) from error
    for key in fields.logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS and int(key) < VOCABULARY_SIZE):
            reason = f"logit_bias: {key[:80]!r} is not a token id; ids lie in 0..{VOCABULARY_SIZE - 1}"
            raise RequestError(400, "logit_bias", reason, "invalid_value")
    return fields


def _check_other(name: Any, value: Any, model: type[GenerationFields]) -> None:
    """A parameter that is no field of `model`: ignored safely, refused with a reason, or unknown."""
    if name in IGNORED:
        return
    if name in REFUSED:
        if value not in (None, False, [], {}, "") and (name, value) != ("best_of", 1):
            raise RequestError(400, name, f"{name} {REFUSED[name]}", "unsupported_parameter")
        return
    near = did_you_mean(str(name), [*model.model_fields, *IGNORED])
    raise RequestError(400, str(name), f"unknown parameter {name!r}{near}", "unknown_parameter")


def refusal_of(error: ValidationError) -> RequestError:
    """The first of a model's complaints: the parameter's place, what it is and what it may be."""
    first = error.errors(include_url=False)[0]
    param = ""
    for step in first["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    if first["type"] == "missing":
        return RequestError(400, param, f"{param} is required", "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(400, param, f"unknown parameter {param!r}", "unknown_parameter")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return RequestError(400, param, f"{param} is {shown}: {reason}", "invalid_value")
