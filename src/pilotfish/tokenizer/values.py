"""Values out of files that nobody has checked yet: of the type they must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pilotfish.errors import TokenizerError

T = TypeVar("T")


def read_value(values: Mapping[str, object], key: str, kind: type[T], source: str = "") -> T | None:
    """The value of `key`, None where there is none. Raises `TokenizerError`, which names `source` and `key`, for a
    value of another type.
    """
    value = values.get(key)
    if value is None:
        return None
    # Not isinstance: it would let True pass for the id 1.
    if type(value) is not kind:
        raise TokenizerError(f"{source}{key} must be of type {kind.__name__}, not {type(value).__name__}")
    return value
