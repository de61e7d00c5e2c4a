"""1,000 teacher-forced steps through four full-width layers, as graphs, beside the reference's one pass over the same
text: the steps' error does not grow beyond that of the kernels' own pass.

The reference is the fp32 (attention: fp64) functions of `reference/`, run on the card through the same layers, so both
round at the same places and differ by the order of sums. In a random model that is not little: a rounding flips an FP8
code, a near tie another expert, and later tokens read the keys of those. It hits one pass as it hits steps; what only
steps do, such as a key that is lost or a rotation that drifts, adds up beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from gptoss_trt.build_engine.shapes import model_config
from gptoss_trt.build_engine.spec import Formats
from gptoss_trt.ops import cpu, cpu_weights, dispatch
from gptoss_trt.runtime.model import GptOssModel, GraphedModel, StepBatch
from gptoss_trt.runtime.model.loader import random_weights

LAYERS, STEPS, BLOCK_TOKENS, WINDOW = 4, 1000, 64, 128
PROMPTS = (1, 100, 129)  # tokens that the sequences have before the steps
QUARTERS = 4
MOST_ERROR = 0.2  # median of a quarter's errors, in standard deviations of the logits (an H200: 0.04 to 0.11)
MOST_EXCESS = 1.5  # of that over the median of one pass
DRIFT = 2e-4  # of a position's angles, in the test that must see it


def ints(values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


@dataclass
class Text:
    """Token ids [S, longest]; sequence s has `prompts[s]` tokens before STEPS more. Block tables [S, B] of its own."""

    ids: torch.Tensor
    prompts: tuple[int, ...]
    table: torch.Tensor

    @classmethod
    def random(cls, prompts: tuple[int, ...], steps: int = STEPS) -> Text:
        generator = torch.Generator().manual_seed(len(prompts))
        longest = max(prompts) + steps
        ids = torch.randint(0, 200_000, (len(prompts), longest), generator=generator, dtype=torch.int32)
        blocks = -(-longest // BLOCK_TOKENS)
        table = torch.randperm(len(prompts) * blocks, generator=generator).to(torch.int32).reshape(len(prompts), blocks)
        return cls(ids, prompts, table)

    def piece(self, begins: Sequence[int], ends: Sequence[int], rows: Sequence[int]) -> StepBatch:
        """Tokens [begins[s], ends[s]) of every sequence at once, logits of those from rows[s] on."""
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        spans = list(zip(begins, ends, strict=True))
        wanted = [torch.arange(max(row - begin, 0), end - begin) for (begin, end), row in zip(spans, rows, strict=True)]
        return StepBatch(
            token_ids=torch.cat([self.ids[s, begin:end] for s, (begin, end) in enumerate(spans)]),
            positions=torch.cat([torch.arange(begin, end, dtype=torch.int32) for begin, end in spans]),
            query_start=ints(starts),
            context_lens=ints(ends),
            full_blocks=self.table,
            window_blocks=self.table,
            window_first_block=torch.zeros(len(ends), dtype=torch.int32),
            logits_rows=ints(torch.cat([start + rows for start, rows in zip(starts, wanted, strict=False)])),
        )

    def step(self, number: int) -> StepBatch:
        """One more token of every sequence; the window's table begins with the first block that it sees."""
        rows = len(self.prompts)
        positions = ints(self.prompts) + number
        first = (positions + 1 - WINDOW).clamp(min=0) // BLOCK_TOKENS
        entries = first[:, None] + torch.arange(WINDOW // BLOCK_TOKENS + 1, dtype=torch.int32)
        inside = entries < self.table.shape[1]
        window = self.table.gather(1, entries.clamp(max=self.table.shape[1] - 1).long())
        return StepBatch(
            token_ids=self.ids.gather(1, positions[:, None].long())[:, 0],
            positions=positions,
            query_start=torch.arange(rows + 1, dtype=torch.int32),
            context_lens=positions + 1,
            full_blocks=self.table,
            window_blocks=torch.where(inside, window, -1),
            window_first_block=ints(first),
            logits_rows=torch.arange(rows, dtype=torch.int32),
        )


def on_card(batch: StepBatch) -> StepBatch:
    return StepBatch(**{name: value.cuda() for name, value in vars(batch).items()})


@pytest.fixture(scope="module")
def model() -> GraphedModel:
    device = torch.device("cuda")
    weights = random_weights(model_config("gpt-oss-20b", LAYERS), Formats(), 3, device)
    return GraphedModel(GptOssModel(weights, device))


def one_pass(model: GptOssModel, text: Text) -> torch.Tensor:
    """Logits fp32 [S, STEPS, vocabulary] of the steps' tokens, read as prompts."""
    piece = text.piece([0] * len(text.prompts), [count + STEPS for count in text.prompts], text.prompts)
    return model.forward(on_card(piece)).view(len(text.prompts), STEPS, -1)


def expected(model: GptOssModel, text: Text, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The reference's."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", lambda op, arguments: getattr(cpu, op)(*arguments))
        patch.setattr(cpu_weights, "_CACHE", cpu_weights.ProductCache(limit_bytes=0))
        return one_pass(model, text)


def distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Root mean square of the error of each row of logits over the row's standard deviation."""
    return (got - want).square().mean(-1).sqrt() / want.std(-1)


def step_by_step(graphed: GraphedModel, text: Text, want: torch.Tensor) -> torch.Tensor:
    """Errors fp32 [S, STEPS]."""
    graphed.model.forward(on_card(text.piece([0] * len(text.prompts), text.prompts, text.prompts)))
    return torch.stack([distance(graphed.forward(text.step(n)), want[:, n]) for n in range(STEPS)], 1)


def medians(found: torch.Tensor) -> list[float]:
    """The median error of each quarter of the steps."""
    return [float(part.median()) for part in found.split(STEPS // QUARTERS, 1)]


def check(steps: torch.Tensor, whole: torch.Tensor) -> None:
    """Errors of the steps against those of one pass, quarter by quarter."""
    pairs = list(zip(medians(steps), medians(whole), strict=True))
    print("medians of the quarters, steps and one pass:", pairs)
    assert max(step for step, _ in pairs) < MOST_ERROR, pairs
    assert max(step / one for step, one in pairs) < MOST_EXCESS, pairs


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "three"])
def test_the_error_has_no_trend(model: GraphedModel, prompts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a rotation that drifts in the steps alone, by 0.2 at the end, is seen."""
    text = Text.random(prompts)
    blocks = text.table.numel()
    model.allocate_kv(blocks, blocks, BLOCK_TOKENS)
    want = expected(model.model, text, monkeypatch)
    model.allocate_kv(blocks, blocks, BLOCK_TOKENS)
    whole = distance(one_pass(model.model, text), want)
    model.allocate_kv(blocks, blocks, BLOCK_TOKENS)
    check(step_by_step(model, text, want), whole)
    model.allocate_kv(blocks, blocks, BLOCK_TOKENS)
    monkeypatch.setattr(model.model, "_cos_sin", drifting(model.model._cos_sin))
    with pytest.raises(AssertionError):
        check(step_by_step(model, text, want), whole)


def drifting(cos_sin: torch.Tensor) -> torch.Tensor:
    """The table of rotations [positions, head_dim] with DRIFT more a position."""
    cos, sin = cos_sin.chunk(2, dim=1)
    size = (cos.square() + sin.square()).sqrt()
    angle = torch.atan2(sin, cos) + torch.arange(len(cos_sin), device=cos_sin.device)[:, None] * DRIFT
    return torch.cat((size * angle.cos(), size * angle.sin()), dim=1)
