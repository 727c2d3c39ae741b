"""What `pilotfish bench` measures: a target model alone, and with a draft model at some proposal lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pilotfish
from pilotfish import catalog
from pilotfish.bench.artifact import Arm, Artifact, Mismatch, ModelFile, Prompt, Settings
from pilotfish.bench.process import fresh_process
from pilotfish.bench.runner import Measurement, Progress, Start, Turn
from pilotfish.bench.worker import CLOCK, WARM_UP, Event, Task
from pilotfish.errors import BenchmarkError, OptionError

SEED = 0
TARGET_ONLY = "target-only"
Launch = Callable[[Task, int], AbstractContextManager[Iterator[Event]]]
"""Starts a process for a task, with a seed."""


@dataclass(frozen=True)
class PairOptions:
    """What to measure. Target-only is measured in any case, so that 0 among the proposal lengths changes nothing."""

    model: str
    draft_model: str | None
    proposal_lengths: Sequence[int]
    prompts: Sequence[Prompt]
    max_tokens: int
    repeats: int
    threads: int | None

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("repeats", self.repeats)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")
        if len(set(self.proposal_lengths)) < len(self.proposal_lengths) or min(self.proposal_lengths, default=0) < 0:
            raise OptionError(f"proposal lengths must be different and not negative, got {list(self.proposal_lengths)}")
        if any(self.proposal_lengths) and self.draft_model is None:
            raise OptionError("proposal lengths above 0 need a draft model")


def measure_pair(
    options: PairOptions,
    save: Callable[[Artifact], None],
    report: Callable[[Progress], None],
    launch: Launch = fresh_process,
    others: Sequence[tuple[Arm, Start]] = (),
) -> Artifact:
    """Runs the measurement; see `Measurement.run`. `others` are arms of other systems, each with what starts it.

    First a process of its own opens the models and encodes the prompts, so that what cannot be run is found at once.
    Raises `ModelNotFoundError` and `BenchmarkError`.
    """
    version = pilotfish.__version__
    arms = [Arm(name=TARGET_ONLY, system_version=version, proposal_length=0)] + [
        Arm(name=f"k={length}", system_version=version, proposal_length=length, baseline=TARGET_ONLY)
        for length in sorted(options.proposal_lengths)
        if length > 0
    ]
    draft_model = options.draft_model if len(arms) > 1 else None
    models = [describe_model("target", options.model)]
    if draft_model is not None:
        models.append(describe_model("draft", draft_model))
    # Found once: what a name means on the hub may change while we measure.
    paths = {name: pilotfish.find_model(name) for name in (options.model, draft_model) if name is not None}
    files = [file for path in paths.values() for file in catalog.model_files(path)]
    states = [_state(path) for path in files]
    starts_of_others = {arm.name: start for arm, start in others}

    def task(arm: Arm, round: int, place: int, **more: object) -> Task:
        return Task.model_validate(
            {
                "arm": arm.name,
                "round": round,
                "place": place,
                "model": str(paths[options.model]),
                "draft_model": str(paths[draft_model]) if draft_model and arm.proposal_length else None,
                "proposal_length": arm.proposal_length,
                "max_tokens": options.max_tokens,
                "threads": options.threads,
                "prompts": options.prompts,
            }
            | more
        )

    def start(turn: Turn) -> AbstractContextManager[Iterator[Event]]:
        for path, state in zip(files, states, strict=True):
            if _state(path) != state:
                raise BenchmarkError(f"{path} changed while it was measured: measure again")
        start_other = starts_of_others.get(turn.arm.name)
        return start_other(turn) if start_other else launch(task(turn.arm, turn.round, turn.place), SEED)

    def explain(mismatch: Mismatch, common_token_ids: Sequence[int]) -> Mismatch:
        prompts = [prompt for prompt in options.prompts if prompt.id == mismatch.prompt_id]
        more = {"mismatch": mismatch, "common_token_ids": common_token_ids}
        asked = task(arms[0], 0, 0, purpose="explain", prompts=prompts, **more)
        with launch(asked, SEED) as events:
            explained = next((event.mismatch for event in events if event.mismatch is not None), None)
        if explained is None:
            raise BenchmarkError("the process that looks at the difference ended without a word")
        return explained

    measurement = Measurement(
        [*arms, *(arm for arm, _ in others)],
        options.prompts,
        models,
        Settings(
            max_tokens=options.max_tokens,
            repeats=options.repeats,
            seed=SEED,
            threads=options.threads,
            warm_up=WARM_UP,
            clock=CLOCK,
        ),
        start=start,
        explain=explain,
        save=save,
        report=report,
    )
    with launch(task(arms[-1], 0, 0, purpose="check"), SEED) as events:
        for _ in events:
            pass
    return measurement.run()


def describe_model(role: Literal["target", "draft"], name: str) -> ModelFile:
    """The model behind a name or a path, read once for its hash, which also brings it into the page cache."""
    path = pilotfish.find_model(name)
    files = catalog.model_files(path)
    hashes = {file.name: _sha256(file) for file in files}
    listed = "".join(f"{sha256}  {file_name}\n" for file_name, sha256 in hashes.items())
    return ModelFile(
        role=role,
        # Where it lies is nobody else's business.
        name=name if catalog.is_name(name) else path.name,
        file_name=path.name,
        num_bytes=sum(file.stat().st_size for file in files),
        sha256=hashlib.sha256(listed.encode()).hexdigest() if path.is_dir() else hashes[path.name],
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _state(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
