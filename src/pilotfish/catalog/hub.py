"""Fetches a model file from the hub into the hub library's own cache, with that library's settings and tokens."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.catalog.entries import HubSource, is_sha256
from pilotfish.catalog.folder import check_room, storage_error
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError, hash_into, without_addresses
from pilotfish.errors import FetchError

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

_ANSWER_SECONDS = 3.0
_ELSEWHERE = "set HF_HUB_CACHE to another folder"


def cached(source: HubSource) -> Path | None:
    """The source's file in the hub library's cache, if it is there; no network."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repository, source.file_name)
    return Path(path) if isinstance(path, str) else None


def fetch(source: HubSource, progress: Progress) -> Path:
    """Downloads the file and checks it against the size and sha256 the hub states.

    `SourceUnavailableError` where the hub does not answer or does not give the file, `DiskFullError` without room,
    `FetchError` where the file is not the one the hub described (nothing is kept then).
    """
    with _quiet():
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

        # The base of its own errors: the library has changed the package it takes this from, twice.
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        folder = Path(constants.HF_HUB_CACHE)
        url = hf_hub_url(source.repository, source.file_name)
        size = 0
        progress(PullEvent(0, 0, f"asking {source.label}"))
        try:
            # Asked first because it fails at once: the download itself retries for long, and says so loudly.
            stated = get_hf_file_metadata(url, timeout=_ANSWER_SECONDS)
            if stated.size is None or stated.etag is None or not is_sha256(stated.etag):
                raise SourceUnavailableError("states no size or no sha256 to check the file against")
            size = stated.size
            check_room(folder, size, _ELSEWHERE)

            def report(done: int) -> None:
                progress(PullEvent(min(done, size), size, source.label))

            path = Path(hf_hub_download(source.repository, source.file_name, tqdm_class=_bar_class(report)))
        # Beside HTTP and OS errors: RuntimeError from its transfer library, ImportError for a proxy kind that needs
        # a package which is not installed.
        except (HTTPError, OSError, RuntimeError, ImportError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise storage_error(error, folder, size, _ELSEWHERE) from error
            raise SourceUnavailableError(f"{type(error).__name__}: {without_addresses(str(error))}") from error
    digest = hashlib.sha256()
    hash_into(digest, path, lambda done: progress(PullEvent(min(done, size), size, "verifying")))
    if path.stat().st_size != size or digest.hexdigest() != stated.etag:
        _remove(path)
        raise FetchError(
            f"{source.label}: the downloaded file has sha256 {digest.hexdigest()}, and the hub states {stated.etag}; "
            "it was not kept: try again"
        )
    progress(PullEvent(size, size, "complete"))
    return path


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


def _bar_class(report: Callable[[int], None]) -> type[tqdm]:
    """A progress bar for the hub library that draws nothing and reports the bytes done.

    A transfer may show two bars, bytes received and bytes written: the one ahead is reported.
    """
    from huggingface_hub.utils.tqdm import tqdm

    furthest = 0

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            self.n += n or 0
            if self.n > furthest:
                furthest = int(self.n)
                report(furthest)

    return ReportingBar


def _remove(path: Path) -> None:
    """Removes a cached file with everything its links lead to, or the cache would offer it as present."""
    while path.is_symlink():
        link, path = path, path.parent / os.readlink(path)
        link.unlink()
    path.unlink()
