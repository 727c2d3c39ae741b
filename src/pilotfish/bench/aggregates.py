"""What one arm did, summed over an artifact's samples: rates with intervals, acceptance, where the time went.

The report and the terminal summary both show these. What a system does not tell of its answers is None here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from pilotfish.bench.artifact import Answer, Artifact, Phases, Sample, num_reaching
from pilotfish.bench.statistics import ids_by_class, interval, rate

MAX_RESIDUAL_SHARE = 0.05
"""Of an answer's seconds; above it the phases leave too much unexplained."""


@dataclass(frozen=True)
class Rate:
    """Tokens per second, and the interval over rounds; without bounds for a single round."""

    tokens_per_second: float
    low: float | None
    high: float | None


def show_rate(rate: Rate) -> str:
    """As in `7.12 [7.03, 7.21]`."""
    bounds = "" if rate.low is None or rate.high is None else f" [{rate.low:.2f}, {rate.high:.2f}]"
    return f"{rate.tokens_per_second:.2f}{bounds}"


@dataclass(frozen=True)
class PositionAcceptance:
    """How often the token at a place in the draft was accepted, and with it all before it."""

    position: int
    """From 1."""
    num_drafted: int
    num_accepted: int

    @property
    def share(self) -> float:
        return self.num_accepted / self.num_drafted


@dataclass(frozen=True)
class ArmSummary:
    """An arm over all of its samples, at least one."""

    arm: str
    end_to_end: Rate
    """The geometric mean over prompts, and over rounds, as in the comparison."""
    classes: dict[str, Rate]
    """End to end, for each class of prompts."""
    decode_tokens_per_second: float | None
    """The geometric mean over the answers that tell."""
    num_tokens: float
    """Output tokens of one sample, on average; likewise the steps."""
    num_steps: float | None
    acceptance_rate: float | None
    """Accepted over drafted tokens; None where nothing was drafted."""
    mean_acceptance_length: float | None
    """Tokens per decode step, the target's own included."""
    positions: list[PositionAcceptance]
    phases_per_100_tokens: Phases | None
    """Seconds for 100 output tokens."""
    residual_share: float | None
    """Of all seconds those that no phase accounts for; then the highest share of any one answer."""
    worst_residual_share: float | None
    peak_memory_bytes: int
    """Of the sample that took most."""


def summarise(artifact: Artifact) -> list[ArmSummary]:
    """The arms that have a sample, in the artifact's order."""
    samples = {arm.name: [sample for sample in artifact.samples if sample.arm == arm.name] for arm in artifact.arms}
    return [_summarise(name, of_arm, artifact) for name, of_arm in samples.items() if of_arm]


def _summarise(arm: str, samples: Sequence[Sample], artifact: Artifact) -> ArmSummary:
    by_class = ids_by_class(artifact.prompts)
    seed = artifact.settings.seed
    answers = [answer for sample in samples for answer in sample.answers]
    decode_rates = [a.decode_tokens_per_second for a in answers if a.decode_tokens_per_second is not None]
    stepped = [(len(answer.token_ids) - 1, answer.num_steps) for answer in answers if answer.num_steps is not None]
    num_steps = sum(steps for _, steps in stepped)
    positions = _positions(answers)
    residuals = [answer.residual_share for answer in answers if answer.residual_share is not None]
    phases = _phases_per_100_tokens(answers)
    return ArmSummary(
        arm=arm,
        end_to_end=_rate([rate(sample) for sample in samples], seed),
        classes={name: _rate([rate(sample, ids) for sample in samples], seed) for name, ids in by_class.items()},
        decode_tokens_per_second=math.exp(fmean(map(math.log, decode_rates))) if decode_rates else None,
        num_tokens=sum(len(answer.token_ids) for answer in answers) / len(samples),
        num_steps=num_steps / len(samples) if stepped else None,
        acceptance_rate=_share(sum(p.num_accepted for p in positions), sum(p.num_drafted for p in positions)),
        mean_acceptance_length=_share(sum(tokens for tokens, _ in stepped), num_steps),
        positions=positions,
        phases_per_100_tokens=phases,
        residual_share=None if phases is None else _share(phases.other_seconds, sum(phases.model_dump().values())),
        worst_residual_share=max(residuals, default=None),
        peak_memory_bytes=max(sample.peak_memory_bytes for sample in samples),
    )


def _rate(rates: Sequence[float], seed: int) -> Rate:
    found = interval(np.log(rates), seed)
    return Rate(tokens_per_second=found.ratio, low=found.low, high=found.high)


def _positions(answers: Sequence[Answer]) -> list[PositionAcceptance]:
    proposed = [length for answer in answers for length in answer.num_draft_tokens or ()]
    accepted = [length for answer in answers for length in answer.num_accepted_tokens or ()]
    longest = max(proposed, default=0)
    counts = zip(num_reaching(proposed, longest), num_reaching(accepted, longest), strict=True)
    return [
        PositionAcceptance(position=position, num_drafted=num_drafted, num_accepted=num_accepted)
        for position, (num_drafted, num_accepted) in enumerate(counts, 1)
    ]


def _phases_per_100_tokens(answers: Sequence[Answer]) -> Phases | None:
    told = [(answer.phases, len(answer.token_ids)) for answer in answers if answer.phases is not None]
    if not told:
        return None
    hundreds = sum(num_tokens for _, num_tokens in told) / 100
    return Phases(**{name: sum(getattr(phases, name) for phases, _ in told) / hundreds for name in Phases.model_fields})


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
