"""Decides which drafted tokens the target agrees to, and what it says next."""

from pilotfish.verify.base import Verifier
from pilotfish.verify.chooser import RequestVerifier, choose_verifier
from pilotfish.verify.greedy import GreedyVerifier
from pilotfish.verify.matching import MatchingVerifier
from pilotfish.verify.rejection import RejectionVerifier

__all__ = [
    "GreedyVerifier",
    "MatchingVerifier",
    "RejectionVerifier",
    "RequestVerifier",
    "Verifier",
    "choose_verifier",
]
