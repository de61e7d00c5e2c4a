"""Where each rank's piece of every weight lies in the unsharded weight: cuts as numbers, no tensors.

Invariant: cuts of FP8 and MXFP4 weights fall on block borders (or inside one block that both neighbours keep), so a
rank's bytes and scales equal the unsharded ones. Standard library and spec only. Must not know files or their formats.

A bias that all ranks of a group would add (attention output, second expert product) is whole in the one rank that adds
it and zeros in the others' files: every rank runs the same program and the sum has it once.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptoss_trt.build_engine.spec import BLOCK, ModelConfig, ParallelMapping, RankShare, rank_share

Span = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Cut:
    """A piece of a weight [..., rows, columns]: spans of rows put one after another, and one span of columns.

    For a vector the rows are its elements and `columns` is (0, 1). `origins` are the first rows of the segments that
    the row spans belong to (q, k and v each begin a new scale block). `zero`: this rank's file holds zeros instead.
    """

    rows: tuple[Span, ...]
    columns: Span
    origins: tuple[int, ...] = (0,)
    zero: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return sum(stop - start for start, stop in self.rows), self.columns[1] - self.columns[0]

    def scale_rows(self) -> tuple[Span, ...]:
        """Row spans in the grid of scales, where each segment's blocks follow the blocks of the segments before it."""
        spans, before = [], 0
        ends = (*self.origins[1:], None)
        for (start, stop), origin, end in zip(self.rows, self.origins, ends, strict=True):
            spans.append((before + (start - origin) // BLOCK, before + _ceil(stop - origin)))
            before += _ceil(end - origin) if end is not None else 0
        return tuple(spans)

    def scale_columns(self) -> Span:
        return self.columns[0] // BLOCK, _ceil(self.columns[1])


def cut_attention_and_dense(stem: str, config: ModelConfig, share: RankShare) -> Cut:
    """The cut of a weight outside the experts, by its name inside the layer: `attention.qkv.weight`, `norm.weight`."""
    hidden, head = config.hidden_size, config.head_dim
    if stem in ("embedding.weight", "lm_head.weight"):
        return Cut((share.vocab,), (0, hidden))
    if stem in ("attention.qkv.weight", "attention.qkv.bias"):
        return _qkv(config, share, hidden if stem.endswith("weight") else 1)
    if stem == "attention.sinks":
        return Cut((share.q_heads,), (0, 1))
    if stem == "attention.out.weight":
        return Cut(((0, hidden),), (share.q_heads[0] * head, share.q_heads[1] * head))
    if stem == "attention.out.bias":
        return Cut(((0, hidden),), (0, 1), zero=not share.adds_attention_bias)
    if stem in ("attention.norm.weight", "moe.norm.weight", "norm.weight"):
        return Cut(((0, hidden),), (0, 1))
    if stem in ("moe.router.weight", "moe.router.bias"):
        return Cut(((0, config.num_experts),), (0, hidden if stem.endswith("weight") else 1))
    raise KeyError(f"no cut is known for {stem}")


def _qkv(config: ModelConfig, share: RankShare, columns: int) -> Cut:
    head, k_origin, v_origin = config.head_dim, config.q_size, config.q_size + config.kv_size
    queries = (share.q_heads[0] * head, share.q_heads[1] * head)
    keys, values = (
        (origin + share.kv_heads[0] * head, origin + share.kv_heads[1] * head) for origin in (k_origin, v_origin)
    )
    return Cut((queries, keys, values), (0, columns), (0, k_origin, v_origin))


def cut_expert(stem: str, config: ModelConfig, share: RankShare) -> Cut:
    """The cut of one expert's weight or bias: `gate_up.weight`, `gate_up.bias`, `down.weight`, `down.bias`."""
    first, last = share.intermediates
    if stem == "gate_up.weight":
        return Cut(((2 * first, 2 * last),), (0, config.hidden_size))
    if stem == "gate_up.bias":
        return Cut(((2 * first, 2 * last),), (0, 1))
    if stem == "down.weight":
        return Cut(((0, config.hidden_size),), (first, last))
    if stem == "down.bias":
        return Cut(((0, config.hidden_size),), (0, 1), zero=not share.adds_expert_bias)
    raise KeyError(f"no cut is known for {stem}")


def shares(config: ModelConfig, mapping: ParallelMapping) -> list[RankShare]:
    """Every rank's share, in rank order. Raises SpecError as `rank_share` does."""
    return [rank_share(config, mapping, rank) for rank in range(mapping.world)]


def local_rows(rows: Span, chunk: Span) -> tuple[Span, int] | None:
    """What of `chunk` (rows of the unsharded weight) lies in a rank's `rows`, and its first row there; else None."""
    start, stop = max(rows[0], chunk[0]), min(rows[1], chunk[1])
    return ((start, stop), start - rows[0]) if start < stop else None


def _ceil(size: int) -> int:
    return -(-size // BLOCK)
