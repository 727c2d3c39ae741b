"""The decoder-only transformer, and the batch of token rows that one forward takes."""

from pilotfish.model.batch import ForwardBatch, ForwardInput, run_forward
from pilotfish.model.transformer import Transformer

__all__ = ["ForwardBatch", "ForwardInput", "Transformer", "run_forward"]
