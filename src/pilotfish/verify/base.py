"""What every acceptance rule has in common: its interface, and how a draft is followed while the target agrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pilotfish.ops.sampling import Distribution, next_distribution
from pilotfish.types import Draft, SequenceView, VerifyOutcome


class Verifier(Protocol):
    def verify(self, sequence: SequenceView, draft: Draft, logits: Tensor) -> VerifyOutcome:
        """The verdict on a draft that continues `sequence`; logits is float32 [len(draft.token_ids) + 1, vocab_size].

        Row i is what the target says after the first i draft tokens. Raises `NonFiniteLogitsError` where a row that is
        needed is unusable; rows behind the first rejected token are not looked at.
        """


def target_distribution(sequence: SequenceView, draft: Draft, logits: Tensor, row: int) -> Distribution:
    """What the target may say after the first `row` draft tokens. Raises `NonFiniteLogitsError`."""
    drafted, ends = draft.token_ids[:row], sequence.end_token_ids
    return next_distribution(logits[row], sequence.sampling, sequence.history, drafted, ends, row)


def make_outcome(draft: Draft, num_accepted_tokens: int, next_token_id: int) -> VerifyOutcome:
    """The token after an accepted prefix is *recovered* where a draft token was rejected, *bonus* where all were
    accepted, *plain* where there was no draft."""
    if not draft.token_ids:
        return VerifyOutcome(0, next_token_id, "plain")
    is_bonus = num_accepted_tokens == len(draft.token_ids)
    return VerifyOutcome(num_accepted_tokens, next_token_id, "bonus" if is_bonus else "recovered")


def accept_equal(draft: Draft, target_token_id: Callable[[int], int]) -> VerifyOutcome:
    """Accepts draft tokens while each is the one that the target itself says, `target_token_id(row)`."""
    for row, token_id in enumerate(draft.token_ids):
        own_token_id = target_token_id(row)
        if token_id != own_token_id:
            return make_outcome(draft, row, own_token_id)
    return make_outcome(draft, len(draft.token_ids), target_token_id(len(draft.token_ids)))
