"""The prompts of a measurement: the project's twelve, or a user's file."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from pilotfish.bench.artifact import Prompt
from pilotfish.errors import OptionError


def default_prompts() -> list[Prompt]:
    """The project's twelve, of ten classes."""
    return _parse(files("pilotfish.bench").joinpath("prompts.json").read_text("utf-8"), "prompts.json")


def read_prompts(path: Path) -> list[Prompt]:
    """A JSON list, or JSON lines, of objects with `user`, and if wanted `system`, `id` and `class`.

    An id is the prompt's number, and a class `all`, where the file names none. Raises `OptionError`, which names the
    prompt and what is wrong with it.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"cannot read the prompts in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (byte {error.start})") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, entry in enumerate(_entries(text, source), 1):
        if not isinstance(entry, dict):
            raise OptionError(f"{source}: prompt {number} is not an object with a `user` text")
        try:
            prompt = Prompt.model_validate({"id": str(number), "class": "all"} | entry)
        except ValidationError as error:
            first = error.errors()[0]
            raise OptionError(f"{source}: prompt {number}: {first['loc'][0]}: {first['msg']}") from None
        if not prompt.user.strip():
            raise OptionError(f"{source}: prompt {number} is empty")
        prompts.append(prompt)
    if not prompts:
        raise OptionError(f"{source} holds no prompts")
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise OptionError(f"{source}: two prompts have the id {repeated[0]!r}")
    return prompts


def _entries(text: str, source: str) -> list[object]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_list = text.lstrip().startswith("[")
    pieces = [(1, text)] if is_list else lines
    entries: list[object] = []
    for first_line, piece in pieces:
        try:
            entries.append(json.loads(piece))
        except (ValueError, RecursionError) as error:
            line = first_line + getattr(error, "lineno", 1) - 1
            raise OptionError(f"{source}, line {line}: neither a JSON list nor JSON lines") from None
    if not is_list:
        return entries
    (listed,) = entries
    assert isinstance(listed, list)
    return listed
