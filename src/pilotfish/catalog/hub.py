"""The models of the hub's repositories: in the hub library's own cache, or fetched into it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotfish.catalog.download import Download, HubSilentError
from pilotfish.catalog.entries import HubSource
from pilotfish.catalog.layout import DEFAULT_QUANTISATION, choose_gguf, folder_files, is_folder_model
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError
from pilotfish.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from pilotfish.formats.safetensors_index import INDEX_FILE


def cached(source: HubSource) -> Path | None:
    """The source's model in the hub library's cache, if all of it is there; no network.

    Optional files count as absent where they are not there. Without a selector a GGUF file must be the Q4_K_M: the
    repository may have others, and a name must not mean what happens to be here.
    """
    return _look_up(source, source.selector or DEFAULT_QUANTISATION)[0]


def fetch(source: HubSource, progress: Progress) -> Path:
    """Downloads the source's GGUF file, or the files of its folder of safetensors, and checks each against the size
    and the checksum the hub states: the sha256 of a large file, git's blob hash of a small one.

    `SourceUnavailableError` where the hub does not answer or does not give the files, `DiskFullError` without room,
    `FetchError` where a file is not the one the hub described (it is not kept then), `FormatError` for a bad index;
    `ModelNotFoundError` and `UnsupportedModelError` as of `choose_gguf`.
    """
    with _quiet():
        progress(PullEvent(0, 0, f"asking {source.label}"))
        try:
            download = Download(source, progress)
        except HubSilentError as silence:
            path, missing = _look_up(source, source.selector)
            if path is not None:
                return path
            raise SourceUnavailableError(f"{silence}; its cache lacks {missing}") from silence
        stated = download.stated
        if source.selector is None and is_folder_model(stated):
            files, lacking = folder_files(stated, lambda: download.get([INDEX_FILE]) / INDEX_FILE)
            if lacking:
                raise SourceUnavailableError(f"has no {', '.join(lacking)}")
            return download.get(files)
        name = choose_gguf(stated, source.selector, source.label)
        return download.get([name]) / name


def _look_up(source: HubSource, selector: str | None) -> tuple[Path | None, str]:
    """The source's model in the cache, a GGUF file being chosen by `selector`; else None and what the cache lacks."""
    snapshot = _snapshot(source)
    names = set() if snapshot is None else _names_below(snapshot)
    if snapshot is None or not names:
        return None, source.selector or "all of it"
    if source.selector is None and (is_folder_model(names) or not any(name.endswith(".gguf") for name in names)):
        try:
            missing = folder_files(names, lambda: snapshot / INDEX_FILE)[1]
        except FormatError:
            missing = [f"a sound {INDEX_FILE}"]
        return None if missing else snapshot, ", ".join(missing)
    try:
        return snapshot / choose_gguf(names, selector, source.label), ""
    except (ModelNotFoundError, UnsupportedModelError):
        return None, selector or DEFAULT_QUANTISATION


def _snapshot(source: HubSource) -> Path | None:
    """The folder in the hub library's cache with the files of the commit that was the repository's newest when last
    asked. Its layout: "Understand caching" in the library's documentation."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.repository, repo_type="model")
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / commit


def _names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the hub library from printing: what matters is in its exceptions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from huggingface_hub.utils.logging import get_verbosity, set_verbosity

        verbosity = get_verbosity()
        set_verbosity(logging.CRITICAL)
        try:
            yield
        finally:
            set_verbosity(verbosity)
