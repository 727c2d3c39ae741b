"""JSON from files that nobody has checked yet: bounded in size, and free of what the standard reader lets pass."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NoReturn

from pilotfish.errors import FormatError
from pilotfish.files import open_file

MAX_BYTES = 64 << 20
"""A tokenizer of 250,000 tokens has 30 MB."""


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """The JSON object in a file. Raises `ModelNotFoundError` where there is none, `FormatError` as `parse_object` and
    for a file of more than `max_bytes`; what is made of them may take thirty times their memory."""
    with open_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FormatError(f"{path} has more than {max_bytes} bytes, which no such file needs")
    return parse_object(content, str(path))


def parse_object(content: bytes, source: str) -> dict[str, object]:
    """One JSON object in UTF-8. Raises `FormatError`, which names `source`, for anything else, for a key that is there
    twice in one object, and for NaN and infinities, which JSON does not have."""

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{source} is not sound JSON: it holds {constant}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise FormatError(f"{source} is not sound JSON: {repeated[:80]!r} is there twice in one object")
        return found

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
