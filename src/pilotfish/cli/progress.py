"""A progress bar for fetching model files, on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from pilotfish.catalog import PullEvent


class PullProgress:
    """Draws the events of a pull; shows nothing where nothing had to be fetched."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
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
            self._task = self._progress.add_task(event.status, total=event.bytes_total)
        self._progress.update(self._task, description=event.status, completed=event.bytes_done, total=event.bytes_total)
