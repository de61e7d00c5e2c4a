"""The engine process's protocol: typed messages between Triton models (or the gateway) and the engine.

Invariant: a message holds token ids and numbers only; no text of a user, no channel, no markup. Frames on the socket
are length, type, msgpack body (`frames.py`); this module must not know sockets, tensors or Triton.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

PROTOCOL_VERSION = 2

FinishReason = Literal["stop", "length", "cancelled"]
ErrorCode = Literal["INVALID_ARGUMENT", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL"]
GuideKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice"]

IDS = "i"  # an array's typecode
if TYPE_CHECKING:
    IdArray = array[int]
else:
    IdArray = array  # Python 3.11 cannot name what an array holds
Prompt = tuple[int, ...] | IdArray
"""Token ids. An array of typecode IDS goes to the engine and to its device as it lies in memory; a tuple is packed,
unpacked and looked at id by id, which takes 0.7 ms of 8,192 tokens' way."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 or top_k 1 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # over prompt and output, 1 is off
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output


@dataclass(frozen=True)
class Guide:
    """A grammar that holds from the token after `trigger` until one of `end_ids` is chosen."""

    kind: GuideKind
    grammar: str
    trigger: tuple[int, ...] = ()  # () means from the first generated token
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Submit:
    """A request. `stop_ids` end a sequence and are emitted; the text layers drop them."""

    request_id: str
    token_ids: Prompt
    max_tokens: int
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    prompt_logprobs: int | None = None
    n: int = 1
    priority: int = 0  # lower is served first
    deadline_ms: int | None = None  # from admission by the engine process
    cache_salt: str = ""
    guides: tuple[Guide, ...] = ()
    trace: str = ""  # W3C traceparent of the span that the engine's spans belong to


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, and the k best as (id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Tokens:
    """New tokens of one sequence. `logprobs` has one entry a token when asked for."""

    request_id: str
    sequence: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Usage:
    """What a finished sequence took. Times are `time.time_ns()` of the engine process; 0 when it never came to that."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    kv_new_blocks: int = 0
    kv_reused_blocks: int = 0
    kv_total_blocks: int = 0
    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """The end of one sequence; `remaining` sequences of its request are still open. Sent once a sequence."""

    request_id: str
    sequence: int
    reason: FinishReason
    usage: Usage
    remaining: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True)
class Error:
    """The end of a whole request by an error, or (request_id None) of the connection."""

    request_id: str | None
    code: ErrorCode
    message: str


@dataclass(frozen=True)
class Cancel:
    """Ends a request with what it has: Finished("cancelled") for each open sequence. An unknown id is ignored."""

    request_id: str


Event = Tokens | Finished | Error
