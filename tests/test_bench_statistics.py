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
from pilotfish.bench.artifact import Interval, Mismatch
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


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_interval_holds_the_mean_and_is_no_shorter_than_students(values: list[float]) -> None:
    found = statistics.interval(np.array(values), 0)
    mean = sum(values) / len(values)
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.low is not None
    assert found.high is not None
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    assert math.log(found.low) <= mean - half + 1e-9
    assert math.log(found.high) >= mean + half - 1e-9


def test_interval_of_many_rounds_is_the_bootstraps() -> None:
    """Far from a normal distribution, where Student's alone would be too short on the long side."""
    values = np.random.default_rng(1).exponential(1, 60) ** 3 / 100
    found = statistics.interval(values, 0)
    resampled = np.random.default_rng(7).choice(values, (20_000, 60)).mean(axis=1)
    assert found.high is not None
    assert math.log(found.high) == pytest.approx(np.quantile(resampled, 0.975), rel=0.03)
    half = stats.t.ppf(0.975, 59) * values.std(ddof=1) / math.sqrt(60)
    assert math.log(found.high) > values.mean() + 1.02 * half


@pytest.mark.parametrize("num_rounds", [2, 3, 4, 8])
def test_interval_covers_the_truth_as_often_as_it_says(num_rounds: int) -> None:
    """At least 0.95 of 400 intervals, less four standard errors: a false alarm in 30,000."""
    rng = np.random.default_rng(2)
    hits = 0
    for values in rng.normal(0.3, 0.05, (400, num_rounds)):
        found = statistics.interval(values, 0)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= math.exp(0.3) <= found.high
    assert hits / 400 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 400)


def test_single_round_has_no_interval() -> None:
    assert statistics.interval(np.array([0.5]), 0) == Interval(ratio=math.exp(0.5), low=None, high=None)


JUDGED = [
    ({}, "pays", ""),
    ({"ratio": 0.95, "low": 0.93, "high": 0.97}, "does not pay", ""),
    ({"ratio": 1.0, "low": 0.98, "high": 1.03}, "cannot tell", "the interval holds 1"),
    ({"ratio": 1.02, "low": 0.99, "high": 1.05}, "cannot tell", "the interval holds 1"),
    ({"ratio": 0.98, "low": 0.95, "high": 1.01}, "cannot tell", "the interval holds 1"),
    ({"ratio": 1.0, "low": 1.0, "high": 1.0}, "cannot tell", "the interval holds 1"),
    ({"ratio": 1.5, "low": 1.34, "high": 1.52}, "cannot tell", "±11%, wider than ±10%"),
    ({"ratio": 1.5, "low": 1.49, "high": 1.66}, "cannot tell", "±11%, wider than ±10%"),
    ({"drift": 0.16}, "cannot tell", "differ by 16%, more than 15%"),
    ({"drift": 0.15}, "pays", ""),
    ({"identical": False}, "cannot tell", "output differs"),
    ({"obstacle": "the run ended early"}, "cannot tell", "the run ended early"),
    ({"low": None, "high": None, "num_rounds": 1}, "cannot tell", "--repeats 4 or more"),
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
        "obstacle": "",
    } | changes
    found = Interval(ratio=values["ratio"], low=values["low"], high=values["high"])
    judged = statistics.judge(found, values["num_rounds"], values["drift"], values["identical"], values["obstacle"])
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


def concluded(rates: dict[str, list[float]], mismatches=(), num_processes: int | None = None) -> dict:
    """Conclusions of a run whose arms have these rates, one for each round."""
    arms = [make_arm("target-only", 0), make_arm("k=2", 2), ARM]
    samples = [
        make_sample(name, number, [value]) for name, values in rates.items() for number, value in enumerate(values)
    ]
    prompts, settings = prompts_of_classes("a"), make_settings()
    return statistics.conclude(arms, prompts, settings, num_processes or len(samples), samples, mismatches)


STEADY = {"target-only": [10, 10, 10], "k=2": [15, 15, 15], "k=4": [19, 19, 19]}


def parted(arm: str) -> Mismatch:
    return Mismatch(arm=arm, baseline="target-only", prompt_id="0", position=0, expected=None, found=None, margin=None)


def test_whole_run_pays() -> None:
    found = concluded(STEADY)
    assert (found["complete"], found["identical"]) == (True, True)
    assert found["verdict"] == "pays: 1.90× [1.90, 1.90] at proposal length 4, the best of 2"


def test_incomplete_run_has_no_verdict_even_for_arms_that_are_complete() -> None:
    found = concluded(STEADY, num_processes=12)
    assert found["complete"] is False
    assert {comparison.verdict for comparison in found["comparisons"]} == {"cannot tell"}
    assert "after 9 of 12 samples" in found["verdict"]


@pytest.mark.parametrize("arm", ["target-only", "k=2", "k=4"])
def test_difference_in_any_arm_leaves_none_a_verdict(arm: str) -> None:
    """Also where a repeated target-only run differs from the first."""
    found = concluded(STEADY, [parted(arm)])
    assert found["identical"] is False
    assert {comparison.verdict for comparison in found["comparisons"]} == {"cannot tell"}
    assert "outputs differ" in found["verdict"]
    identical = {comparison.arm: comparison.identical for comparison in found["comparisons"]}
    assert identical == {name: arm not in (name, "target-only") for name in ("k=2", "k=4")}


def test_headline_is_about_an_arm_that_pays_rather_than_about_a_noisy_one() -> None:
    found = concluded({"target-only": [10, 10, 10], "k=2": [15, 15, 15], "k=4": [10, 20, 30]})
    assert found["verdict"] == "pays: 1.50× [1.50, 1.50] at proposal length 2, the best of 2"
    found = concluded({"target-only": [10, 10, 10], "k=2": [8, 8, 8], "k=4": [9, 9, 9]})
    assert found["verdict"] == "does not pay: 0.90× [0.90, 0.90] at proposal length 4, the best of 2"


def test_nothing_compared_is_no_verdict() -> None:
    assert concluded({"target-only": [10]})["identical"] is None
    assert concluded({"target-only": [10]})["verdict"].startswith("cannot tell")
