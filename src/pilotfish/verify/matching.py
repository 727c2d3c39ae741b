"""Seed-exact matching: a draft token is accepted while it is the token that the target itself draws there.

The target's draw is a Gumbel-max with noise that depends on the answer's key (a hash of seed and answer number), the
position in the sequence and the token id, and on nothing else. So the token at a position is a function of the tokens
before it: the text of a seed is the same whatever was drafted, and how much of it was drafted, batched or chunked. The
law is the target's, since each position's noise is drawn once and no draft sways it.

A drafter that draws with the same noise from a distribution of its own agrees with probability at least
(1 - TV) / (1 + TV), TV the total variation distance of both distributions (Daliri, Musco and Suresh 2024,
arXiv 2408.07978); `Draft.probs` plays no part.
"""

from __future__ import annotations

from torch import Tensor

from pilotfish.ops.sampling import gumbel_argmax
from pilotfish.types import Draft, SequenceView, VerifyOutcome
from pilotfish.verify.base import accept_equal, target_distribution


class MatchingVerifier:
    """Accepts exactly the tokens that target-only sampling with the same key would have drawn."""

    def verify(self, sequence: SequenceView, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """See `Verifier.verify`."""

        def target_token_id(row: int) -> int:
            found = target_distribution(sequence, draft, logits, row)
            return gumbel_argmax(found, sequence.noise_key, len(sequence.token_ids) + row)

        return accept_equal(draft, target_token_id)
