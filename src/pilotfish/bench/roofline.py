"""Where the limit is: what a step takes on this machine, the least it could take, and the speedup that allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from torch import Tensor

import pilotfish
from pilotfish.errors import OptionError
from pilotfish.model.calibrate import (
    Clock,
    ForwardWork,
    MachineLimits,
    Probe,
    Stopwatch,
    WeighedModel,
    WithLimits,
    floor_ratio,
    forward_work,
    interleaved,
    machine_probe,
    native_backend,
)

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)
DRAFT_STEP = "a draft step"
STEADY_SPREAD = 0.15
TOKEN_ACCEPTANCES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

Progress = Callable[[str], None]
"""Told what is going on now."""


@dataclass(frozen=True)
class StepCost:
    """A forward of `num_rows` rows: medians over all rounds, and the samples in the order of the rounds."""

    num_rows: int
    num_bytes: int
    """Weights, each read once; keys and values are not counted."""
    num_macs: int
    """Multiply-accumulates of the matrix products; attention's are not counted."""
    seconds: float
    floor_seconds: float
    """Reading at the machine's bandwidth or multiplying at its peak, whichever takes longer."""
    floor_share: float
    """Floor over time taken, each round by the limits of its own moment: 1 is as quick as the machine allows."""
    bound_by: str
    """Which of the two the floor is: "memory" or "arithmetic"."""
    spread: float
    """Between the quartiles of the samples, as a share of the median."""
    samples: Sequence[float]
    """Seconds taken."""
    floor_samples: Sequence[float]
    """Seconds of the floor at the same moments."""


@dataclass(frozen=True)
class AllowedSpeedup:
    """The best proposal length at one acceptance, and what it would give."""

    token_acceptance: float
    """Probability that a guess is accepted where all before it were."""
    proposal_length: int
    acceptance_rate: float
    """Accepted over drafted, as `GenerationStats` counts it: lower, since what follows a rejected guess counts too."""
    tokens_per_step: float
    step_seconds: float
    speedup: float
    """Over the target alone, in decoding."""


@dataclass(frozen=True)
class Limits:
    """One of the machine's limits per second: the median of all samples, and their range, which shows its moods."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Measurements:
    """What was measured, and the machine's limits meanwhile."""

    bytes_per_second: Limits
    """Read from memory."""
    macs_per_second: Limits
    """Integer multiply-accumulates on registers."""
    target_steps: Sequence[StepCost]
    """By ascending number of rows."""
    draft_step: StepCost | None

    @property
    def is_steady(self) -> bool:
        """Whether the medians mean something: no step's samples spread widely."""
        steps = [*self.target_steps, *([self.draft_step] if self.draft_step else [])]
        return all(step.spread <= STEADY_SPREAD for step in steps)


@dataclass(frozen=True)
class Roofline:
    """All that one run found."""

    version: str
    backend: str
    model: str
    draft_model: str | None
    context_length: int
    """Tokens in the caches before each step."""
    rounds: int
    is_steady: bool
    """See `Measurements.is_steady`."""
    measurements: Measurements
    speedups: Sequence[AllowedSpeedup]


def run_roofline(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    threads: int | None = None,
    context_length: int = 64,
    rounds: int = 7,
    progress: Progress = lambda what: None,
) -> Roofline:
    """Measures a target, and a draft model where there is one, each behind `context_length` tokens of context.

    Without a draft model the speedups are those of guesses that cost nothing. Raises `OptionError` where the kernels
    are missing or a model's context is too short, `PairMismatchError`, and what `load` raises.
    """
    backend = native_backend(threads)
    progress(f"loading {model}")
    target, tokenizer = pilotfish.load(model, backend=backend)
    draft = None
    if draft_model is not None:
        progress(f"loading {draft_model}")
        draft, draft_tokenizer = pilotfish.load(draft_model, backend=backend)
        pilotfish.check_pair(draft_tokenizer, tokenizer)
    progress("preparing")
    found = measure(
        target,
        draft,
        machine_probe(backend),
        context_length,
        rounds,
        choose=backend.argmax,
        progress=progress,
    )
    seconds = {step.num_rows: step.seconds for step in found.target_steps}
    draft_seconds = 0.0 if found.draft_step is None else found.draft_step.seconds
    return Roofline(
        version=pilotfish.__version__,
        backend=backend.name,
        model=str(model),
        draft_model=None if draft_model is None else str(draft_model),
        context_length=context_length,
        rounds=rounds,
        is_steady=found.is_steady,
        measurements=found,
        speedups=[allowed_speedup(acceptance, seconds, draft_seconds) for acceptance in TOKEN_ACCEPTANCES],
    )


def measure(
    target: WeighedModel,
    draft: WeighedModel | None,
    probe: Probe,
    context_length: int,
    rounds: int,
    *,
    choose: Callable[[Tensor], list[int]],
    clock: Clock = time.perf_counter,
    progress: Progress = lambda what: None,
) -> Measurements:
    """Takes every step once per round, after a round that is not counted, and the machine's limits before each."""
    _check_context("the target", target, context_length + max(ROW_COUNTS))
    stopwatch = Stopwatch(target, context_length, clock=clock)
    measures = {f"T({rows})": WithLimits(partial(stopwatch.forward, rows), probe, clock) for rows in ROW_COUNTS}
    if draft is not None:
        _check_context("the draft model", draft, context_length + 1)
        drafting = Stopwatch(draft, context_length, choose=choose, clock=clock)
        measures[DRAFT_STEP] = WithLimits(drafting.draft_step, probe, clock)
    numbers, total = count(), (1 + rounds) * len(measures)

    def announced(name: str) -> float:
        progress(f"measuring, {next(numbers) / total:.0%} done: {name}")
        return measures[name]()

    announcing = {name: partial(announced, name) for name in measures}
    interleaved(announcing, 1)
    for taken in measures.values():
        taken.limits.clear()
    samples = interleaved(announcing, rounds)

    def cost(name: str, model: WeighedModel, num_rows: int) -> StepCost:
        return step_cost(forward_work(model), num_rows, samples[name], measures[name].limits)

    limits = [limit for taken in measures.values() for limit in taken.limits]
    return Measurements(
        _limits([limit.bytes_per_second for limit in limits]),
        _limits([limit.macs_per_second for limit in limits]),
        [cost(f"T({rows})", target, rows) for rows in ROW_COUNTS],
        None if draft is None else cost(DRAFT_STEP, draft, 1),
    )


def step_cost(work: ForwardWork, num_rows: int, seconds: Sequence[float], limits: Sequence[MachineLimits]) -> StepCost:
    """The figures of one kind of step from its times, and from the limits of the same moments."""
    num_macs = num_rows * work.macs_per_row
    floors = [work.floor_seconds(num_rows, limit.bytes_per_second, limit.macs_per_second) for limit in limits]
    return StepCost(
        num_rows=num_rows,
        num_bytes=work.num_bytes,
        num_macs=num_macs,
        seconds=median(seconds),
        floor_seconds=median(floors),
        floor_share=1 / floor_ratio(work, num_rows, seconds, limits),
        bound_by="memory"
        if work.num_bytes / median(limit.bytes_per_second for limit in limits)
        >= num_macs / median(limit.macs_per_second for limit in limits)
        else "arithmetic",
        spread=_spread(seconds),
        samples=list(seconds),
        floor_samples=floors,
    )


def allowed_speedup(token_acceptance: float, seconds: Mapping[int, float], draft_seconds: float) -> AllowedSpeedup:
    """The proposal length that gives most, of those whose verification was measured (`seconds` by number of rows).

    Section 3.3 of Leviathan et al. 2022 (arXiv 2211.17192), with the measured T(k + 1) in place of T(1): where each
    guess is accepted with the same probability a, a step gives (1 - a^(k+1)) / (1 - a) tokens and takes k draft steps
    and T(k + 1). No answer reaches it: prompts, caches and everything else outside the two models cost time as well.
    """

    def at(proposal_length: int) -> AllowedSpeedup:
        tokens = sum(token_acceptance**place for place in range(proposal_length + 1))
        step_seconds = proposal_length * draft_seconds + seconds[proposal_length + 1]
        return AllowedSpeedup(
            token_acceptance=token_acceptance,
            proposal_length=proposal_length,
            acceptance_rate=(tokens - 1) / proposal_length if proposal_length else 0.0,
            tokens_per_step=tokens,
            step_seconds=step_seconds,
            speedup=tokens * seconds[1] / step_seconds,
        )

    # Of equal ones the first, which is the shortest.
    return max((at(num_rows - 1) for num_rows in sorted(seconds)), key=lambda allowed: allowed.speedup)


def _limits(samples: Sequence[float]) -> Limits:
    return Limits(median(samples), min(samples), max(samples))


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    lower, middle, upper = quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / middle


def _check_context(what: str, model: WeighedModel, needed: int) -> None:
    if model.config.context_length < needed:
        raise OptionError(
            f"{what} has a context of {model.config.context_length} tokens, and the measurement needs {needed}"
        )
