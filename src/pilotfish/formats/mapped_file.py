"""Maps a model file into memory, and gives back the pages of one tensor at a time."""

from __future__ import annotations

import mmap
from pathlib import Path

from pilotfish.errors import FormatError, ModelNotFoundError
from pilotfish.files import open_file


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes. Raises `ModelNotFoundError` where it cannot be opened, `FormatError` where it is empty."""
    with open_file(path) as file:
        try:
            # ACCESS_COPY: torch wants writable buffers. Nobody may write: what is evicted is read anew.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise FormatError(f"{path} is empty; fetch it again") from None
        except OSError as error:
            raise ModelNotFoundError(f"cannot open {path}: {error.strerror}") from None


def evict(data: mmap.mmap, start: int, num_bytes: int) -> None:
    """Takes the pages that hold these bytes out of the process's memory, where the system can."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first_page, start + num_bytes - first_page)
