"""Runs a measurement: arms take turns in fresh processes, outputs are held against each other, ratios come last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from pilotfish.bench import statistics
from pilotfish.bench.artifact import (
    OWN_SYSTEM,
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
    """One run over all rounds."""

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
        self._waiting: list[Sample] = []
        """To be held against a baseline."""
        self._mismatches: list[Mismatch] = []
        self._host: Host | None = None
        self._seconds: dict[str, list[float]] = {}

    def run(self) -> Artifact:
        """Takes all samples. Ctrl-C, or a difference in pilotfish's own output, ends it early: what is finished counts.

        Raises `BenchmarkError` where a process fails.
        """
        with suppress(KeyboardInterrupt):
            for turn in self._turns:
                sample = self._take(turn)
                self._samples.append(sample)
                self._waiting.append(sample)
                found = self._new_mismatches()
                self._mismatches += found
                self._save(self.artifact)
                for mismatch in found:
                    self._add_explanation(mismatch)
                if any(self._arm(mismatch.arm).system == OWN_SYSTEM for mismatch in found):
                    break
        return self.artifact

    @property
    def artifact(self) -> Artifact:
        """What is known so far."""
        conclusions = statistics.conclude(
            self._arms, self._prompts, self._settings, len(self._turns), self._samples, self._mismatches
        )
        return Artifact(
            created_at=self._created_at,
            settings=self._settings,
            prompts=self._prompts,
            host=self._host,
            models=self._models,
            arms=self._arms,
            order=[turn.arm.name for turn in self._turns],
            samples=self._samples,
            mismatches=self._mismatches,
            **conclusions,
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
                before, now = self._host.model_dump(), host.model_dump()
                changed = ", ".join(name for name in before if before[name] != now[name])
                raise BenchmarkError(
                    f"{changed} changed between two samples, which cannot be compared any more: measure again, and "
                    "leave the machine and pilotfish's own files as they are meanwhile"
                )
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

    def _new_mismatches(self) -> list[Mismatch]:
        """Of samples not looked at before. A sample waits for its baseline's first one; one mismatch an arm will do."""
        waiting, self._waiting = self._waiting, []
        parted = {mismatch.arm for mismatch in self._mismatches}
        mismatches = []
        for sample in waiting:
            baseline = self._arm(sample.arm).baseline or sample.arm
            reference = next((other for other in self._samples if other.arm == baseline), None)
            if reference is None:
                self._waiting.append(sample)
            elif sample.arm not in parted and (found := _first_mismatch(sample, reference)) is not None:
                parted.add(sample.arm)
                mismatches.append(found)
        return mismatches

    def _arm(self, name: str) -> Arm:
        return next(arm for arm in self._arms if arm.name == name)

    def _add_explanation(self, mismatch: Mismatch) -> None:
        """What the target says there, if it can be had: the difference itself is known without it."""
        sample = next(s for s in reversed(self._samples) if s.arm == mismatch.arm)
        token_ids = next(answer.token_ids for answer in sample.answers if answer.prompt_id == mismatch.prompt_id)
        with suppress(BenchmarkError):
            explained = self._explain(mismatch, token_ids[: mismatch.position])
            self._mismatches[self._mismatches.index(mismatch)] = explained
            self._save(self.artifact)


def _first_mismatch(sample: Sample, reference: Sample) -> Mismatch | None:
    """The first place where a sample differs from another."""
    for expected, found in zip(reference.answers, sample.answers, strict=True):
        position = _parting(expected.token_ids, found.token_ids)
        if position is not None:
            return Mismatch(
                arm=sample.arm,
                baseline=reference.arm,
                prompt_id=found.prompt_id,
                position=position,
                expected=_choice(expected.token_ids, position),
                found=_choice(found.token_ids, position),
                margin=None,
            )
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
