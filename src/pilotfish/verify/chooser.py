"""Which acceptance rule a request gets."""

from __future__ import annotations

from torch import Tensor

from pilotfish.types import Draft, SamplingParams, SequenceView, VerifyOutcome
from pilotfish.verify.base import Verifier
from pilotfish.verify.greedy import GreedyVerifier
from pilotfish.verify.matching import MatchingVerifier
from pilotfish.verify.rejection import RejectionVerifier


def choose_verifier(sampling: SamplingParams) -> Verifier:
    """Greedy at temperature 0; else the rule that the request names or its seed implies."""
    if sampling.is_greedy:
        return GreedyVerifier()
    return MatchingVerifier() if sampling.acceptance_rule == "matching" else RejectionVerifier()


class RequestVerifier:
    """Verifies each sequence by the rule of its own request."""

    def verify(self, sequence: SequenceView, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """See `Verifier.verify`."""
        return choose_verifier(sequence.sampling).verify(sequence, draft, logits)
