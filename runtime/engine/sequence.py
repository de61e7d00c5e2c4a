"""A request and its sequences as the scheduler sees them: tokens, progress, KV blocks, times.

Invariant: `computed` tokens of a sequence have their keys and values in the cache; tokens are only ever appended, so
block hashes once computed stay true. A step that was planned and not committed yet has its tokens in `planned` and the
token that it will bring in `awaited`. Must not know tensors, sockets or how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptoss_trt.runtime.engine.core import RequestKey
from gptoss_trt.runtime.engine.messages import FinishReason, IdArray, Submit, TokenLogprobs, Usage


@dataclass(eq=False)
class BlockTable:
    """KV blocks of one sequence. `window[0]` is logical block `window_first`; `hashes` cover whole blocks only. While
    the sequence holds blocks it is one and the same object, whose lists grow at their end and shrink at their front."""

    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    window_first: int = 0
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0  # leading blocks whose hashes the pools know


@dataclass(eq=False)
class Sequence:
    """One of the n answers to a request."""

    request: Request
    index: int
    tokens: IdArray  # prompt, then output; who looks at its memory lets go of it before a token is appended
    computed: int = 0
    planned: int = 0  # tokens behind those, of steps that are planned and not committed
    awaited: int = 0  # tokens behind `tokens`, which those steps bring
    table: BlockTable = field(default_factory=BlockTable)
    rank: tuple[int, int, int] = (0, 0, 0)  # order among the running: lower is served first and preempted last
    finished: bool = False
    paused: bool = False  # preempted: its blocks are gone, its tokens are kept
    cached_tokens: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.submit.token_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys and values no step was planned for yet: 1 while decoding."""
        return len(self.tokens) + self.awaited - self.computed - self.planned

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.output_tokens + self.awaited > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.request.submit.prompt_logprobs is not None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.wants_prompt_logprobs and len(self.request.prompt_logprobs) < self.prompt_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            kv_new_blocks=self.new_blocks,
            kv_reused_blocks=self.reused_blocks,
            kv_total_blocks=self.new_blocks + self.reused_blocks,
            arrival_ns=self.request.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )


@dataclass(eq=False)
class Request:
    """A submitted request. `seed` is the submit's own or one drawn for it; `salt` separates cached prefixes."""

    key: RequestKey
    submit: Submit
    arrival_ns: int
    order: int  # counts requests: a tie-break that is never equal
    seed: int
    salt: bytes
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    memo: object = None  # what the part that has its tokens chosen remembers of it

    @property
    def remaining(self) -> int:
        return sum(not sequence.finished for sequence in self.sequences)

    @property
    def tenant(self) -> tuple[int, str]:
        """Who the queue is fair between: a connection and a cache salt."""
        return self.key[0], self.submit.cache_salt

    @property
    def deadline_ns(self) -> int | None:
        deadline_ms = self.submit.deadline_ms
        return None if deadline_ms is None else self.arrival_ns + deadline_ms * 1_000_000


def end_reason(sequence: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token: a stop id or sequence (both from min_tokens on), or its length."""
    submit, tokens = sequence.request.submit, sequence.tokens
    done = len(tokens) - sequence.prompt_tokens
    if done >= submit.min_tokens:
        if tokens[-1] in submit.stop_ids:
            return "stop"
        for stop in submit.stop_sequences:
            if len(stop) <= done and tuple(tokens[-len(stop) :]) == stop:
                return "stop"
    return "length" if done >= submit.max_tokens else None
