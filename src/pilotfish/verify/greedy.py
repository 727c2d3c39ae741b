"""Greedy verification: a draft token is accepted while it is the target's own argmax.

The target saw the last accepted token and the k draft tokens in one forward, so row i of its logits is what it would
say after the first i draft tokens. The accepted prefix is the longest one in which every draft token is the argmax of
the row before it, after the request's own penalties, biases and bans, each row with its own history. The row after
that prefix gives one more token for nothing (Stern et al. 2018, arXiv 1811.03115; Leviathan et al. 2022,
arXiv 2211.17192, at temperature zero).
"""

from __future__ import annotations

from torch import Tensor

from pilotfish.ops.sampling import greedy_token
from pilotfish.types import Draft, SequenceView, VerifyOutcome
from pilotfish.verify.base import accept_equal


class GreedyVerifier:
    """Accepts exactly the tokens that target-only greedy decoding would have given."""

    def verify(self, sequence: SequenceView, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """See `Verifier.verify`."""

        def target_token_id(row: int) -> int:
            drafted, ends = draft.token_ids[:row], sequence.end_token_ids
            return greedy_token(logits[row], sequence.sampling, sequence.history, drafted, ends, row)

        return accept_equal(draft, target_token_id)
