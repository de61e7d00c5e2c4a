"""How the tokens of a step are drawn, as the host tells the device.

Invariant: the random number comes as an argument; the op `sample` draws. Must not know requests or seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_FINITE = -1  # in the place of a token whose logits hold NaN or infinity


@dataclass(frozen=True)
class Draws:
    """How the tokens of a step are drawn, in host memory: temperature and share fp32 [R] as the op takes them.

    `source` int32 [T] says which of the step's own tokens the step launched before it drew: the row of its draws, or
    -1 for a token that batch.token_ids holds; None: all are there.
    """

    temperature: NDArray[np.float32]
    share: NDArray[np.float32]
    source: NDArray[np.int32] | None = None

    @classmethod
    def greedy(cls, rows: int) -> Draws:
        zeros = np.zeros(rows, np.float32)
        return cls(zeros, zeros)
