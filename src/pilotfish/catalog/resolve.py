"""From a name to a file on this machine: what is present is used, else the first source that answers."""

from __future__ import annotations

from pathlib import Path

from pilotfish.catalog import hub, wheels
from pilotfish.catalog.entries import CatalogEntry, HubSource, entries
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError
from pilotfish.errors import FetchError, ModelNotFoundError


def locate(entry: CatalogEntry) -> Path | None:
    """Where the entry's file is on this machine: our cache folder, then the hub library's; None if in neither."""
    joined = wheels.joined(entry)
    if joined is not None:
        return joined
    paths = (hub.cached(source) for source in entry.sources if isinstance(source, HubSource))
    return next((path for path in paths if path is not None), None)


def pull(name: str, progress: Progress | None = None) -> Path:
    """The path of the catalog's model `name`, fetched if it is not present.

    `ModelNotFoundError` for an unknown name, `FetchError` where no source answers or what came is wrong,
    `DiskFullError` where there is no room.
    """
    known = entries()
    if name not in known:
        raise ModelNotFoundError(f"no model {name!r} in the catalog; it has {', '.join(known)}")
    return pull_entry(known[name], progress)


def pull_entry(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """`pull` for an entry in hand."""
    progress = progress or _silent
    present = locate(entry)
    if present is not None:
        return present
    reasons = []
    for source in entry.sources:
        try:
            if isinstance(source, HubSource):
                return hub.fetch(source, progress)
            return wheels.fetch(entry, source, progress)
        except SourceUnavailableError as reason:
            reasons.append(f"{source.label}: {reason}")
    raise FetchError(
        f"cannot fetch {entry.name} ({'; '.join(reasons)}); check the connection, or pass a path to a GGUF file"
    )


def _silent(event: PullEvent) -> None:
    """Progress that nobody asked for."""
