"""From logits to what may be drawn, and the draw itself; each row by itself, with its own history.

The chain, in this order (that of transformers, which knows no presence and frequency penalty):

    logit_bias           is added
    repetition_penalty   divides positive logits of ids in prompt and output, multiplies the others (Keskar et al. 2019,
                         arXiv 1909.05858)
    frequency_penalty    times the count of an id in the output is taken off
    presence_penalty     is taken off the logits of ids in the output
    min_tokens           until so many tokens are out, ids that end the text have -infinity
    temperature          0 ends the chain: the token with the largest logit, of equal ones the lowest id
    top_k, top_p, min_p  see `sampling_reference.distribution`

The edits are float32, as in transformers; from the temperature on all is float64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.errors import NonFiniteLogitsError
from pilotfish.ops import native, sampling_reference
from pilotfish.ops.sampling_reference import hash_word
from pilotfish.sampling_params import SamplingParams
from pilotfish.token_history import TokenHistory as TokenHistory
from pilotfish.types import Distribution as Distribution
from pilotfish.types import TokenLogprobs as TokenLogprobs


class SamplingOps(Protocol):
    """What the kernels do, and `sampling_reference` says; all give the same bits."""

    def distribution(
        self, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> Distribution | None: ...
    def largest(self, logits: Tensor, count: int) -> NDArray[np.int32] | None: ...
    def residual(self, p: Distribution, q: Distribution) -> Distribution | None: ...
    def gumbel_argmax(self, distribution: Distribution, stream: int) -> int: ...
    def argmax(self, logits: Tensor) -> list[int]: ...
    def log_sum_exp(self, logits: Tensor) -> Tensor: ...


def _ops() -> SamplingOps:
    return native.default_backend() or sampling_reference


def greedy_token(
    logits: Tensor,
    sampling: SamplingParams,
    history: TokenHistory,
    draft_token_ids: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    row: int = 0,
) -> int:
    """The token at temperature 0; arguments and errors are those of `next_distribution`."""
    edited = process_logits(logits, sampling, history, draft_token_ids, end_token_ids)
    try:
        return _ops().argmax(edited.unsqueeze(0))[0]
    except NonFiniteLogitsError:
        raise NonFiniteLogitsError(row) from None


def next_distribution(
    logits: Tensor,
    sampling: SamplingParams,
    history: TokenHistory,
    draft_token_ids: Sequence[int] = (),
    end_token_ids: Collection[int] = (),
    row: int = 0,
) -> Distribution:
    """What may be drawn after `history` and all of some draft tokens, from one row of logits, float32 [vocab_size].

    `end_token_ids` are those that end this request's text. They and the ids of `logit_bias` must be below vocab_size:
    `engine.stream` has checked it, once a request.

    Raises `NonFiniteLogitsError`, which names `row`, for NaN, +infinity, or nothing above -infinity.
    """
    edited = process_logits(logits, sampling, history, draft_token_ids, end_token_ids)
    found = _ops().distribution(edited, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if found is None:
        raise NonFiniteLogitsError(row)
    return found


def process_logits(
    logits: Tensor,
    sampling: SamplingParams,
    history: TokenHistory,
    draft_token_ids: Sequence[int],
    end_token_ids: Collection[int],
) -> Tensor:
    """The chain's edits, before the temperature, of one row float32 [vocab_size], which itself stays as it is."""
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    repetition, frequency, presence = map(np.float32, penalties)
    penalised = penalties != (1, 0, 0)
    goes_on = history.num_output_tokens + len(draft_token_ids) < sampling.min_tokens
    if not (sampling.logit_bias or penalised or goes_on):
        return logits
    x = logits.numpy().copy()  # torch would wake its threads for this
    if sampling.logit_bias:
        biased, biases = map(np.asarray, sampling.bias_arrays)
        x[biased] += biases
    if penalised:
        token_ids, counts = history.counts(draft_token_ids)
        values = x[token_ids]
        values = np.where(values > 0, values / repetition, values * repetition)
        x[token_ids] = values - frequency * counts.astype(np.float32) - presence * (counts > 0).astype(np.float32)
    if goes_on:
        x[list(end_token_ids)] = -np.inf
    return torch.from_numpy(x)


def noise_key(seed: int, answer: int = 0) -> int:
    """The key of answer number `answer` to a request with this seed: 64 bits, a hash of both."""
    return hash_word(hash_word(0, seed), answer)


class NoisePurpose(IntEnum):
    """What rejection sampling draws for; each purpose has a key of its own, so the draws are independent."""

    ACCEPTANCE = 1
    RECOVERY = 2
    DRAFT = 3


def purpose_key(key: int, purpose: NoisePurpose) -> int:
    """The key of all draws for one purpose under an answer's key."""
    return hash_word(key, purpose)


def draft_key(key: int, num_tokens: int) -> int:
    """The key for a drafter's draws in the step that starts behind `num_tokens` tokens, under an answer's key.

    Each step has its own: a position that is drafted for again gets fresh noise, so that nothing anybody made of the
    draft before can lean on it.
    """
    return hash_word(purpose_key(key, NoisePurpose.DRAFT), num_tokens)


def uniform(key: int, position: int) -> float:
    """A number above 0 and below 1 that depends on key and position and on nothing else."""
    stream = hash_word(key, position)
    return float(sampling_reference.uniform(stream, np.zeros(1, np.uint64))[0])


def gumbel_argmax(distribution: Distribution, key: int, position: int) -> int:
    """Draws an id with noise that depends on key, position and id and on nothing else.

    It is the argmax of log p + g, g = -log(-log u) (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030), ties to the
    lowest id: id i gets output number i of the generator SplitMix64 that starts at output number `position` of the one
    that starts at `key`. Draws from two distributions with one key and position agree as often as Daliri, Musco and
    Suresh say (2024, arXiv 2408.07978). Only ids in the distribution get noise, and of these the logarithms are taken
    only where they might win.
    """
    return _ops().gumbel_argmax(distribution, hash_word(key, position))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), made to add up to 1; p itself where nothing of that is left, or it is not finite."""
    return _ops().residual(p, q) or p


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """For each row of float32 [n, vocab_size] its token's log-probability, logit - log_sum_exp in float32, and the
    `num_top` likeliest ids with theirs, of equal ones the lowest first. Raises `NonFiniteLogitsError` as
    `next_distribution` does, the first that must."""
    sums = _ops().log_sum_exp(logits.contiguous())
    found = []
    for row, (token_id, total) in enumerate(zip(token_ids, sums.numpy(), strict=True)):
        top = _ops().largest(logits[row], max(num_top, 1))
        if top is None:
            raise NonFiniteLogitsError(row)
        top = top[:num_top]
        with np.errstate(over="ignore"):  # beyond float32 a log-probability is -infinity
            logprob, *top_logprobs = (logits[row].numpy()[[token_id, *top]] - total).tolist()
        found.append(TokenLogprobs(logprob, tuple(top.tolist()), tuple(top_logprobs)))
    return found
