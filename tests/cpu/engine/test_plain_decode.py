"""Tokens that the model draws are those that the sampler would choose, and only steps that want no more take that
way."""

from __future__ import annotations

from array import array

import pytest
import torch

from gptoss_trt.reference.sample import sample
from gptoss_trt.runtime.engine.messages import IDS, Sampling, Submit
from gptoss_trt.runtime.engine.plain_decode import draws_of, is_drawn, outcomes_of
from gptoss_trt.runtime.engine.sampler import NOT_FINITE, Sampler
from gptoss_trt.runtime.engine.sequence import Request, Sequence
from gptoss_trt.runtime.engine.step_plan import Work

VOCABULARY = 3000


def work(sampling: Sampling | None = None, *, seed: int = 5, output: int = 3, **changes: object) -> Work:
    submit = Submit("r", (1, 2, 3), 50, sampling=sampling or Sampling(), **changes)  # type: ignore[arg-type]
    request = Request((0, "r"), submit, 0, 0, seed, b"")
    sequence = Sequence(request, 0, array(IDS, (1, 2, 3, *range(output))), computed=2 + output)
    sequence.table.full, sequence.table.window = [0, 1], [0, 1]
    return Work(sequence, 2 + output, 1, 1)


def test_tokens_are_the_samplers() -> None:
    works = [work(Sampling(temperature=t), seed=s) for s in range(8) for t in (0.0, 0.3, 1.0, 1.7)]
    logits = torch.randn(len(works), VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    logits[4] = float("nan")
    draws, sequences = draws_of(works, None)
    assert sequences == [w.sequence for w in works]
    tokens = sample(logits, torch.from_numpy(draws.temperature), torch.from_numpy(draws.share)).tolist()
    got = outcomes_of(works, tokens)
    want = Sampler().sample(logits.clone(), [w.sequence for w in works])
    assert got[4].failure == want[4].failure == NOT_FINITE
    assert [o.token for i, o in enumerate(got) if i != 4] == [o.token for i, o in enumerate(want) if i != 4]


def test_an_awaited_token_counts_as_output() -> None:
    """A step ahead draws with the random number of its own position, not of the one that is awaited."""
    behind = work(Sampling(temperature=1.0), output=4)
    ahead = work(Sampling(temperature=1.0), output=3)
    ahead.start, ahead.sequence.awaited = behind.start, 1
    assert ahead.samples
    want, got = (draws_of([one], None)[0].share for one in (behind, ahead))
    assert want == got


def test_works_that_sample_nothing_draw_nothing() -> None:
    chunk = Work(work().sequence, 0, 3, 0)
    works = [work(), chunk, work()]
    assert is_drawn(works, 2) and not is_drawn(works, 1)
    draws, sequences = draws_of(works, None)
    assert len(draws.temperature) == len(sequences) == 2
    assert [outcome.token for outcome in outcomes_of(works, [5, 6])] == [5, None, 6]


@pytest.mark.parametrize(
    "plain",
    [
        work(),
        work(Sampling(temperature=0.0, top_p=0.5)),
        work(Sampling(top_k=1)),
        work(stop_ids=(7,), min_tokens=2),
        work(min_tokens=40),
        work(Sampling(temperature=0.0, top_k=7)),
        Work(work().sequence, 0, 6, 1),
    ],
)
def test_plain_steps(plain: Work) -> None:
    assert is_drawn([plain, work()], 256)


@pytest.mark.parametrize(
    "other",
    [
        work(Sampling(top_k=5)),
        work(Sampling(top_p=0.9)),
        work(Sampling(min_p=0.1)),
        work(Sampling(repetition_penalty=1.1)),
        work(Sampling(presence_penalty=0.1)),
        work(Sampling(frequency_penalty=0.1)),
        work(logit_bias=((4, 1.0),)),
        work(bad_sequences=((4,),)),
        work(logprobs=0),
        work(stop_ids=(7,), min_tokens=40),
        Work(work().sequence, 1, 2, 2),
        Work(work(prompt_logprobs=0).sequence, 5, 1, 1),
    ],
)
def test_steps_that_want_more(other: Work) -> None:
    assert not is_drawn([work(), other], 256)
