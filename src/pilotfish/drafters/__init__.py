"""Where guesses come from."""

from pilotfish.drafters.base import Drafter, SingleSequenceDrafter
from pilotfish.drafters.draft_model import DraftModelDrafter

__all__ = ["DraftModelDrafter", "Drafter", "SingleSequenceDrafter"]
