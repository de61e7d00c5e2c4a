"""What tokens cost, prefill and decode apart, from the price of a GPU hour.

The two share the GPU, so their shares are measured: a pass over prompts of the same kind with one token of answer gives
the rate at which the server reads prompts, P input tokens/s. For a level of duration T with I input and O output tokens
at p USD a second (hourly price x GPUs / 3600):

    prefill seconds    F = min(T, I / P)
    USD per Mtok in      = 1e6 * p * F / I
    USD per Mtok out     = 1e6 * p * (T - F) / O

Invariant: input cost + output cost = p * T, the price of the time used; idle time counts as decode. Must not know how P
was measured. Prompts answered from a prefix cache raise P, which is what they then cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Price:
    """A GPU's hour in USD and how many GPUs serve."""

    gpu_hour_usd: float
    gpus: int = 1

    @property
    def usd_s(self) -> float:
        return self.gpu_hour_usd * self.gpus / 3600.0


@dataclass(frozen=True)
class Cost:
    """USD per million tokens; None where there were none."""

    usd_per_m_input: float | None
    usd_per_m_output: float | None
    prefill_share: float


def split_cost(price: Price, *, duration_s: float, input_tokens: int, output_tokens: int, prefill_tok_s: float) -> Cost:
    """The formula above. Raises ValueError for a rate that is not positive."""
    if not prefill_tok_s > 0:
        raise ValueError(f"prefill rate {prefill_tok_s} tokens/s; it must be positive")
    prefill_s = min(duration_s, input_tokens / prefill_tok_s)
    return Cost(
        usd_per_m_input=_per_million(price.usd_s * prefill_s, input_tokens),
        usd_per_m_output=_per_million(price.usd_s * (duration_s - prefill_s), output_tokens),
        prefill_share=round(prefill_s / duration_s, 4) if duration_s > 0 else 0.0,
    )


def _per_million(usd: float, tokens: int) -> float | None:
    return round(1e6 * usd / tokens, 4) if tokens else None
