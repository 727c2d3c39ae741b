"""Whole outputs of the real step against the exact joint distribution: what the acceptance rules are told must be true.

A tiny model's law over all its outputs is computed by definition, from its tables and the options, without step, cache
or chain. Keys are fixed, so nothing here fails by chance; each test would fail with probability 1e-6 were they drawn
anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from doubles import ShuffledPool, TableModel, byte_tokenizer
from scipy import stats

from pilotfish.decode import FixedLength, SequenceState, step
from pilotfish.drafters import Drafter, DraftModelDrafter, SingleSequenceDrafter, draft_model
from pilotfish.kvcache import PagedCache, PagePool
from pilotfish.ops import sampling as sampling_ops
from pilotfish.tokenizer import check_pair
from pilotfish.types import Draft, DraftRequest, SamplingParams
from pilotfish.verify import RequestVerifier, rejection

FALSE_ALARM = 1e-6
PROMPT = [1, 2]
EOS = 3
VOCAB_SIZE = 4
TOKENIZER = byte_tokenizer()
PAIR = check_pair(TOKENIZER, TOKENIZER)

TARGET = [(0.5, 0.3, 0.15, 0.05), (0.1, 0.1, 0.6, 0.2), (0.3, 0.3, 0.3, 0.1)]
DRAFT = [(0.2, 0.3, 0.3, 0.2), (0.3, 0.05, 0.6, 0.05), (0.05, 0.05, 0.3, 0.6)]


Table = Callable[[Sequence[int]], Sequence[float]]


def target_table(prefix: Sequence[int]) -> tuple[float, ...]:
    return TARGET[sum((place + 1) * token_id for place, token_id in enumerate(prefix)) % 3]


def draft_table(prefix: Sequence[int]) -> tuple[float, ...]:
    return DRAFT[sum((place + 1) * token_id for place, token_id in enumerate(prefix)) % 3]


# -- the law by definition -------------------------------------------------------------------------------------------


def next_law(prefix: Sequence[int], output: Sequence[int], options: SamplingParams) -> list[float]:
    x = [math.log(prob) for prob in target_table([*prefix, *output])]
    for token_id, bias in dict(options.logit_bias).items():
        x[token_id] += bias
    for token_id in range(VOCAB_SIZE):
        if token_id in [*prefix, *output]:
            x[token_id] *= options.repetition_penalty ** (1 if x[token_id] <= 0 else -1)
        count = list(output).count(token_id)
        x[token_id] -= options.frequency_penalty * count + options.presence_penalty * (count > 0)
    weights = [math.exp(value / options.temperature) for value in x]
    if len(output) < options.min_tokens:
        weights[EOS] = 0.0
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: (-weights[token_id], token_id))
    order = order[: options.top_k or None]
    kept: list[int] = []
    total = sum(weights[token_id] for token_id in order)
    for token_id in order:
        if sum(weights[other] for other in kept) < options.top_p * total:
            kept.append(token_id)
    weights = [weight if token_id in kept else 0.0 for token_id, weight in enumerate(weights)]
    weights = [weight if weight >= options.min_p * max(weights) else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def joint_law(options: SamplingParams, output: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every possible output with its probability."""
    for token_id, prob in enumerate(next_law(PROMPT, output, options)):
        longer = (*output, token_id)
        if prob == 0:
            continue
        if token_id == EOS or len(longer) == options.max_tokens:
            yield longer, prob
        else:
            for rest, rest_prob in joint_law(options, longer):
                yield rest, prob * rest_prob


# -- the law of the real step ----------------------------------------------------------------------------------------


def outputs(options: SamplingParams, drafter: Drafter | None, k: int, num_outputs: int) -> list[tuple[int, ...]]:
    """Outputs of as many requests that differ in their seed, 100 in a batch."""
    model = TableModel(target_table, VOCAB_SIZE)
    pool = ShuffledPool(model.config, 1000, 4)
    drafters = [drafter] if drafter else []
    found = []
    for first in range(0, num_outputs, 100):
        sequences = [new_sequence(options, seed, pool) for seed in range(first, first + 100)]
        while any(sequence.finish_reason is None for sequence in sequences):
            step(sequences, model, drafters, RequestVerifier(), FixedLength(drafter, k), max_num_batched_tokens=1000)
        for sequence in sequences:
            found.append(tuple(sequence.token_ids[len(PROMPT) :]))
            sequence.cache.release()
            for each in drafters:
                each.release(sequence.request_id)
        pool.check_integrity()
    return found


def new_sequence(options: SamplingParams, seed: int, pool: PagePool) -> SequenceState:
    options = replace(options, seed=seed)
    cache = PagedCache(pool, 64)
    return SequenceState(str(seed), list(PROMPT), cache, options, frozenset({EOS}), 64, TOKENIZER.detokenizer())


def p_value(found: Sequence[tuple[int, ...]], options: SamplingParams) -> float:
    """Of a chi-square test; 0 where something came out that cannot. Cells that expect under 5 are put together."""
    law = dict(joint_law(options))
    assert sum(law.values()) == pytest.approx(1)
    if not law.keys() >= set(found):
        return 0.0
    expected = np.array([prob * len(found) for prob in law.values()])
    times = Counter(found)
    counts = np.array([times[output] for output in law], float)
    small = expected < 5
    if small.any():
        counts, expected = (np.append(values[~small], values[small].sum()) for values in (counts, expected))
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


class Lookup(SingleSequenceDrafter):
    """Guesses without probabilities."""

    def draft(self, token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        return [*token_ids[::-1], 0, 2, 1][:max_draft_tokens]


class OtherFilters(DraftModelDrafter):
    """Draws with a temperature and a filter that are not the target's, and stops early by what it drew before."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        changed = [
            replace(
                request,
                sampling=replace(request.sampling, temperature=2.0, top_k=3, top_p=1.0),
                max_draft_tokens=min(request.max_draft_tokens, 1 + request.sequence.token_ids[-1]),
            )
            for request in requests
        ]
        return super().propose(changed)


def make_drafter(name: str) -> tuple[Drafter | None, int]:
    table = target_table if name == "twin" else draft_table
    if name == "none":
        return None, 0
    if name == "lookup":
        return Lookup(), 3
    return draft_model_drafter(table, OtherFilters if name == "other filters" else DraftModelDrafter), 3


def draft_model_drafter(table: Table, kind: type[DraftModelDrafter] = DraftModelDrafter) -> DraftModelDrafter:
    """All its caches share a pool, so that a batch is one forward."""
    model = TableModel(table, VOCAB_SIZE)
    pool = ShuffledPool(model.config, 1000, 4)
    return kind(model, PAIR, make_cache=lambda: PagedCache(pool, 64))


OPTIONS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=3),
    "filters": SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, max_tokens=4),
    "penalties": SamplingParams(
        temperature=1.3,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={0: 0.8, 2: -0.5},
        min_tokens=2,
        top_k=3,
        max_tokens=4,
    ),
}
DRAFTERS = ("draft model", "other filters", "lookup", "twin")


def check(options: SamplingParams, rule: str, name: str, num_outputs: int) -> None:
    drafter, k = make_drafter(name)
    found = outputs(replace(options, acceptance=rule), drafter, k, num_outputs)
    assert p_value(found, options) > FALSE_ALARM


@pytest.mark.parametrize("rule", ["rejection", "matching"])
@pytest.mark.parametrize(
    ("case", "name"),
    [("plain", "lookup"), ("filters", "other filters"), ("penalties", "draft model"), ("penalties", "lookup")],
)
def test_outputs_have_the_joint_law(case: str, name: str, rule: str) -> None:
    check(OPTIONS[case], rule, name, 3_000)


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "matching"])
@pytest.mark.parametrize("name", ["none", *DRAFTERS])
@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_have_the_joint_law_in_many_draws(case: str, name: str, rule: str) -> None:
    check(OPTIONS[case], rule, name, 100_000)


def test_a_seed_gives_the_same_outputs_with_every_drafter() -> None:
    options = replace(OPTIONS["penalties"], acceptance="matching")
    plain = outputs(options, None, 0, 500)
    for name in DRAFTERS:
        assert outputs(options, *make_drafter(name), 500) == plain


def test_a_twin_is_always_believed() -> None:
    """The same model and the same options: p = q, and with one noise the same draw; any rejection is bookkeeping."""
    for rule in ("rejection", "matching"):
        model = TableModel(target_table, VOCAB_SIZE)
        drafter = draft_model_drafter(target_table)
        options = replace(OPTIONS["penalties"], acceptance=rule, max_tokens=30, logit_bias={EOS: -100.0})
        pool = ShuffledPool(model.config, 40, 4)
        sequences = [new_sequence(options, seed, pool) for seed in range(4)]
        while any(sequence.finish_reason is None for sequence in sequences):
            step(sequences, model, [drafter], RequestVerifier(), FixedLength(drafter, 4), max_num_batched_tokens=100)
        for sequence in sequences:
            assert sequence.stats.acceptance_rate == 1


# -- the tests, tested -----------------------------------------------------------------------------------------------


def law_fails(drafter: Drafter) -> bool:
    options = replace(OPTIONS["plain"], acceptance="rejection")
    return p_value(outputs(options, drafter, 3, 3_000), options) < FALSE_ALARM


def test_mutant_shared_noise_in_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = draft_model_drafter(lambda prefix: (0.05, 0.2, 0.25, 0.5))
    assert not law_fails(drafter)
    monkeypatch.setattr(rejection, "purpose_key", lambda key, purpose: key)
    monkeypatch.setattr(draft_model, "draft_key", lambda key, num_tokens: key)
    assert law_fails(drafter)


def test_mutant_drawn_token_dropped_for_low_q() -> None:
    class Picky(DraftModelDrafter):
        def propose(self, requests):
            drafts = super().propose(requests)
            return [
                Draft(()) if draft.probs and rejection.prob_of(draft.probs[0], draft.token_ids[0]) < 0.25 else draft
                for draft in drafts
            ]

    assert law_fails(draft_model_drafter(target_table, Picky))
    assert not law_fails(make_drafter("twin")[0])


def test_mutant_history_without_the_drafts_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties that know the output but not the draft tokens before a row."""
    options = replace(OPTIONS["penalties"], acceptance="rejection")
    real = sampling_ops.process_logits
    monkeypatch.setattr(
        sampling_ops, "process_logits", lambda logits, sampling, history, drafts, ends: real(
            logits, sampling, history, (), ends
        )
    )  # fmt: skip
    drafter, k = make_drafter("twin")
    assert p_value(outputs(options, drafter, k, 4_000), options) < FALSE_ALARM
