"""What a tokenizer is made of, as the readers of the file formats hand it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from pilotfish.tokenizer.split_rules import SplitRule
from pilotfish.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer's description, checked but for the merges, which may still name texts that there are not."""

    vocabulary: Vocabulary
    rule: SplitRule
    merges: Sequence[tuple[str, str]]
    merges_source: str
    """What errors call the merges."""
    added_tokens: Sequence[tokenizers.AddedToken]
    """The control and user-defined tokens."""
    add_bos_token: bool
    """Whether prompts start with BOS."""
    chat_template: str | None
    chat_template_source: str
    """Where a chat template would have stood."""
    bos_token: str
    """What the chat template is told; empty for none."""
    eos_token: str
