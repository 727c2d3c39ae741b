"""Greedy verification: a draft token is accepted while it is the target's own argmax.

The target saw the last accepted token and the k draft tokens in one forward, so row i of its logits is what it would
say after the first i draft tokens. The accepted prefix is the longest one in which every draft token is the argmax of
the row before it. The row after that prefix gives one more token for nothing: *recovered* where a draft token was
rejected, *bonus* where all were accepted, *plain* where there was no draft (Stern et al. 2018, arXiv 1811.03115;
Leviathan et al. 2022, arXiv 2211.17192, at temperature zero).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pilotfish.ops.native import argmax
from pilotfish.types import Draft, VerifyOutcome


class Verifier(Protocol):
    def verify(self, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """The verdict on one sequence's draft; logits is float32 [len(draft.token_ids) + 1, vocab_size]."""


class GreedyVerifier:
    """Accepts exactly the tokens that target-only greedy decoding would have given."""

    def verify(self, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """See `Verifier.verify`. Raises `NonFiniteLogitsError` where a row has no usable maximum."""
        target_ids = argmax(logits)
        accepted = 0
        while accepted < len(draft.token_ids) and draft.token_ids[accepted] == target_ids[accepted]:
            accepted += 1
        if not draft.token_ids:
            return VerifyOutcome(0, target_ids[0], "plain")
        return VerifyOutcome(
            accepted, target_ids[accepted], "bonus" if accepted == len(draft.token_ids) else "recovered"
        )
