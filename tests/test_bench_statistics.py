"""Order, ratios, intervals and verdicts of a measurement, on data whose answers are known."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from bench_artifacts import make_arm, make_sample, make_settings, prompts_of_classes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pilotfish.bench import statistics
from pilotfish.bench.artifact import Interval
from pilotfish.bench.order import balanced_order

ARM = make_arm("k=4", 4)


def test_two_arms_take_turns_as_abba_baab() -> None:
    assert "".join("AB"[arm] for row in balanced_order(2, 4) for arm in row) == "ABBABAAB"


@given(st.integers(1, 9), st.integers(1, 30))
def test_each_round_has_each_arm_once_and_arm_0_comes_first(num_arms: int, num_rounds: int) -> None:
    rounds = balanced_order(num_arms, num_rounds)
    assert len(rounds) == num_rounds
    assert all(sorted(row) == list(range(num_arms)) for row in rounds)
    assert rounds[0][0] == 0


@given(st.integers(1, 9), st.integers(1, 15))
def test_after_an_even_number_of_rounds_a_steady_drift_touches_all_arms_alike(num_arms: int, half: int) -> None:
    places: Counter[int] = Counter()
    for row in balanced_order(num_arms, 2 * half):
        places.update({arm: place for place, arm in enumerate(row)})
    assert len({places[arm] for arm in range(num_arms)}) == 1


@pytest.mark.parametrize("num_arms", range(2, 10))
def test_a_whole_square_balances_places_and_neighbours(num_arms: int) -> None:
    rounds = balanced_order(num_arms, num_arms if num_arms % 2 == 0 else 2 * num_arms)
    at = Counter((place, arm) for row in rounds for place, arm in enumerate(row))
    assert len(at) == num_arms**2
    assert len({*at.values()}) == 1
    behind = Counter(pair for row in rounds for pair in pairwise(row))
    assert len(behind) == num_arms * (num_arms - 1)
    assert len({*behind.values()}) == 1


def test_ratios_are_paired_within_rounds_and_averaged_as_logarithms() -> None:
    """A machine that doubles its speed between two rounds changes no ratio."""
    prompts = prompts_of_classes("code", "code", "chat")
    samples = []
    for number, speed in enumerate((10.0, 20.0)):
        samples.append(make_sample("target-only", number, [speed, speed, speed]))
        samples.append(make_sample("k=4", number, [2 * speed, 8 * speed, speed / 2]))
    found = statistics.compare(ARM, samples, prompts, True, make_settings(repeats=2))
    assert found.num_rounds == 2
    assert {name: value.ratio for name, value in found.prompts.items()} == pytest.approx({"0": 2, "1": 8, "2": 0.5})
    assert {name: value.ratio for name, value in found.classes.items()} == pytest.approx({"code": 4, "chat": 0.5})
    assert found.overall.ratio == pytest.approx(2)
    assert (found.overall.low, found.overall.high) == pytest.approx((2, 2))


def test_a_round_without_its_baseline_does_not_count() -> None:
    prompts = prompts_of_classes("a")
    samples = [make_sample("target-only", 0, [10]), make_sample("k=4", 0, [20]), make_sample("k=4", 1, [90])]
    found = statistics.compare(ARM, samples, prompts, True, make_settings(repeats=2))
    assert (found.num_rounds, found.overall.ratio) == (1, pytest.approx(2))
    assert found.verdict == "cannot tell"
    assert "1 of 2 rounds" in found.reason


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=4))
def test_interval_of_few_rounds_spans_all_that_was_seen(values: list[float]) -> None:
    found = statistics.interval(np.array(values), 0)
    assert found.ratio == pytest.approx(math.exp(sum(values) / len(values)))
    assert (found.low, found.high) == pytest.approx((math.exp(min(values)), math.exp(max(values))))


def test_interval_of_many_rounds_is_students() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.1, 40)
    found = statistics.interval(values, 0)
    assert found.low is not None
    assert found.high is not None
    half = stats.t.ppf(0.975, 39) * values.std(ddof=1) / math.sqrt(40)
    assert math.log(found.low) == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert math.log(found.high) == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """0.95 of 400 intervals of 8 rounds, within four standard errors: a false alarm in 16,000."""
    rng = np.random.default_rng(2)
    hits = 0
    for values in rng.normal(0.3, 0.05, (400, 8)):
        found = statistics.interval(values, 0)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= math.exp(0.3) <= found.high
    assert abs(hits / 400 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)


def test_single_round_has_no_interval() -> None:
    assert statistics.interval(np.array([0.5]), 0) == Interval(ratio=math.exp(0.5), low=None, high=None)


JUDGED = [
    ({}, "pays", ""),
    ({"ratio": 0.95, "low": 0.93, "high": 0.97}, "does not pay", ""),
    ({"ratio": 1.0, "low": 0.98, "high": 1.03}, "cannot tell", "the interval holds 1"),
    ({"ratio": 1.0, "low": 1.0, "high": 1.0}, "cannot tell", "the interval holds 1"),
    ({"ratio": 1.5, "low": 1.34, "high": 1.52}, "cannot tell", "±11%, wider than ±10%"),
    ({"ratio": 1.5, "low": 1.49, "high": 1.66}, "cannot tell", "±11%, wider than ±10%"),
    ({"drift": 0.16}, "cannot tell", "differ by 16%, more than 15%"),
    ({"drift": 0.15}, "pays", ""),
    ({"identical": False}, "cannot tell", "output differs"),
    ({"num_rounds": 3}, "cannot tell", "after 3 of 4 rounds"),
    ({"low": None, "high": None, "num_rounds": 1, "repeats": 1}, "cannot tell", "--repeats 4 or more"),
]


@pytest.mark.parametrize(("changes", "verdict", "reason"), JUDGED)
def test_verdict(changes: dict, verdict: str, reason: str) -> None:
    values = {
        "ratio": 1.5,
        "low": 1.45,
        "high": 1.55,
        "drift": 0.0,
        "identical": True,
        "num_rounds": 4,
        "repeats": 4,
    } | changes
    found = Interval(ratio=values["ratio"], low=values["low"], high=values["high"])
    judged = statistics.judge(found, values["num_rounds"], values["repeats"], values["drift"], values["identical"])
    assert judged[0] == verdict
    assert reason in judged[1]
    assert bool(judged[1]) == (verdict == "cannot tell")


def test_drift_is_the_range_of_the_samples_over_their_median() -> None:
    samples = [make_sample("target-only", number, [speed, speed]) for number, speed in enumerate((10, 11, 9))]
    assert statistics.drift(samples) == pytest.approx(0.2)
    assert statistics.drift(samples[:1]) == 0


def test_sentence_names_the_best_arm_and_of_how_many() -> None:
    prompts = prompts_of_classes("a", "a")
    arms = [make_arm("target-only", 0), make_arm("k=2", 2), ARM]
    samples = []
    for number in range(4):
        samples.append(make_sample("target-only", number, [10, 10]))
        samples.append(make_sample("k=2", number, [15, 15]))
        samples.append(make_sample("k=4", number, [19.2, 19.2]))
    found = [statistics.compare(arm, samples, prompts, True, make_settings(repeats=4)) for arm in arms[1:]]
    assert statistics.headline(found[1:], arms) == "pays: 1.92× [1.92, 1.92] at proposal length 4"
    assert statistics.headline(found, arms) == "pays: 1.92× [1.92, 1.92] at proposal length 4, the best of 2"
    assert statistics.sentence(found[0]) == "pays: 1.50× [1.50, 1.50]"
    assert statistics.headline([], arms).startswith("cannot tell")
