"""What a drafter is, and the shortest way to write one.

A drafter may be wrong, late or hostile: it changes the speed of an answer, never a word of it. One thing is taken on
trust, where tokens are drawn without a seed: `Draft.probs` are what the tokens were drawn from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from pilotfish.types import Draft, DraftRequest, SequenceView, VerifyOutcome


class Drafter(Protocol):
    """Guesses next tokens. It owns whatever caches it needs, keyed by `request_id`."""

    @property
    def name(self) -> str: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order, each of at most `max_draft_tokens` tokens and possibly empty."""

    def observe(self, sequence: SequenceView, outcome: VerifyOutcome) -> None:
        """Called after each commit to a sequence, whether or not this drafter proposed for it, unless the target's
        logits ended it."""

    def release(self, request_id: str) -> None:
        """Forgets a request; idempotent, and fine for one never seen."""


class SingleSequenceDrafter(ABC):
    """Base of a drafter without state of its own: a subclass says how it guesses for one sequence."""

    name = "custom"

    @abstractmethod
    def draft(self, token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        """At most `max_draft_tokens` ids that may continue `token_ids`."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(tuple(self.draft(request.sequence.token_ids, request.max_draft_tokens))) for request in requests]

    def observe(self, sequence: SequenceView, outcome: VerifyOutcome) -> None:
        """Nothing to keep."""

    def release(self, request_id: str) -> None:
        """Nothing to forget."""
