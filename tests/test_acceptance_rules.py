"""The acceptance rules on tables of tiny vocabularies: every token has the target's law, whatever was drafted.

Keys are fixed, so nothing here fails by chance; were they drawn anew, a chi-square test would fail once in a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

from pilotfish.errors import DrafterError, NonFiniteLogitsError
from pilotfish.ops import native
from pilotfish.ops.sampling import Distribution, TokenHistory, draft_key, gumbel_argmax, noise_key
from pilotfish.types import Draft, SamplingParams, VerifyOutcome
from pilotfish.verify import (
    GreedyVerifier,
    MatchingVerifier,
    RejectionVerifier,
    Verifier,
    choose_verifier,
    matching,
    rejection,
)

FALSE_ALARM = 1e-6
NUM_DRAWS = 10_000
MANY_DRAWS = 100_000
START = 5
"""Tokens before the draft."""


class Tables(NamedTuple):
    """p and q of one draft token, and what the target may say after it."""

    p: tuple[float, ...]
    q: tuple[float, ...]

    @property
    def tv(self) -> float:
        return 0.5 * sum(abs(a - b) for a, b in zip(self.p, self.q, strict=True))


TABLES = {
    "equal": Tables((0.6, 0.4, 0, 0), (0.6, 0.4, 0, 0)),
    "close": Tables((0.4, 0.3, 0.2, 0.1), (0.3, 0.3, 0.3, 0.1)),
    "far": Tables((0.05, 0.05, 0.1, 0.2, 0.6), (0.6, 0.2, 0.1, 0.05, 0.05)),
    "disjoint": Tables((0.7, 0.3, 0, 0, 0, 0), (0, 0, 0.2, 0.3, 0.5, 0)),
    "target one-hot": Tables((0, 1, 0, 0), (0.25, 0.25, 0.25, 0.25)),
    "draft one-hot": Tables((0.3, 0.3, 0.2, 0.2), (0, 0, 1, 0)),
    "p far below q": Tables((1e-4, 0.4999, 0.3, 0.2), (0.97, 0.01, 0.01, 0.01)),
    "hardly any residual": Tables((0.256, 0.254, 0.245, 0.245), (0.25, 0.25, 0.25, 0.25)),
    "eight": Tables((0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.01), (0.01, 0.3, 0.2, 0.04, 0.08, 0.1, 0.12, 0.15)),
}
AFTER = (0.1, 0.2, 0.3, 0.4)
"""What the target may say after a draft token that was accepted."""


def distribution(probs: Sequence[float]) -> Distribution:
    ids = [token_id for token_id, prob in enumerate(probs) if prob > 0]
    return Distribution(np.array(ids, np.int32), np.array(probs, np.float64)[ids])


def rows(*tables: Sequence[float]) -> torch.Tensor:
    """Logits whose distributions at temperature 1 are these; float32 [len(tables), 8]."""
    padded = [[*table, *[0.0] * (8 - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.float64).log().float()


class Seen:
    """What a verifier sees of a sequence, with the randomness of one number."""

    sampling = SamplingParams(temperature=1.0)
    end_token_ids: frozenset[int] = frozenset()
    token_ids = (0,) * START
    history = TokenHistory(token_ids)

    def __init__(self, seed: int) -> None:
        self.noise_key = noise_key(seed)


def shared_draft(q: Distribution, key: int) -> Draft:
    """As a draft model draws for matching."""
    return Draft((gumbel_argmax(q, key, START),))


def own_draft(q: Distribution, key: int) -> Draft:
    """As a draft model draws for rejection."""
    return Draft((gumbel_argmax(q, draft_key(key, START), START),), (q,))


def lookup_draft(q: Distribution, key: int) -> Draft:
    """A drafter without probabilities, whose guesses come from somewhere all the same."""
    return Draft((gumbel_argmax(q, draft_key(key, START), START),))


RULES: dict[str, tuple[Verifier, Callable[[Distribution, int], Draft]]] = {
    "rejection, draft model": (RejectionVerifier(), own_draft),
    "rejection, lookup": (RejectionVerifier(), lookup_draft),
    "matching, draft model": (MatchingVerifier(), shared_draft),
    "matching, lookup": (MatchingVerifier(), lookup_draft),
}


def outcomes(
    tables: Tables,
    rule: str,
    num_draws: int = NUM_DRAWS,
    make_draft: Callable[[Distribution, int], Draft] | None = None,
) -> list[tuple[Draft, VerifyOutcome]]:
    verifier, usual_draft = RULES[rule]
    make_draft = make_draft or usual_draft
    logits, q = rows(tables.p, AFTER), distribution(tables.q)
    found = []
    for seed in range(num_draws):
        sequence = Seen(seed)
        draft = make_draft(q, sequence.noise_key)
        found.append((draft, verifier.verify(sequence, draft, logits)))
    return found


def first_tokens(found: Sequence[tuple[Draft, VerifyOutcome]]) -> list[int]:
    return [draft.token_ids[0] if outcome.num_accepted_tokens else outcome.next_token_id for draft, outcome in found]


def p_value(token_ids: Sequence[int], probs: Sequence[float]) -> float:
    """Of a chi-square test; 0 where something came out that cannot. Cells that expect under 5 are put together."""
    counts = np.bincount(token_ids, minlength=len(probs)).astype(float)
    expected = len(token_ids) * np.array([*probs, *[0.0] * (len(counts) - len(probs))])
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    possible = expected > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[possible], expected[possible] * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("num_draws", [NUM_DRAWS, pytest.param(MANY_DRAWS, marks=pytest.mark.full)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TABLES)
def test_tokens_have_the_targets_law_and_drafts_are_accepted_as_often_as_they_should(
    name: str, rule: str, num_draws: int
) -> None:
    tables = TABLES[name]
    found = outcomes(tables, rule, num_draws)
    assert p_value(first_tokens(found), tables.p) > FALSE_ALARM
    accepted = [(draft, outcome) for draft, outcome in found if outcome.num_accepted_tokens]
    assert all(outcome.next_kind == ("bonus" if outcome.num_accepted_tokens else "recovered") for _, outcome in found)
    assert all(tables.p[draft.token_ids[0]] > 0 for draft, _ in accepted)  # p = 0 is never accepted
    if accepted:
        assert p_value([outcome.next_token_id for _, outcome in accepted], AFTER) > FALSE_ALARM
    rate, margin = len(accepted) / len(found), 5 * math.sqrt(0.25 / len(found))
    if rule == "matching, draft model":
        assert rate >= (1 - tables.tv) / (1 + tables.tv) - margin
    elif rule == "rejection, draft model":
        assert abs(rate - (1 - tables.tv)) <= margin
        recovered = [outcome.next_token_id for _, outcome in found if outcome.next_kind == "recovered"]
        if tables.tv == 0:
            assert not recovered  # p >= q is always accepted
        else:
            residual = [max(a - b, 0) / tables.tv for a, b in zip(tables.p, tables.q, strict=True)]
            assert len(recovered) > 50
            assert p_value(recovered, residual) > FALSE_ALARM
    else:  # what is drafted is independent of what the target says
        assert abs(rate - sum(a * b for a, b in zip(tables.p, tables.q, strict=True))) <= margin


# -- the tests, tested: each of these has been, or could be, somebody's mistake --------------------------------------


def law_fails(tables: Tables, rule: str, **options: object) -> bool:
    found = outcomes(tables, rule, NUM_DRAWS, **options)  # type: ignore[arg-type]
    bonus = [outcome.next_token_id for _, outcome in found if outcome.next_kind == "bonus"]
    return p_value(first_tokens(found), tables.p) < FALSE_ALARM or p_value(bonus, AFTER) < FALSE_ALARM


def test_mutant_argmax_for_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not law_fails(TABLES["close"], "matching, draft model")
    monkeypatch.setattr(matching, "gumbel_argmax", lambda found, *_: int(found.token_ids[found.probs.argmax()]))
    assert law_fails(TABLES["close"], "matching, draft model")


def test_mutant_one_noise_for_draft_and_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "purpose_key", lambda key, purpose: key)
    assert not law_fails(TABLES["far"], "rejection, draft model")  # the draft's noise is still its own

    def draft(q: Distribution, key: int) -> Draft:
        return Draft((gumbel_argmax(q, key, START),), (q,))

    assert law_fails(TABLES["far"], "rejection, draft model", make_draft=draft)


def test_mutant_q_after_the_fact() -> None:
    """Drawn from the draft's filtered distribution, judged by the one before its filters."""

    def draft(q: Distribution, key: int) -> Draft:
        filtered = Distribution(q.token_ids[:2], q.probs[:2] / q.probs[:2].sum())
        return Draft(own_draft(filtered, key).token_ids, (q,))

    assert law_fails(TABLES["close"], "rejection, draft model", make_draft=draft)


def test_mutant_bonus_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    class BonusFromQ(RejectionVerifier):
        def verify(self, sequence, draft, logits) -> VerifyOutcome:
            outcome = super().verify(sequence, draft, logits)
            if outcome.next_kind != "bonus":
                return outcome
            return VerifyOutcome(1, gumbel_argmax(draft.probs[0], sequence.noise_key, START + 1), "bonus")

    monkeypatch.setitem(RULES, "rejection, draft model", (BonusFromQ(), own_draft))
    assert law_fails(TABLES["close"], "rejection, draft model")


def test_mutant_a_drawn_token_dropped_for_its_low_q() -> None:
    """p = q = (0.6, 0.4), dropped below 0.5: the likelier token comes with 0.6 + 0.4 * 0.6 = 0.84."""
    verifier, tables = RejectionVerifier(), TABLES["equal"]
    q, logits, found = distribution(tables.q), rows(tables.p, AFTER), []
    for seed in range(NUM_DRAWS):
        sequence = Seen(seed)
        draft = own_draft(q, sequence.noise_key)
        if rejection.prob_of(q, draft.token_ids[0]) < 0.5:
            draft = Draft(())
        found.append((draft, verifier.verify(sequence, draft, logits[: len(draft.token_ids) + 1])))
    token_ids = first_tokens(found)
    assert p_value(token_ids, tables.p) < FALSE_ALARM
    assert token_ids.count(0) / len(token_ids) == pytest.approx(0.84, abs=0.02)


@pytest.mark.parametrize("mutant", ["recovered from p", "everything accepted", "nothing accepted"])
def test_mutants_of_the_formula(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    if mutant == "recovered from p":
        monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    else:
        monkeypatch.setattr(rejection, "is_accepted", lambda p, q, u: mutant == "everything accepted")
    assert law_fails(TABLES["far"], "rejection, draft model")


# -- the edges of the formula ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_acceptance_at_its_edges(u: float) -> None:
    assert not rejection.is_accepted(0.0, 1e-300, u)
    assert rejection.is_accepted(0.3, 0.3, u)
    assert rejection.is_accepted(1.0, 0.3, u)
    assert rejection.is_accepted(0.3, 0.6, u) == (u < 0.5)


@pytest.mark.parametrize("backend", [native.default_backend(), None])
def test_residual_that_is_empty_or_not_finite_falls_back_to_p(backend: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "default_backend", lambda: backend)
    p = distribution((0.5, 0.25, 0.25))
    assert rejection.residual(p, p) is p
    for bad in (-np.inf, np.nan):
        assert rejection.residual(p, Distribution(p.token_ids, np.array([bad, 0.0, 0.0]))) is p


def test_residual_is_normalised_and_leaves_out_what_q_covers() -> None:
    found = rejection.residual(distribution((0.5, 0.3, 0, 0.2)), distribution((0.1, 0.4, 0.3, 0, 0.2)))
    assert found.token_ids.tolist() == [0, 3]
    assert found.probs.tolist() == pytest.approx([2 / 3, 1 / 3])
    least = rejection.residual(distribution((0.5, 0.5)), distribution((0.5, 0.5 - 2**-53)))
    assert (least.token_ids.tolist(), least.probs.tolist()) == ([1], [1.0])


@pytest.mark.parametrize(
    "probs",
    [[math.nan, 0.5], [0.5, 0.2], [-math.inf, math.inf], [1.0, 0.0], [1.5, -0.5], [-0.5, 1.5], [math.inf, 0.1]],
)
def test_draft_probabilities_that_cannot_be_true_are_an_error(probs: list[float]) -> None:
    draft = Draft((1,), (Distribution(np.arange(2, dtype=np.int32), np.array(probs)),))
    with pytest.raises(DrafterError, match="token 1 cannot have been drawn from"):
        RejectionVerifier().verify(Seen(0), draft, rows((0.5, 0.5), AFTER))
    for verifier in (GreedyVerifier(), MatchingVerifier()):
        verifier.verify(Seen(0), draft, rows((0.5, 0.5), AFTER))  # to these they are nothing


@pytest.mark.parametrize("token_ids", [[1, 0], [1, 1], [-1, 1]])
def test_draft_probabilities_whose_ids_do_not_ascend_are_an_error(token_ids: list[int]) -> None:
    draft = Draft((1,), (Distribution(np.array(token_ids, np.int32), np.array([0.5, 0.5])),))
    with pytest.raises(DrafterError, match="ids that do not ascend from 0"):
        RejectionVerifier().verify(Seen(0), draft, rows((0.5, 0.5), AFTER))


@pytest.mark.parametrize("verifier", [GreedyVerifier(), MatchingVerifier(), RejectionVerifier()])
def test_rows_behind_a_rejected_draft_token_cannot_fail(verifier: Verifier) -> None:
    logits = rows((0, 1), (0, 1), (0, 1))
    logits[2] = torch.nan
    assert verifier.verify(Seen(0), Draft((1, 0)), logits) == VerifyOutcome(1, 1, "recovered")
    with pytest.raises(NonFiniteLogitsError):
        verifier.verify(Seen(0), Draft((1, 1)), logits)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, GreedyVerifier),
        ({"seed": 3}, GreedyVerifier),
        ({"acceptance": "rejection"}, GreedyVerifier),
        ({"temperature": 5e-324}, RejectionVerifier),
        ({"temperature": 1.0, "seed": 0}, MatchingVerifier),
        ({"temperature": 1.0, "seed": 0, "acceptance": "rejection"}, RejectionVerifier),
        ({"temperature": 1.0, "acceptance": "matching"}, MatchingVerifier),
    ],
)
def test_each_request_gets_its_rule(options: dict[str, object], rule: type) -> None:
    assert isinstance(choose_verifier(SamplingParams(**options)), rule)
