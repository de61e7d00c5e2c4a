"""The hook for guided decoding: what a grammar library must offer to constrain a sequence's tokens.

Invariant: an engine without a compiler refuses every guide and names its kind. Must not know any grammar library; a
compiler is handed to the engine when it is loaded.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gptoss_trt.runtime.engine.messages import Guide


class GuideError(ValueError):
    """A guide that cannot be compiled; the text becomes the request's INVALID_ARGUMENT."""


class GuideMatcher(Protocol):
    """The state of one sequence's guides. It also watches for their triggers and end ids."""

    @property
    def failure(self) -> str:
        """Why the grammar cannot go on, as one that outgrew its bounds cannot; empty while it can."""

    def mask(self, logits: torch.Tensor) -> None:
        """Sets the entries of `logits` ([vocabulary], fp32) that may not come next to -inf; all after a failure."""

    def accept(self, token: int) -> None:
        """Moves on by the token that was chosen."""


class GuideCompiler(Protocol):
    """Compiles a request's guides once for each of its sequences."""

    def compile(self, guides: tuple[Guide, ...]) -> GuideMatcher:
        """A fresh matcher. Raises GuideError that names the guide and what is wrong with it."""
