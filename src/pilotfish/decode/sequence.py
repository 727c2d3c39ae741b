"""One sequence while it is decoded: its tokens, its cache, its text, and when it ends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.decode.output_text import OutputText
from pilotfish.kvcache import KVCache
from pilotfish.ops.sampling import noise_key
from pilotfish.token_history import TokenHistory
from pilotfish.tokenizer.detokenizer import IncrementalDetokenizer
from pilotfish.types import FinishReason, GenerationStats, SamplingParams, TokenKind, TokenLogprobs, TokenOutput


@dataclass(eq=False)
class SequenceState:
    """One answer to a request; prompt and output are its tokens. The newest token is not in the cache yet."""

    request_id: str
    token_ids: list[int]
    cache: KVCache
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    context_length: int
    """Most tokens, prompt and output together."""
    detokenizer: IncrementalDetokenizer
    """A fresh one."""
    answer: int = 0
    """Which of the request's answers this is; they differ in their random draws."""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)
    history: TokenHistory = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    noise_key: int = field(init=False)
    stats: GenerationStats = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.history = TokenHistory(self.token_ids)
        own_eos: frozenset[int] = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.end_token_ids = own_eos.union(self.sampling.stop_token_ids)
        seed = self.sampling.seed
        self.noise_key = noise_key(secrets.randbits(64) if seed is None else seed, self.answer)
        self._text = OutputText(self.detokenizer, self.sampling.stop)
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

    def commit(
        self, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs | None]
    ) -> tuple[TokenOutput, ...]:
        """Appends tokens up to the first that ends the sequence, and returns those.

        This is the one place where a sequence ends by itself: at EOS or a token of the request's own, which is kept as
        its last and gives no text; at the token that completes a stop string; or at the token budget.
        """
        outputs: list[TokenOutput] = []
        for token_id, kind, token_logprobs in zip(token_ids, kinds, logprobs, strict=True):
            if self.finish_reason is not None:
                break
            is_end = token_id in self.end_token_ids
            text = "" if is_end else self._text.append(token_id)
            self.token_ids.append(token_id)
            self.history.append(token_id)
            self.stats.num_tokens += 1
            if is_end or self._text.is_stopped:
                self.finish_reason = "stop"
            elif self.tokens_left == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                text += self._text.finish()
                if self._text.is_stopped:  # by the U+FFFD that stands for an incomplete character
                    self.finish_reason = "stop"
            outputs.append(TokenOutput(token_id, text, kind, token_logprobs))
        return tuple(outputs)
