"""Opens files of a model, with one clear line where that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from pilotfish.errors import ModelNotFoundError


def open_file(path: Path) -> BinaryIO:
    """Opens for reading. `ModelNotFoundError` where there is no such file, or something that is none: reading from a
    named pipe would wait for ever."""
    try:
        if path.exists() and not path.is_file():
            raise ModelNotFoundError(f"cannot open {path}: it is not a file")
        return path.open("rb")
    except FileNotFoundError:
        if path.is_symlink():  # such as the hub library's cache is made of
            raise ModelNotFoundError(
                f"cannot open {path}: it is a link that leads nowhere; remove it, or fetch the model again"
            ) from None
        raise ModelNotFoundError(f"no such file: {path}") from None
    except OSError as error:
        raise ModelNotFoundError(f"cannot open {path}: {error.strerror}") from None
