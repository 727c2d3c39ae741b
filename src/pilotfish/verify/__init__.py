"""Decides which drafted tokens the target agrees to, and what it says next."""

from pilotfish.verify.greedy import GreedyVerifier, Verifier

__all__ = ["GreedyVerifier", "Verifier"]
