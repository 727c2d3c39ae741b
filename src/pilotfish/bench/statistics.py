"""From samples to a verdict: paired ratios, their bootstrap intervals, and the sentence that says whether it pays.

The unit is the round, in which every arm answers every prompt once: what a machine does to one process, it does to
all of that process's prompts, so they are no independent observations. Within a round, an arm's rate on a prompt is
divided by its baseline's; over prompts, and over rounds, such ratios are averaged as logarithms, so that each prompt
counts alike however long its answer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pilotfish.bench.artifact import OWN_SYSTEM, Arm, Comparison, Interval, Prompt, Sample, Settings, VerdictKind

CONFIDENCE = 0.95
MAX_HALF_WIDTH = 0.10
"""Of an interval, relative to its ratio; a wider one carries no verdict."""
MAX_DRIFT = 0.15
"""Of the baseline's samples; see `drift`."""
_NUM_RESAMPLES = 9999


def compare(
    arm: Arm, samples: Sequence[Sample], prompts: Sequence[Prompt], identical: bool, settings: Settings
) -> Comparison:
    """`arm` against its baseline, over the rounds that have a sample of both; at least one."""
    seed = settings.seed
    ratios = _log_ratios(arm, samples, prompts)  # [rounds, prompts]
    by_class: dict[str, list[int]] = {}
    for column, prompt in enumerate(prompts):
        by_class.setdefault(prompt.prompt_class, []).append(column)
    overall = interval(ratios.mean(axis=1), seed)
    baseline_drift = drift([sample for sample in samples if sample.arm == arm.baseline])
    verdict, reason = judge(overall, len(ratios), settings.repeats, baseline_drift, identical)
    return Comparison(
        arm=arm.name,
        baseline=arm.baseline or "",
        identical=identical,
        num_rounds=len(ratios),
        overall=overall,
        classes={name: interval(ratios[:, columns].mean(axis=1), seed) for name, columns in by_class.items()},
        prompts={prompt.id: interval(ratios[:, column], seed) for column, prompt in enumerate(prompts)},
        verdict=verdict,
        reason=reason,
    )


def interval(log_ratios: NDArray[np.float64], seed: int) -> Interval:
    """The ratio of one value per round, and its percentile bootstrap interval at `CONFIDENCE`.

    Few rounds make a plain percentile interval too short. It is widened as Hesterberg says ("What teachers should know
    about the bootstrap", 2015, section 5: the expanded percentile interval), until it spans, for four or fewer rounds,
    all that was seen.
    """
    ratio = math.exp(log_ratios.mean())
    count = len(log_ratios)
    if count < 2:
        return Interval(ratio=ratio, low=None, high=None)
    if np.ptp(log_ratios) == 0:
        return Interval(ratio=ratio, low=ratio, high=ratio)
    tail = stats.norm.cdf(math.sqrt(count / (count - 1)) * stats.t.ppf((1 - CONFIDENCE) / 2, count - 1))
    found = stats.bootstrap(
        (log_ratios,),
        np.mean,
        confidence_level=1 - 2 * tail,
        n_resamples=_NUM_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(ratio=ratio, low=math.exp(found.low), high=math.exp(found.high))


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
    overall: Interval, num_rounds: int, repeats: int, baseline_drift: float, identical: bool
) -> tuple[VerdictKind, str]:
    """The verdict, and for "cannot tell" the reason and what to do about it."""
    if not identical:
        return "cannot tell", "the output differs from the baseline's, so the two do not do the same work"
    if num_rounds < repeats:
        return "cannot tell", f"the run ended early, after {num_rounds} of {repeats} rounds; let it finish"
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
    return (
        "cannot tell",
        f"the interval holds 1, no difference; use more than {num_rounds} --repeats to tell them apart",
    )


def own(comparisons: Sequence[Comparison], arms: Sequence[Arm]) -> list[Comparison]:
    """Those of pilotfish's arms, which the verdict is about."""
    names = {arm.name for arm in arms if arm.system == OWN_SYSTEM}
    return [comparison for comparison in comparisons if comparison.arm in names]


def best(comparisons: Sequence[Comparison], arms: Sequence[Arm]) -> Comparison | None:
    """The one of pilotfish's with the highest ratio."""
    return max(own(comparisons, arms), key=lambda comparison: comparison.overall.ratio, default=None)


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
