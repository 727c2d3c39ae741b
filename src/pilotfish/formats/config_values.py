"""Takes single values out of a config that nobody has checked yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pilotfish.errors import FormatError, brief

MAX_SIZE = 1 << 20
"""No count in a config of ours is beyond; larger ones are damage, and would cost memory."""


class ConfigValues:
    """The values by key, each checked when it is asked for. One that is null counts as absent.

    What is missing without a default, or has another type or range, is a `FormatError` that names `source` and key.
    """

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.source = source
        self._values = values

    def get(self, key: str, default: object = None) -> object:
        value = self._values.get(key)
        return default if value is None else value

    def fail(self, key: str, wanted: str) -> FormatError:
        return FormatError(f"{self.source} {key!r} must be {wanted}, got {brief(self._values.get(key))}")

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to `MAX_SIZE`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise self.fail(key, f"an integer from 1 to {MAX_SIZE}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        # Integers may be beyond any float, and compare exactly.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value
