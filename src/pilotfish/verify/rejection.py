"""Rejection sampling: drafts are accepted as often as leaves the target's distribution as it is.

    p   what the target may say at a position, after the request's penalties, temperature and filters
    q   the very distribution that the draft token was drawn from there, after its own temperature and filters; for a
        drafter without probabilities all of it lies on the token drafted (one-hot)

A draft token x is accepted with probability min(1, p(x) / q(x)). At the first rejection the target's token is drawn
from the residual, max(p - q, 0) made to add up to 1; where all were accepted it is drawn from p. Then each token has
the law p, and a draft token is accepted with probability 1 - TV(p, q), which no exact rule can exceed for one token
(Leviathan, Kalman and Matias 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

What this stands on: whether a token is drafted, and from which q, depends on nothing that was drawn for that position
or later; every token drawn is submitted; the draws for drafts, acceptance and recovery are independent of each other.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pilotfish.errors import DrafterError, brief
from pilotfish.ops.sampling import (
    Distribution,
    NoisePurpose,
    gumbel_argmax,
    purpose_key,
    residual,
    uniform,
)
from pilotfish.types import Draft, SequenceView, VerifyOutcome
from pilotfish.verify.base import make_outcome, target_distribution

_SUM_TOLERANCE = 1e-6


class RejectionVerifier:
    """Accepts and replaces draft tokens so that every token has the target's own distribution."""

    def verify(self, sequence: SequenceView, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """See `Verifier.verify`. Raises `DrafterError` for `draft.probs` that the token cannot have been drawn from."""
        acceptance_key = purpose_key(sequence.noise_key, NoisePurpose.ACCEPTANCE)
        recovery_key = purpose_key(sequence.noise_key, NoisePurpose.RECOVERY)
        start = len(sequence.token_ids)
        for row, token_id in enumerate(draft.token_ids):
            p, q = target_distribution(sequence, draft, logits, row), draft_distribution(draft, row)
            if not is_accepted(prob_of(p, token_id), prob_of(q, token_id), uniform(acceptance_key, start + row)):
                return make_outcome(draft, row, gumbel_argmax(residual(p, q), recovery_key, start + row))
        length = len(draft.token_ids)
        p = target_distribution(sequence, draft, logits, length)
        return make_outcome(draft, length, gumbel_argmax(p, recovery_key, start + length))


def is_accepted(p: float, q: float, u: float) -> bool:
    """With u uniform on (0, 1): never where p is 0, always where p >= q > 0, else with probability p / q."""
    return p >= q or u * q < p


def draft_distribution(draft: Draft, row: int) -> Distribution:
    """q of one draft token. Raises `DrafterError` where it is no distribution, or gives that token nothing."""
    token_id = draft.token_ids[row]
    if draft.probs is None:
        return Distribution(np.array([token_id], np.int32), np.ones(1))
    q = draft.probs[row]
    if q.token_ids[0] < 0 or (np.diff(q.token_ids) <= 0).any():
        token_ids = brief(q.token_ids.tolist())
        raise DrafterError(f"a drafter gave probabilities of ids that do not ascend from 0: {token_ids}")
    with np.errstate(invalid="ignore"):  # not a number is an answer too
        total, own = float(q.probs.sum()), prob_of(q, token_id)
    if not (abs(total - 1) < _SUM_TOLERANCE and own > 0 and q.probs.min() >= 0):
        raise DrafterError(
            f"a drafter gave probabilities that its token {token_id} cannot have been drawn from: they add up to "
            f"{total}, the least is {q.probs.min()}, its own is {own}; give the distribution "
            "that each token was drawn from, or no probs"
        )
    return q


def prob_of(distribution: Distribution, token_id: int) -> float:
    """The probability of one id, 0 where it is not there."""
    place = int(np.searchsorted(distribution.token_ids, token_id))
    found = place < len(distribution.token_ids) and distribution.token_ids[place] == token_id
    return float(distribution.probs[place]) if found else 0.0
