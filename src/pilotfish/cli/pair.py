"""Which models a command runs, and fetching them."""

from __future__ import annotations

from pilotfish import catalog
from pilotfish.cli.progress import PullProgress
from pilotfish.errors import OptionError


def choose_pair(model: str | None, draft_model: str | None) -> tuple[str, str | None]:
    """Target and draft model: the default pair where none is named, no draft model beside a target named alone."""
    for flag, name in (("--model", model), ("--draft-model", draft_model)):
        if name == "":
            raise OptionError(f"{flag} is empty: give a catalog name, a path, or a hub repository ORG/NAME")
    default_target, default_draft = catalog.default_pair()
    target = default_target if model is None else model
    draft = default_draft if model is None and draft_model is None else draft_model
    return target, draft


def fetch(name: str) -> None:
    """Fetches a model of the catalog or the hub where it is not on this machine; a path is left alone."""
    if catalog.is_name(name):
        with PullProgress(name) as progress:
            catalog.pull(name, progress)
