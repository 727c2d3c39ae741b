"""A small model as drafter: it guesses one token at a time, with a cache of its own per request.

A greedy request gets its argmax. A sampled one gets a draw from the draft model's own distribution, which went through
the request's penalties, temperature and filters. Under seed-exact matching the noise is that of the target's draw at
the same position, so that both tend to say the same; under rejection sampling it is independent of everything that the
target draws, and the draft says which distribution each token was drawn from.

The cache may lag behind the sequence, never lead it. What it lacks (the whole prompt the first time, one token after a
full acceptance, more where it did not draft for a while) it feeds itself together with the newest token in the first
forward of its next proposal; so keeping it in step costs no forward of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pilotfish.errors import InvariantError, NonFiniteLogitsError
from pilotfish.kvcache import DenseCache, KVCache
from pilotfish.model import ForwardInput, run_forward
from pilotfish.model.batch import ForwardModel
from pilotfish.ops.sampling import Distribution, draft_key, greedy_token, gumbel_argmax, next_distribution
from pilotfish.tokenizer import TokenizerPair
from pilotfish.types import Draft, DraftRequest, SamplingParams, SequenceView, VerifyOutcome


@dataclass
class _Proposal:
    """One request's draft in the making; `feed` is what the next forward takes."""

    cache: KVCache
    limit: int
    feed: list[int]
    sequence: SequenceView
    sampling: SamplingParams
    """The request's, without what is about ids that the draft model lacks."""
    end_token_ids: frozenset[int]
    """Likewise."""
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    """What each token was drawn from, where the target wants to know."""
    is_complete: bool = False

    @property
    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), tuple(self.probs) if self.probs else None)


class DraftModelDrafter:
    """Proposes a draft model's own continuation, which ends early at a token that ends the text."""

    name = "draft_model"

    def __init__(
        self,
        model: ForwardModel,
        pair: TokenizerPair,
        *,
        make_cache: Callable[[], KVCache] | None = None,
        max_num_batched_tokens: int = 128,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pair` is `check_pair`'s word that both models read token ids alike; `make_cache` gives each request's
        cache, a `DenseCache` by default; the prompt is read in chunks of at most `max_num_batched_tokens` rows."""
        self._model = model
        self._pair = pair
        self._make_cache = make_cache or (lambda: DenseCache(model.config))
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock = clock
        self._caches: dict[str, KVCache] = {}
        self._never_proposed = torch.tensor(sorted(pair.draft_only_token_ids), dtype=torch.int64)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.propose`. If a forward raises, a cache may be left ahead of its sequence until the next call."""
        start = self._clock()
        first_time = [request.sequence.request_id not in self._caches for request in requests]
        proposals = [self._start(request) for request in requests]
        active = [proposal for proposal in proposals if proposal is not None]
        for proposal in active:
            self._feed_all_but_last_chunk(proposal)
        self._extend(active)
        prefill_seconds = self._clock() - start
        while unfinished := [proposal for proposal in active if not proposal.is_complete]:
            self._extend(unfinished)
        return [
            Draft(())
            if proposal is None
            else replace(proposal.draft, prefill_seconds=prefill_seconds if first else 0.0)
            for proposal, first in zip(proposals, first_time, strict=True)
        ]

    def observe(self, sequence: SequenceView, outcome: VerifyOutcome) -> None:
        """Takes back what the cache holds beyond the committed tokens but the newest, and checks every layer."""
        cache = self._caches.get(sequence.request_id)
        if cache is None:
            return
        most = len(sequence.token_ids) - 1
        cache.rewind(max(0, cache.length - most))
        if cache.length > most or any(length != cache.length for length in cache.layer_lengths):
            raise InvariantError(
                f"the draft cache holds {cache.length} tokens, its layers {list(cache.layer_lengths)}, "
                f"for a sequence of {len(sequence.token_ids)}"
            )

    def release(self, request_id: str) -> None:
        cache = self._caches.pop(request_id, None)
        if cache is not None:
            cache.release()

    def _start(self, request: DraftRequest) -> _Proposal | None:
        """Where a request's draft begins; None where it cannot be drafted for.

        Past the draft model's context, or once a token turned up that it does not know, that stays so: its cache is
        released and the request goes on without it.
        """
        token_ids = request.sequence.token_ids
        request_id = request.sequence.request_id
        room_in_context = self._model.config.context_length - len(token_ids) + 1
        unknown = self._pair.target_only_token_ids
        if room_in_context < 1 or (unknown and not unknown.isdisjoint(token_ids)):
            self.release(request_id)
            return None
        cache = self._caches.get(request_id)
        if cache is None:
            cache = self._caches[request_id] = self._make_cache()
        # Ahead only where the last step failed, so that nothing was committed and `observe` was not called.
        cache.rewind(max(0, cache.length - (len(token_ids) - 1)))
        feed = list(token_ids[cache.length :])
        limit = min(request.max_draft_tokens, room_in_context, cache.room - len(feed) + 1)
        if limit < 1:
            return None
        # The last draft token is not fed: before verification the cache holds the sequence and limit - 1 more.
        cache.reserve(len(feed) + limit - 1)
        sampling, vocab_size = request.sampling, self._model.config.vocab_size
        if any(token_id >= vocab_size for token_id in sampling.bias_arrays[0][-1:]):  # the largest
            known = {token_id: bias for token_id, bias in dict(sampling.logit_bias).items() if token_id < vocab_size}
            sampling = replace(sampling, logit_bias=known)
        end_token_ids = frozenset(token_id for token_id in request.sequence.end_token_ids if token_id < vocab_size)
        return _Proposal(cache, limit, feed, request.sequence, sampling, end_token_ids)

    def _feed_all_but_last_chunk(self, proposal: _Proposal) -> None:
        while len(proposal.feed) > self._max_num_batched_tokens:
            chunk = proposal.feed[: self._max_num_batched_tokens]
            run_forward(self._model, [ForwardInput(proposal.cache, chunk, 0)])
            proposal.feed = proposal.feed[self._max_num_batched_tokens :]

    def _extend(self, proposals: Sequence[_Proposal]) -> None:
        """One forward over all proposals, and one more draft token for each; one whose logits are of no use ends."""
        logits = run_forward(self._model, [ForwardInput(p.cache, p.feed, 1) for p in proposals])
        for proposal, row in zip(proposals, logits, strict=True):
            if len(self._never_proposed):
                row = row.index_fill(1, self._never_proposed, -torch.inf)
            try:
                token_id = _choose(proposal, row)
            except NonFiniteLogitsError:  # known before anything is drawn; the request can do without the draft
                proposal.is_complete = True
                continue
            proposal.token_ids.append(token_id)
            proposal.feed = [token_id]
            proposal.is_complete = len(proposal.token_ids) == proposal.limit or token_id in proposal.end_token_ids


def _choose(proposal: _Proposal, logits: Tensor) -> int:
    """The next draft token; logits is float32 [1, vocab_size]."""
    sequence, sampling, drafted, ends = proposal.sequence, proposal.sampling, proposal.token_ids, proposal.end_token_ids
    if sampling.is_greedy:
        return greedy_token(logits[0], sampling, sequence.history, drafted, ends)
    distribution = next_distribution(logits[0], sampling, sequence.history, drafted, ends)
    position = len(sequence.token_ids) + len(drafted)
    if sampling.acceptance_rule == "matching":
        return gumbel_argmax(distribution, sequence.noise_key, position)
    proposal.probs.append(distribution)
    return gumbel_argmax(distribution, draft_key(sequence.noise_key, len(sequence.token_ids)), position)
