"""Progress on stderr: of fetching a model file, and of a measurement."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pilotfish.catalog import PullEvent
from pilotfish.cli.terminal import OutputConsole, discard, one_line

if TYPE_CHECKING:
    from pilotfish.bench.runner import Progress as Measured


class PullProgress:
    """Draws the events of one pull; shows nothing where nothing had to be fetched, or where stderr is no terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(name)
        self._started = False

    def __enter__(self) -> PullProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._started:
            self._progress.stop()

    def __call__(self, event: PullEvent) -> None:
        if not self._started:
            self._started = True
            self._progress.start()
        self._progress.update(
            self._task,
            description=f"{self._name}: {event.status}",
            completed=event.bytes_done,
            total=event.bytes_total or None,
        )


class BenchProgress:
    """Where a measurement is: arm, sample, prompts, time left. Where stderr is no terminal, one line for each sample.

    Between two events nothing runs that would take time from what is being measured. A measurement goes on where
    stderr cannot be written to any more.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=OutputConsole(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting", left="")
        self._place = -1

    def __enter__(self) -> BenchProgress:
        try:
            self._progress.start()
        except OSError:
            discard(sys.stderr)
            self._progress.disable = True  # rich cannot stop what it has half started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _may_fail():
            self._progress.stop()

    def __call__(self, measured: Measured) -> None:
        turn = measured.turn
        sample = f"sample {turn.place + 1} of {measured.num_turns}, round {turn.round + 1}: {turn.arm.name}"
        left = "" if measured.seconds_left is None else f"{timedelta(seconds=round(measured.seconds_left))} left"
        with _may_fail():
            if not self._progress.disable:
                stage = measured.stage
                if measured.num_answers:
                    stage = f"{measured.num_answers} of {measured.num_prompts} prompts answered"
                self._progress.update(
                    self._task,
                    description=one_line(f"{sample}, {stage}"),
                    completed=turn.place + measured.num_answers / (measured.num_prompts + 1),
                    total=measured.num_turns,
                    left=left,
                    refresh=True,
                )
            elif turn.place != self._place:
                print(one_line(sample + (f" ({left})" if left else "")), file=sys.stderr, flush=True)
        self._place = turn.place


@contextmanager
def _may_fail() -> Iterator[None]:
    try:
        yield
    except OSError:
        discard(sys.stderr)
