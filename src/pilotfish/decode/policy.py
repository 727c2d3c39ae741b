"""How many tokens to draft for each sequence of a step, and with which drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotfish.drafters import Drafter
from pilotfish.types import SequenceView


@dataclass(frozen=True)
class Candidate:
    """A sequence in decode, and the most tokens that could still be drafted, verified and used for it."""

    sequence: SequenceView
    max_draft_tokens: int


class LengthPolicy(Protocol):
    def choose(self, candidates: Sequence[Candidate], base_rows: int) -> list[tuple[Drafter | None, int]]:
        """Drafter and number of draft tokens per candidate; (None, 0) to decode it plainly.

        The choice is for the whole step, since all rows share one forward; `base_rows` counts those without drafts.
        """


class FixedLength:
    """The same drafter and the same proposal length in every step."""

    def __init__(self, drafter: Drafter | None, proposal_length: int) -> None:
        self._choice = (drafter, proposal_length)

    def choose(self, candidates: Sequence[Candidate], base_rows: int) -> list[tuple[Drafter | None, int]]:
        return [self._choice for _ in candidates]
