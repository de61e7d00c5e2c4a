"""What the scheduler and what runs a step tell each other: the works of a plan, and the outcome of each.

Invariant: outcomes come in the order of the plan's works. Must not know how either side decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gptoss_trt.runtime.engine.messages import ErrorCode, TokenLogprobs
from gptoss_trt.runtime.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Work:
    """Tokens [start, start + count) of a sequence; logits are wanted of the last `logits` of them (0: none). The last
    of them are a `draft`, which is not among the sequence's tokens; each of them and the one before has logits."""

    sequence: Sequence
    start: int
    count: int
    logits: int
    draft: tuple[int, ...] = ()
    samples: bool = field(init=False)
    """Whether it ends with a new token. Planned ahead, it may begin with a token that is awaited."""

    def __post_init__(self) -> None:
        self.samples = self.start + self.count - len(self.draft) >= len(self.sequence.tokens)


class Outcome(NamedTuple):
    """What a step made of one Work: a token (when it samples), or what went wrong. `following`: the tokens behind it,
    as many as tokens of the work's draft came true before the sequence's end."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens after each row
    failure: str | None = None
    following: tuple[Outcome, ...] = ()
    code: ErrorCode = "INTERNAL"  # of the failure; INVALID_ARGUMENT where the request's own rules leave no token


@dataclass
class StepPlan:
    """The work of one step: tokens in all, those of prompts, rows of logits for prompts' log-probabilities, and tokens
    kept for a long prompt while it is planned."""

    work: list[Work] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    logprob_rows: int = 0
    reserved: int = 0
