"""The decode step: draft, verify in one target forward, commit, rewind. Plain decoding is the same with no drafts.

    between steps   the target's cache holds len(token_ids) - 1 tokens: the newest one is not in it yet
    draft           a drafter guesses k >= 0 tokens that may follow
    forward         one target call over the newest token and the k guesses: k + 1 rows of logits
    verify          the accepted prefix of the guesses, and exactly one more token of the target's own
    commit          both are appended, cut at EOS, a stop string or the token budget
    rewind          the target's cache, and the drafter's in `observe`, forget the rejected guesses

Prefill is the same step in chunks: until a prompt's last chunk there are no logits, no draft and no commit, and no
drafter works before the first token is out.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pilotfish.decode.policy import Candidate, LengthPolicy
from pilotfish.decode.sequence import SequenceState
from pilotfish.drafters import Drafter
from pilotfish.errors import DrafterError, InvariantError, NonFiniteLogitsError, PilotfishError
from pilotfish.model import ForwardInput, run_forward
from pilotfish.model.batch import ForwardModel
from pilotfish.ops.sampling import token_logprobs
from pilotfish.types import (
    Distribution,
    Draft,
    DraftRequest,
    FinishReason,
    TokenKind,
    TokenLogprobs,
    TokenOutput,
    VerifyOutcome,
)
from pilotfish.verify import Verifier

_NO_DRAFT = Draft(())


@dataclass(frozen=True)
class StepOutput:
    """What a step committed to one sequence: nothing for a prompt chunk that is not the last, or after its end."""

    request_id: str
    tokens: tuple[TokenOutput, ...]
    finish_reason: FinishReason | None
    error: PilotfishError | None = None
    """What ended this sequence, and no other, before its time, behind `tokens`: the step's one reason to `abort`."""


@dataclass
class _Work:
    """One sequence's part in a step: `pending` tokens to feed, and the draft behind them."""

    sequence: SequenceState
    pending: list[int]
    is_last_chunk: bool
    draft: Draft = _NO_DRAFT

    def __post_init__(self) -> None:
        self._start = len(self.sequence.token_ids), self.sequence.cache.length

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens worth drafting: one of the budget's is the target's own, and the cache must hold the rest."""
        if len(self.pending) > 1 or self.sequence.stats.num_tokens == 0:
            return 0
        return min(self.sequence.tokens_left, self.sequence.cache.room) - 1

    @property
    def forward_input(self) -> ForwardInput:
        num_logits = len(self.draft.token_ids) + 1 if self.is_last_chunk else 0
        return ForwardInput(self.sequence.cache, [*self.pending, *self.draft.token_ids], num_logits)

    def restore(self) -> None:
        """Rewinds the cache to what is committed, after something raised."""
        num_tokens, length = self._start
        if len(self.sequence.token_ids) > num_tokens:
            length = len(self.sequence.token_ids) - 1
        self.sequence.cache.rewind(max(0, self.sequence.cache.length - length))


def step(
    sequences: Sequence[SequenceState],
    model: ForwardModel,
    drafters: Sequence[Drafter],
    verifier: Verifier,
    policy: LengthPolicy,
    clock: Callable[[], float] = time.perf_counter,
    max_num_batched_tokens: int = 128,
) -> list[StepOutput]:
    """Advances every unfinished sequence by a prompt chunk or by 1 … k + 1 tokens; one output per sequence.

    At most `max_num_batched_tokens` prompt rows run in one step. Seconds go to each sequence's `stats` in full, since
    each waited for them. If anything raises, every cache holds what is committed and nothing more. Logits of the target
    that are not finite end their own sequence where plain decoding would meet them, with `StepOutput.error`.
    """
    works = _plan(sequences, max_num_batched_tokens)
    timer = _Timer(clock, works)
    try:
        for work in works:
            work.sequence.cache.reserve(len(work.pending))
        timer.lap("cache_seconds")
        _draft(works, model.config.vocab_size, policy, timer)
        timer.lap("draft_seconds")
        logits = run_forward(model, [work.forward_input for work in works])
        timer.lap("target_seconds")
        # All before the first commit: what raises here, a drafter's untrue probabilities say, loses nobody's tokens.
        verdicts = [_verify(work, rows, verifier) for work, rows in zip(works, logits, strict=True)]
        timer.lap("verify_seconds")
        outputs = {
            id(work.sequence): _commit(work, verdict, drafters) for work, verdict in zip(works, verdicts, strict=True)
        }
        timer.lap("cache_seconds")
    except BaseException:
        for work in works:
            work.restore()
        raise
    nothing = {id(sequence): StepOutput(sequence.request_id, (), sequence.finish_reason) for sequence in sequences}
    return list((nothing | outputs).values())


def _plan(sequences: Sequence[SequenceState], max_num_batched_tokens: int) -> list[_Work]:
    """What each sequence feeds: its newest token in decode; before that a chunk, while the budget of rows lasts."""
    works: list[_Work] = []
    budget = max_num_batched_tokens
    for sequence in sequences:
        if sequence.finish_reason is not None:
            continue
        pending = sequence.token_ids[sequence.cache.length :]
        num_rows = min(len(pending), max(budget, 0)) if len(pending) > 1 else 1
        budget -= num_rows
        if num_rows:
            works.append(_Work(sequence, pending[:num_rows], num_rows == len(pending)))
    return works


def _draft(works: Sequence[_Work], vocab_size: int, policy: LengthPolicy, timer: _Timer) -> None:
    """Gives each sequence in decode the draft that the policy asks for, slots for its tokens reserved beforehand."""
    drafting = [(work, Candidate(work.sequence, work.max_draft_tokens)) for work in works if work.max_draft_tokens > 0]
    if not drafting:
        return
    base_rows = sum(len(work.pending) for work in works)
    choices = policy.choose([candidate for _, candidate in drafting], base_rows)
    timer.lap("draft_seconds")
    groups: dict[int, tuple[Drafter, list[tuple[_Work, DraftRequest]]]] = {}
    for (work, _), (drafter, length) in zip(drafting, choices, strict=True):
        # Asked again, since sequences before this one may have taken pages from a shared pool.
        limit = min(length, work.max_draft_tokens)
        if drafter is not None and limit > 0:
            work.sequence.cache.reserve(1 + limit)
            request = DraftRequest(work.sequence, limit, work.sequence.sampling)
            groups.setdefault(id(drafter), (drafter, []))[1].append((work, request))
    timer.lap("cache_seconds")
    for drafter, members in groups.values():
        drafts = drafter.propose([request for _, request in members])
        if len(drafts) != len(members):
            raise DrafterError(f"drafter {drafter.name!r} gave {len(drafts)} drafts for {len(members)} requests")
        for (work, request), draft in zip(members, drafts, strict=True):
            work.draft = _usable(draft, request.max_draft_tokens, vocab_size, work.sequence.end_token_ids)
            work.sequence.stats.draft_prefill_seconds += draft.prefill_seconds


def _usable(draft: Draft, limit: int, vocab_size: int, end_token_ids: frozenset[int]) -> Draft:
    """The part of a draft that can be fed to the target: at most `limit` real ids, none after an end of the text."""
    token_ids: list[int] = []
    for value in draft.token_ids[:limit]:
        try:
            token_id = operator.index(value)
        except TypeError:
            raise DrafterError(f"a drafter's token ids must be integers, got {value!r}") from None
        if not 0 <= token_id < vocab_size:
            if draft.probs is not None:  # leaving out what was drawn would bias what is drawn instead
                raise DrafterError(f"a drafter with probabilities drew id {token_id}, which the target lacks")
            break
        token_ids.append(token_id)
        if token_id in end_token_ids:
            break
    if draft.probs is None:
        return Draft(tuple(token_ids))
    if len(draft.probs) < len(token_ids):
        raise DrafterError(f"a drafter gave probabilities for {len(draft.probs)} of {len(draft.token_ids)} tokens")
    probs = tuple(draft.probs[: len(token_ids)])
    for own in probs:
        if not isinstance(own, Distribution):
            raise DrafterError(f"a drafter's probs must be a Distribution for each token, got {type(own).__name__}")
    return Draft(tuple(token_ids), probs)


@dataclass(frozen=True)
class _Verdict:
    """What a verification lets be committed; where the target's logits end it, the accepted tokens before that."""

    token_ids: Sequence[int]
    kinds: Sequence[TokenKind]
    logprobs: Sequence[TokenLogprobs | None]
    outcome: VerifyOutcome | NonFiniteLogitsError


def _verify(work: _Work, logits: Tensor, verifier: Verifier) -> _Verdict | None:
    """Verifies one sequence's draft and changes nothing; None for a prompt chunk that is not the last."""
    if not work.is_last_chunk:
        return None
    outcome: VerifyOutcome | NonFiniteLogitsError
    agreed: list[TokenKind] = ["accepted"] * len(work.draft.token_ids)
    try:
        outcome = verifier.verify(work.sequence, work.draft, logits)
        token_ids = [*work.draft.token_ids[: outcome.num_accepted_tokens], outcome.next_token_id]
        kinds = [*agreed[: outcome.num_accepted_tokens], outcome.next_kind]
    except NonFiniteLogitsError as error:
        # The rows before that one were sound, and what they accepted plain decoding would have said too.
        outcome, token_ids, kinds = error, list(work.draft.token_ids[: error.row]), agreed[: error.row]
    try:
        return _Verdict(token_ids, kinds, _logprobs(work.sequence, logits, token_ids), outcome)
    except NonFiniteLogitsError as error:  # raw logits may be unusable where edited ones are not
        token_ids = token_ids[: error.row]
        return _Verdict(token_ids, kinds[: error.row], _logprobs(work.sequence, logits, token_ids), error)


def _commit(work: _Work, verdict: _Verdict | None, drafters: Sequence[Drafter]) -> StepOutput:
    """Appends to one sequence what stands, rewinds the caches and checks their lengths."""
    sequence = work.sequence
    if verdict is None:
        _check_lengths(sequence, sequence.cache.length)
        return StepOutput(sequence.request_id, (), None)
    is_decode = sequence.stats.num_tokens > 0
    tokens = sequence.commit(verdict.token_ids, verdict.kinds, verdict.logprobs)
    if is_decode and tokens:
        sequence.stats.num_steps += 1
        sequence.stats.num_draft_tokens += len(work.draft.token_ids)
        sequence.stats.num_accepted_tokens += sum(token.kind == "accepted" for token in tokens)
    sequence.cache.rewind(sequence.cache.length - (len(sequence.token_ids) - 1))
    _check_lengths(sequence, len(sequence.token_ids) - 1)
    if isinstance(verdict.outcome, NonFiniteLogitsError):
        if sequence.finish_reason is None:  # else the row lies behind the end, where nobody asks for it
            sequence.finish_reason = "abort"
            return StepOutput(sequence.request_id, tokens, "abort", verdict.outcome)
    else:
        for drafter in drafters:
            drafter.observe(sequence, verdict.outcome)
    return StepOutput(sequence.request_id, tokens, sequence.finish_reason)


def _logprobs(sequence: SequenceState, logits: Tensor, token_ids: Sequence[int]) -> Sequence[TokenLogprobs | None]:
    """Of the raw logits of each token's row, where the request asks for them."""
    if sequence.sampling.logprobs is None:
        return [None] * len(token_ids)
    return token_logprobs(logits[: len(token_ids)], token_ids, sequence.sampling.logprobs)


def _check_lengths(sequence: SequenceState, expected: int) -> None:
    """Every layer of the target holds what is committed but the newest token (in prefill: the chunks so far)."""
    cache = sequence.cache
    if cache.length != expected or any(length != expected for length in cache.layer_lengths):
        raise InvariantError(
            f"the target's cache holds {cache.length} tokens, its layers {list(cache.layer_lengths)}, "
            f"where {expected} of {len(sequence.token_ids)} belong"
        )


class _Timer:
    """Adds the time since the last lap to a field of every sequence's statistics."""

    def __init__(self, clock: Callable[[], float], works: Sequence[_Work]) -> None:
        self._clock = clock
        self._works = works
        self._last = clock()

    def lap(self, name: str) -> None:
        now = self._clock()
        for work in self._works:
            stats = work.sequence.stats
            setattr(stats, name, getattr(stats, name) + now - self._last)
        self._last = now
