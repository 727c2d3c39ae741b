"""One sequence while it is decoded: its tokens, its cache, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.kvcache import KVCache
from pilotfish.types import FinishReason, GenerationStats, SamplingParams


@dataclass(eq=False)
class SequenceState:
    """A request's tokens, prompt first. The newest token is not in the cache yet."""

    request_id: str
    token_ids: list[int]
    cache: KVCache
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    context_length: int
    """Most tokens, prompt and output together."""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)
    stats: GenerationStats = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.stats = GenerationStats(num_prompt_tokens=self.num_prompt_tokens)
        if self.tokens_left == 0:
            self.finish_reason = "length"

    @property
    def tokens_left(self) -> int:
        """How many more tokens may be put out."""
        room = self.context_length - len(self.token_ids)
        if self.sampling.max_tokens is None:
            return room
        return min(room, self.sampling.max_tokens - (len(self.token_ids) - self.num_prompt_tokens))

    def commit(self, token_ids: Sequence[int]) -> int:
        """Appends tokens up to the first that ends the sequence; returns how many that were.

        This is the one place where a sequence ends by itself: at EOS, which is kept as its last token, or at the
        token budget.
        """
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            self.stats.num_tokens += 1
            if token_id in self.eos_token_ids:
                self.finish_reason = "stop"
            elif self.tokens_left == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count
        return len(token_ids)
