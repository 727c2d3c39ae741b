"""What every source shares: how it tells its progress, and how it says that it cannot answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ADDRESS = re.compile(r"\w+://[^\s'\"]*[\w/]|\(host='[^']*', port=\d+\)")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PullEvent:
    """How far a pull is: bytes of the file that are here, bytes it has (0: not known yet), and what is going on."""

    bytes_done: int
    bytes_total: int
    status: str


class Progress(Protocol):
    """Called now and then during a pull, in the caller's thread or in one of the hub library's."""

    def __call__(self, event: PullEvent, /) -> Any: ...


class SourceUnavailableError(Exception):
    """A source cannot answer, for the reason in the message; the next one is tried. Never leaves the catalog."""


def without_addresses(text: str) -> str:
    """The first line of `text`, network addresses taken out: they say where, when the reader needs to know what."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return _ADDRESS.sub("<address>", line)


def in_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def hash_into(digest: hashlib._Hash, path: Path, report: Callable[[int], Any]) -> None:
    """Feeds the file at `path` to `digest`, and tells `report` the bytes read so far."""
    done = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            report(done)
