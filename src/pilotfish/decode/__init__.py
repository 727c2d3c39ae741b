"""The one decode step, plain and speculative alike, and the sequences it advances."""

from pilotfish.decode.policy import Candidate, FixedLength, LengthPolicy
from pilotfish.decode.sequence import SequenceState
from pilotfish.decode.step import StepOutput, step

__all__ = ["Candidate", "FixedLength", "LengthPolicy", "SequenceState", "StepOutput", "step"]
