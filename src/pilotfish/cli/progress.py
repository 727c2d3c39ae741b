"""A progress bar for fetching a model file, on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pilotfish.catalog import PullEvent


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
