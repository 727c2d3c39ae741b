"""Token ids and text: tokenizer, incremental detokenizer, chat template and the pair contract."""

from pilotfish.tokenizer.detokenizer import IncrementalDetokenizer
from pilotfish.tokenizer.pair import TokenizerPair, check_pair
from pilotfish.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerPair", "check_pair"]
