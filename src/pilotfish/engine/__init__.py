"""Whole answers: a prompt in, a stream of events or a result out."""

from pilotfish.engine.api import generate, generate_answers, next_token_logits, speculative_generate, stream
from pilotfish.engine.generation import GenerationStream

__all__ = ["GenerationStream", "generate", "generate_answers", "next_token_logits", "speculative_generate", "stream"]
