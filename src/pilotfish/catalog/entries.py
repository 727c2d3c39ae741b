"""The data file `models.json` as values: which models have a name, and their sources in the order to try them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pilotfish.errors import InvariantError

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubSource:
    """One file of a model repository on the hub; the hub itself states its size and sha256."""

    repository: str
    file_name: str

    @property
    def label(self) -> str:
        return f"hub repository {self.repository}"


@dataclass(frozen=True)
class WheelSource:
    """One file cut into `parts` consecutive pieces, each the one `member` of a wheel in the package registry.

    `package` and `member` are patterns over `part`, which counts from 1.
    """

    package: str
    version: str
    member: str
    parts: int

    @property
    def label(self) -> str:
        first, last = self.package.format(part=1), self.package.format(part=self.parts)
        return f"package {first}" if self.parts == 1 else f"packages {first} to {last}"

    def requirement(self, part: int) -> str:
        return f"{self.package.format(part=part)}=={self.version}"

    def member_name(self, part: int) -> str:
        return self.member.format(part=part)


@dataclass(frozen=True)
class CatalogEntry:
    """A model file with a name. `size` (bytes) and `sha256` (lower-case hex) are of the file joined from wheels."""

    name: str
    description: str
    file_name: str
    size: int
    sha256: str
    licence: str
    sources: tuple[HubSource | WheelSource, ...]


def is_sha256(text: str | None) -> bool:
    """Whether `text` is a sha256 in lower-case hex."""
    return text is not None and _SHA256.fullmatch(text) is not None


def entries() -> dict[str, CatalogEntry]:
    """Every model of the catalog by name, in the order of the data file."""
    return parse_entries(_read_data())


def default_pair() -> tuple[str, str]:
    """The names of the target and the draft model to use where the user names none."""
    pair = _read_data()["default_pair"]
    return pair["target"], pair["draft"]


def parse_entries(data: dict[str, Any]) -> dict[str, CatalogEntry]:
    """The entries of a parsed data file; `InvariantError` names the first one that cannot be right."""
    parsed = {name: _parse_entry(name, fields) for name, fields in data["models"].items()}
    if len({entry.file_name for entry in parsed.values()}) != len(parsed):
        raise InvariantError("models.json: two models have the same file name, and would overwrite each other")
    if not set(data["default_pair"].values()) <= parsed.keys():
        raise InvariantError("models.json: the default pair names a model that is not there")
    return parsed


def _read_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath("models.json").read_text("utf-8"))
    return data


def _parse_entry(name: str, fields: dict[str, Any]) -> CatalogEntry:
    try:
        sources = tuple(_parse_source(source) for source in fields["sources"])
        entry = CatalogEntry(name=name, **(fields | {"sources": sources}))
    except (KeyError, TypeError) as error:
        raise InvariantError(f"models.json: {name}: {error}") from error
    whole_numbers = [entry.size] + [source.parts for source in sources if isinstance(source, WheelSource)]
    if not sources or not all(isinstance(number, int) and number > 0 for number in whole_numbers):
        raise InvariantError(f"models.json: {name}: needs a source, and a size and parts above 0")
    if not is_sha256(entry.sha256):
        raise InvariantError(f"models.json: {name}: {entry.sha256!r} is no sha256")
    if re.fullmatch(r"[\w.-]+\.gguf", entry.file_name) is None:
        raise InvariantError(f"models.json: {name}: {entry.file_name!r} is no plain name of a GGUF file")
    return entry


def _parse_source(fields: dict[str, Any]) -> HubSource | WheelSource:
    kinds: dict[str, type[HubSource | WheelSource]] = {"hub": HubSource, "wheels": WheelSource}
    arguments = dict(fields)
    return kinds[arguments.pop("kind")](**arguments)
