"""JSON from files that nobody has checked yet: bounded in size, and free of what the standard reader lets pass."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import NoReturn

from pilotfish.errors import FormatError, brief
from pilotfish.files import open_file

MAX_BYTES = 64 << 20
"""A tokenizer of 250,000 tokens has 30 MB."""
MAX_VALUES = 5 << 19
"""A tokenizer of 262,144 tokens and half a million merges has 1.9 million. In memory each takes up to 260 bytes."""


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """The JSON object in a file. Raises `ModelNotFoundError` where there is none, `FormatError` as `parse_object` and
    for a file of more than `max_bytes`."""
    with open_file(path) as file:
        # As much room is made as is asked for.
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise FormatError(f"{path} has more than {max_bytes} bytes, which no such file needs")
    return parse_object(content, str(path))


def parse_object(content: bytes, source: str) -> dict[str, object]:
    """One JSON object in UTF-8. Raises `FormatError`, which names `source`, for anything else, for a key that is there
    twice in one object, for NaN and infinities, which JSON does not have, and for more than `MAX_VALUES` values."""

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{source} is not sound JSON: it holds {constant}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise FormatError(f"{source} is not sound JSON: {brief(repeated)} is there twice in one object")
        return found

    # No fewer than there are: a text may hold such bytes too.
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise FormatError(f"{source} holds more than {MAX_VALUES} values, which no such file needs")
    try:
        value = json.loads(content.decode(), parse_constant=refuse, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise FormatError(f"{source} is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{source} is not sound JSON: {error.msg} (line {error.lineno})") from None
    except RecursionError:
        raise FormatError(f"{source} is not sound JSON: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise FormatError(f"{source} is not sound JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{source} does not hold a JSON object")
    return value
