"""Reads an artifact back, without taking its word for what follows from its samples."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pilotfish.bench.artifact import RESULT_FILE, Artifact
from pilotfish.bench.statistics import conclude
from pilotfish.errors import ArtifactError


def load_artifact(folder: Path) -> Artifact:
    """The artifact in a folder, or in a file; ratios and verdicts are computed anew from its samples.

    Raises `ArtifactError` where there is none that can be understood.
    """
    path = folder / RESULT_FILE if folder.is_dir() else folder
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror}; give a folder that `pilotfish bench` wrote"
        ) from None
    try:
        found = Artifact.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(f"{path} is not an artifact of this version: {where}: {first['msg']}") from None
    conclusions = conclude(found.arms, found.prompts, found.settings, len(found.order), found.samples, found.mismatches)
    return found.model_copy(update=conclusions)
