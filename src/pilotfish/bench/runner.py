"""Runs a measurement: arms take turns in fresh processes, outputs are held against each other, ratios come last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone

from pilotfish.bench import statistics
from pilotfish.bench.artifact import (
    Answer,
    Arm,
    Artifact,
    Host,
    Mismatch,
    ModelFile,
    Prompt,
    Sample,
    Settings,
    TokenChoice,
)
from pilotfish.bench.order import balanced_order
from pilotfish.bench.worker import Event
from pilotfish.errors import BenchmarkError


@dataclass(frozen=True)
class Turn:
    """An arm's place in the order of all processes."""

    arm: Arm
    round: int
    place: int


@dataclass(frozen=True)
class Progress:
    """Where a measurement is. `seconds_left` is None until every arm has been seen."""

    turn: Turn
    num_turns: int
    stage: str
    num_answers: int
    num_prompts: int
    seconds_left: float | None


Start = Callable[[Turn], AbstractContextManager[Iterator[Event]]]
"""Starts a process that takes a turn's sample; leaving the context ends it."""
Explain = Callable[[Mismatch, Sequence[int]], Mismatch]
"""Adds texts and margin to a mismatch behind the given output tokens, which both arms had in common."""


class Measurement:
    """One run over all rounds. An arm without a baseline comes before those that are compared with it."""

    def __init__(
        self,
        arms: Sequence[Arm],
        prompts: Sequence[Prompt],
        models: Sequence[ModelFile],
        settings: Settings,
        *,
        start: Start,
        explain: Explain,
        save: Callable[[Artifact], None] = lambda artifact: None,
        report: Callable[[Progress], None] = lambda progress: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`save` gets the artifact so far after each sample, and `report` hears of everything that happens."""
        self._arms = list(arms)
        self._prompts = list(prompts)
        self._models = list(models)
        self._settings = settings
        self._start = start
        self._explain = explain
        self._save = save
        self._report = report
        self._clock = clock
        self._created_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        rounds = balanced_order(len(arms), settings.repeats)
        turns = [(number, index) for number, row in enumerate(rounds) for index in row]
        self._turns = [Turn(arms[index], number, place) for place, (number, index) in enumerate(turns)]
        self._samples: list[Sample] = []
        self._mismatches: list[Mismatch] = []
        self._host: Host | None = None
        self._seconds: dict[str, list[float]] = {}

    def run(self) -> Artifact:
        """Takes all samples. Ctrl-C, or a difference in pilotfish's own output, ends it early: what is finished counts.

        Raises `BenchmarkError` where a process fails.
        """
        try:
            for turn in self._turns:
                sample = self._take(turn)
                self._samples.append(sample)
                found = self._first_mismatch(turn.arm, sample)
                if found is not None:
                    self._mismatches.append(found)
                self._save(self.artifact)
                if found is not None and turn.arm.system == "pilotfish":
                    break
        except KeyboardInterrupt:
            self._save(self.artifact)
        return self.artifact

    @property
    def artifact(self) -> Artifact:
        """What is known so far."""
        parted = {mismatch.arm for mismatch in self._mismatches}
        sampled = {sample.arm for sample in self._samples}
        compared = [arm for arm in self._arms if arm.name in sampled and arm.baseline in sampled]
        own = [arm.name for arm in compared if arm.system == "pilotfish"]
        comparisons = [
            statistics.compare(arm, self._samples, self._prompts, arm.name not in parted, self._settings)
            for arm in compared
        ]
        baselines = {arm.name for arm in self._arms if arm.baseline is None and arm.name in sampled}
        return Artifact(
            created_at=self._created_at,
            complete=len(self._samples) == len(self._turns),
            settings=self._settings,
            prompts=self._prompts,
            host=self._host,
            models=self._models,
            arms=self._arms,
            order=[turn.arm.name for turn in self._turns],
            samples=self._samples,
            identical=parted.isdisjoint(own) if own else None,
            mismatches=self._mismatches,
            baseline_drift={
                name: statistics.drift([sample for sample in self._samples if sample.arm == name])
                for name in sorted(baselines)
            },
            comparisons=comparisons,
            verdict=statistics.headline(comparisons, self._arms),
        )

    def _take(self, turn: Turn) -> Sample:
        begin = self._clock()
        answers: list[Answer] = []
        self._tell(turn, "starting", answers, 0.0)
        with self._start(turn) as events:
            for event in events:
                if event.answer is not None:
                    answers.append(event.answer)
                if event.sample is not None:
                    self._settle_host(event.host)
                    self._seconds.setdefault(turn.arm.name, []).append(self._clock() - begin)
                    return event.sample
                self._tell(turn, event.text, answers, self._clock() - begin)
        raise BenchmarkError(f"the process of {turn.arm.name} ended without a sample")

    def _settle_host(self, host: Host | None) -> None:
        """All of pilotfish's samples must come from the same machine, software, instruction set and threads."""
        if host is not None:
            if self._host is not None and host != self._host:
                raise BenchmarkError("the host changed between two samples: nothing can be compared any more")
            self._host = host

    def _tell(self, turn: Turn, stage: str, answers: Sequence[Answer], seconds: float) -> None:
        means = {name: sum(taken) / len(taken) for name, taken in self._seconds.items()}
        seconds_left = None
        if all(arm.name in means for arm in self._arms):
            ahead = sum(means[other.arm.name] for other in self._turns[turn.place :])
            seconds_left = max(0.0, ahead - seconds)
        self._report(
            Progress(turn, len(self._turns), stage, len(answers), len(self._prompts), seconds_left=seconds_left)
        )

    def _first_mismatch(self, arm: Arm, sample: Sample) -> Mismatch | None:
        """The first place where a sample differs from its baseline's first one; of a baseline, from its own first."""
        reference = next(s for s in self._samples if s.arm == (arm.baseline or arm.name))
        for expected, found in zip(reference.answers, sample.answers, strict=True):
            position = _parting(expected.token_ids, found.token_ids)
            if position is not None:
                mismatch = Mismatch(
                    arm=arm.name,
                    baseline=reference.arm,
                    prompt_id=found.prompt_id,
                    position=position,
                    expected=_choice(expected.token_ids, position),
                    found=_choice(found.token_ids, position),
                    margin=None,
                )
                return self._explain(mismatch, found.token_ids[:position])
        return None


def _parting(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first place where two outputs differ; None where they are the same."""
    pairs = zip(expected, found, strict=False)
    different = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
    if different is None and len(expected) != len(found):
        return min(len(expected), len(found))
    return different


def _choice(token_ids: Sequence[int], position: int) -> TokenChoice | None:
    return TokenChoice(token_id=token_ids[position]) if position < len(token_ids) else None
