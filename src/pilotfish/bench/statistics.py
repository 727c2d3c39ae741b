"""From samples to a verdict: paired ratios, their intervals, and the sentence that says whether it pays.

The unit is the round, in which every arm answers every prompt once: what a machine does to one process, it does to
all of that process's prompts, so they are no independent observations. Within a round, an arm's rate on a prompt is
divided by its baseline's; over prompts, and over rounds, such ratios are averaged as logarithms, so that each prompt
counts alike however long its answer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pilotfish.bench.artifact import (
    OWN_SYSTEM,
    Arm,
    Comparison,
    Interval,
    Mismatch,
    Prompt,
    Sample,
    Settings,
    VerdictKind,
)

CONFIDENCE = 0.95
MAX_HALF_WIDTH = 0.10
"""Of an interval, relative to its ratio; a wider one carries no verdict."""
MAX_DRIFT = 0.15
"""Of the baseline's samples; see `drift`."""
_NUM_RESAMPLES = 9999


def conclude(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: Settings,
    num_processes: int,
    samples: Sequence[Sample],
    mismatches: Sequence[Mismatch],
) -> dict[str, Any]:
    """All of an artifact that follows from its samples and from the differences found between them, by field."""
    parted = {mismatch.arm for mismatch in mismatches}
    rounds = {arm.name: {sample.round for sample in samples if sample.arm == arm.name} for arm in arms}
    compared = [arm for arm in arms if rounds[arm.name] & rounds.get(arm.baseline or "", set())]
    differs = any(arm.name in parted and arm.system == OWN_SYSTEM for arm in arms)
    complete = len(samples) == num_processes
    # What spoils the whole run leaves no arm a verdict.
    obstacle = ""
    if differs:
        obstacle = "outputs differ, which must never happen: please report it with result.json"
    elif not complete:
        obstacle = f"the run ended early, after {len(samples)} of {num_processes} samples; let it finish"
    comparisons = [
        compare(arm, samples, prompts, parted.isdisjoint((arm.name, arm.baseline)), settings, obstacle)
        for arm in compared
    ]
    own_compared = any(arm.system == OWN_SYSTEM for arm in compared)
    baselines = sorted({arm.name for arm in arms if arm.baseline is None and rounds[arm.name]})
    return {
        "complete": complete,
        "identical": False if differs else True if own_compared else None,
        "baseline_drift": {name: drift([sample for sample in samples if sample.arm == name]) for name in baselines},
        "comparisons": comparisons,
        "verdict": headline(comparisons, arms),
    }


def compare(
    arm: Arm,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    identical: bool,
    settings: Settings,
    obstacle: str = "",
) -> Comparison:
    """`arm` against its baseline, over the rounds that have a sample of both; at least one.

    `obstacle` says why there can be no verdict, whatever the figures.
    """
    seed = settings.seed
    ratios = _log_ratios(arm, samples, prompts)  # [rounds, prompts]
    column = {prompt.id: number for number, prompt in enumerate(prompts)}
    by_class = {name: [column[prompt_id] for prompt_id in ids] for name, ids in ids_by_class(prompts).items()}
    overall = interval(ratios.mean(axis=1), seed)
    baseline_drift = drift([sample for sample in samples if sample.arm == arm.baseline])
    verdict, reason = judge(overall, len(ratios), baseline_drift, identical, obstacle)
    return Comparison(
        arm=arm.name,
        baseline=arm.baseline or "",
        identical=identical,
        num_rounds=len(ratios),
        overall=overall,
        classes={name: interval(ratios[:, columns].mean(axis=1), seed) for name, columns in by_class.items()},
        prompts={prompt_id: interval(ratios[:, number], seed) for prompt_id, number in column.items()},
        verdict=verdict,
        reason=reason,
    )


def ids_by_class(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """The ids of each class's prompts, all in the order in which they come."""
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.prompt_class, []).append(prompt.id)
    return found


def interval(log_ratios: NDArray[np.float64], seed: int) -> Interval:
    """The ratio of one value per round, and its interval at `CONFIDENCE`.

    The interval is the percentile bootstrap's, which is too short for few rounds (52 % for two, 87 % for four, where it
    spans no more than what was seen), and therefore never shorter than Student's on the logarithms.
    """
    ratio = math.exp(log_ratios.mean())
    count = len(log_ratios)
    if count < 2:
        return Interval(ratio=ratio, low=None, high=None)
    if np.ptp(log_ratios) == 0:
        return Interval(ratio=ratio, low=ratio, high=ratio)
    bootstrap = stats.bootstrap(
        (log_ratios,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=_NUM_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stats.sem(log_ratios)
    low, high = min(bootstrap.low, log_ratios.mean() - half), max(bootstrap.high, log_ratios.mean() + half)
    return Interval(ratio=ratio, low=math.exp(low), high=math.exp(high))


def drift(samples: Sequence[Sample]) -> float:
    """(fastest − slowest) / median of an arm's samples, each by its prompts' geometric mean rate."""
    rates = [rate(sample) for sample in samples]
    return (max(rates) - min(rates)) / median(rates)


def rate(sample: Sample, prompt_ids: Sequence[str] | None = None) -> float:
    """Tokens per second end to end, the geometric mean over the sample's prompts, or over those named."""
    rates = _rates(sample)
    chosen = list(rates) if prompt_ids is None else prompt_ids
    return math.exp(sum(math.log(rates[name]) for name in chosen) / len(chosen))


def judge(
    overall: Interval, num_rounds: int, baseline_drift: float, identical: bool, obstacle: str = ""
) -> tuple[VerdictKind, str]:
    """The verdict, and for "cannot tell" the reason and what to do about it."""
    if obstacle:
        return "cannot tell", obstacle
    if not identical:
        return "cannot tell", "the output differs from the baseline's, so the two do not do the same work"
    if overall.low is None or overall.high is None:
        return "cannot tell", "a single round has no interval; use --repeats 4 or more"
    if baseline_drift > MAX_DRIFT:
        return "cannot tell", (
            f"target-only samples differ by {baseline_drift:.0%}, more than {MAX_DRIFT:.0%}; "
            "stop what else runs on this machine and measure again"
        )
    width = max(overall.high - overall.ratio, overall.ratio - overall.low) / overall.ratio
    if width > MAX_HALF_WIDTH:
        return "cannot tell", (
            f"the interval is ±{width:.0%}, wider than ±{MAX_HALF_WIDTH:.0%}; use more --repeats on a quieter machine"
        )
    if overall.low > 1:
        return "pays", ""
    if overall.high < 1:
        return "does not pay", ""
    return "cannot tell", f"the interval holds 1, no difference; more than {num_rounds} --repeats may tell them apart"


def own(comparisons: Sequence[Comparison], arms: Sequence[Arm]) -> list[Comparison]:
    """Those of pilotfish's arms, which the verdict is about."""
    names = {arm.name for arm in arms if arm.system == OWN_SYSTEM}
    return [comparison for comparison in comparisons if comparison.arm in names]


def best(comparisons: Sequence[Comparison], arms: Sequence[Arm]) -> Comparison | None:
    """The one of pilotfish's with the highest ratio: of those that pay, where there are any."""
    return max(own(comparisons, arms), key=lambda found: (found.verdict == "pays", found.overall.ratio), default=None)


def headline(comparisons: Sequence[Comparison], arms: Sequence[Arm]) -> str:
    """One sentence: the verdict on the best arm, and of how many it is the best."""
    found = best(comparisons, arms)
    if found is None:
        return "cannot tell: nothing was compared with target-only"
    length = next(arm.proposal_length for arm in arms if arm.name == found.arm)
    number = len(own(comparisons, arms))
    of_many = f", the best of {number}" if number > 1 else ""
    return sentence(found, f" at proposal length {length}{of_many}")


def sentence(comparison: Comparison, where: str = "") -> str:
    """As in `pays: 1.92× [1.85, 1.99]`, with `where` behind it, and the reason where there is no verdict."""
    reason = f": {comparison.reason}" if comparison.reason else ""
    return f"{comparison.verdict}: {show(comparison.overall)}{where}{reason}"


def show(found: Interval) -> str:
    """As in `1.92× [1.85, 1.99]`."""
    bounds = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.ratio:.2f}×{bounds}"


def _log_ratios(arm: Arm, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> NDArray[np.float64]:
    """[rounds, prompts]"""
    by_round: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        by_round.setdefault(sample.arm, {})[sample.round] = sample
    own, base = by_round.get(arm.name, {}), by_round.get(arm.baseline or "", {})
    rows = []
    for number in sorted(own.keys() & base.keys()):
        rates, base_rates = _rates(own[number]), _rates(base[number])
        rows.append([math.log(rates[prompt.id] / base_rates[prompt.id]) for prompt in prompts])
    return np.array(rows)


def _rates(sample: Sample) -> dict[str, float]:
    return {answer.prompt_id: len(answer.token_ids) / answer.end_to_end_seconds for answer in sample.answers}
