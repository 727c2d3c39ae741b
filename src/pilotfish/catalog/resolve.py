"""From a name to a model on this machine: what is present is used, else the first source that answers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pilotfish.catalog import hub, wheels
from pilotfish.catalog.entries import CatalogEntry, HubSource, entries
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError
from pilotfish.errors import FetchError, ModelNotFoundError

_HUB_NAME = re.compile(r"(\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?)(?::(.+))?", re.ASCII)


def is_name(model: str) -> bool:
    """Whether `model` is to be pulled, and is no path: a path that exists comes before a repository of its spelling."""
    if model in entries():
        return True
    return not os.path.exists(model) and (_base(model) in entries() or _hub_source(model) is not None)


def locate(entry: CatalogEntry) -> Path | None:
    """Where the entry's model is on this machine: our cache folder, then the hub library's; None if in neither."""
    joined = (wheels.joined(source) for source in entry.sources if not isinstance(source, HubSource))
    cached = (hub.cached(source) for source in entry.sources if isinstance(source, HubSource))
    return next((path for path in (*joined, *cached) if path is not None), None)


def pull(name: str, progress: Progress | None = None) -> Path:
    """The path of the model `name`, a GGUF file or a folder of safetensors, fetched if it is not present.

    `name` is one of the catalog, or a repository on the hub with what `HubSource` calls a selector: `ORG/NAME` or
    `ORG/NAME:SELECTOR`. `ModelNotFoundError` for an unknown name or where not exactly one file fits,
    `UnsupportedModelError` for a split GGUF file, `FormatError` for a bad safetensors index, `FetchError` where no
    source answers or what came is wrong, `DiskFullError` where there is no room.
    """
    return pull_entry(_find_entry(name), progress)


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
            return wheels.fetch(entry.name, source, progress)
        except SourceUnavailableError as reason:
            reasons.append(f"{source.label}: {reason}")
        except ModelNotFoundError as reason:
            if len(entry.sources) == 1:
                raise
            reasons.append(str(reason))
    raise FetchError(
        f"cannot fetch {entry.name} ({'; '.join(reasons)}); check the name and the connection, or give the path to a "
        "GGUF file or to a folder of safetensors"
    )


def _find_entry(name: str) -> CatalogEntry:
    known = entries()
    if name in known:
        return known[name]
    base = _base(name)
    if base in known:
        variants = ", ".join(other for other in known if _base(other) == base)
        raise ModelNotFoundError(f"no model {name!r} in the catalog; of this one it has {variants}")
    source = _hub_source(name)
    if source is None:
        names = ", ".join(other for other in known if other == _base(other))
        raise ModelNotFoundError(
            f"no model {name!r} in the catalog; it has {names}; a repository on the hub is named ORG/NAME"
        )
    return CatalogEntry(name, description=source.label, licence="see its page on the hub", sources=(source,))


def _base(name: str) -> str:
    return name.partition(":")[0]


def _hub_source(name: str) -> HubSource | None:
    match = _HUB_NAME.fullmatch(name)
    # The hub's own rules; and what ends like a file is a mistyped path, no repository is called so.
    if match is None or "--" in match[1] or ".." in match[1] or match[1].lower().endswith((".git", ".gguf")):
        return None
    return HubSource(match[1], match[2])


def _silent(event: PullEvent) -> None:
    """Progress that nobody asked for."""
