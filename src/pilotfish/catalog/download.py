"""Downloads files of one repository of the hub into the hub library's own cache, with its settings and tokens."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.catalog.entries import HubSource
from pilotfish.catalog.folder import check_room, storage_error
from pilotfish.catalog.layout import is_plain
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError, hash_into, without_addresses
from pilotfish.errors import FetchError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling
    from huggingface_hub.utils.tqdm import tqdm

_ANSWER_SECONDS = 3.0
_ELSEWHERE = "set HF_HUB_CACHE to another folder"
_TOKEN = "a token is needed (set HF_TOKEN, or run `hf auth login`)"


class HubSilentError(SourceUnavailableError):
    """The hub does not answer, or must not be asked."""


class Download:
    """The files of one repository: what the hub states of each (`stated`, by name), and fetching them.

    Every method raises `SourceUnavailableError` where the hub does not give what is asked for.
    """

    def __init__(self, source: HubSource, progress: Progress) -> None:
        from huggingface_hub import HfApi, constants

        self._source = source
        self._progress = progress
        self._folder = Path(constants.HF_HUB_CACHE)
        with self._explained(0):
            # Asked first because it fails at once: a download itself retries for long, and says so loudly.
            info = HfApi().model_info(source.repository, files_metadata=True, timeout=_ANSWER_SECONDS)
        self.stated = {file.rfilename: file for file in info.siblings or [] if is_plain(file.rfilename)}

    def get(self, names: Sequence[str]) -> Path:
        """The cache's folder of the repository's newest commit, once these files are in it and checked.

        `DiskFullError` without room; `FetchError` where a file is not the one the hub described, which is not kept.
        """
        files = [_Stated.of(self.stated[name]) for name in names]
        total = sum(file.size for file in files)
        check_room(self._folder, total - self._num_bytes_here(files), _ELSEWHERE)
        snapshots = {
            self._download(file, before, total, f"file {place} of {len(files)}")
            for place, (file, before) in enumerate(_with_bytes_before(files), start=1)
        }
        if len(snapshots) != 1:
            raise FetchError(f"{self._source.label} changed while it was fetched: try again")
        snapshot = snapshots.pop()
        for file, before in _with_bytes_before(files):
            self._verify(file, snapshot / file.name, before, total)
        return snapshot

    def _num_bytes_here(self, files: Sequence[_Stated]) -> int:
        from huggingface_hub import try_to_load_from_cache

        here = ((file, try_to_load_from_cache(self._source.repository, file.name)) for file in files)
        return sum(file.size for file, path in here if isinstance(path, str))

    def _download(self, file: _Stated, before: int, total: int, status: str) -> Path:
        from huggingface_hub import hf_hub_download

        def report(done: int) -> None:
            self._progress(PullEvent(before + min(done, file.size), total, status))

        with self._explained(total):
            path = hf_hub_download(self._source.repository, file.name, tqdm_class=_bar_class(report))
        return Path(path).parents[file.name.count("/")]

    def _verify(self, file: _Stated, path: Path, before: int, total: int) -> None:
        digest = file.new_digest()
        hash_into(digest, path, lambda done: self._progress(PullEvent(min(before + done, total), total, "verifying")))
        if path.stat().st_size != file.size or digest.hexdigest() != file.checksum:
            _remove(path)
            raise FetchError(
                f"{self._source.label}: {file.name} came with {digest.name} {digest.hexdigest()}, and the hub states "
                f"{file.checksum}; it was not kept: try again"
            )

    @contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        """Turns what the hub library raises into a reason for a person; a whole pull takes `needed` bytes."""
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError as error:
            raise SourceUnavailableError(f"is gated: accept its terms on the hub, and {_TOKEN}") from error
        except errors.RepositoryNotFoundError as error:
            raise SourceUnavailableError(f"does not exist, or is private: then {_TOKEN}") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise SourceUnavailableError(
                    f"refuses access (status {status}): check its name; if it is private or gated, {_TOKEN}"
                ) from error
            kind = HubSilentError if status >= 500 or status == 429 else SourceUnavailableError
            raise kind(_described(error)) from error
        except errors.OfflineModeIsEnabled as error:
            raise HubSilentError("offline mode is on (HF_HUB_OFFLINE)") from error
        # Beside HTTP and OS errors: RuntimeError from its transfer library, ImportError for a proxy kind that needs
        # a package which is not installed, the others for an answer that is not the hub's. HTTPError is the base of
        # its own errors: the library has changed the package it takes this from, twice.
        except (
            errors.HTTPError,  # type: ignore[attr-defined]
            *(OSError, RuntimeError, ImportError, ValueError, TypeError, LookupError),
        ) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise storage_error(error, self._folder, needed, _ELSEWHERE) from error
            raise HubSilentError(_described(error)) from error


@dataclass(frozen=True)
class _Stated:
    """What the hub states of a file: `checksum` is its sha256 where it is large, else git's blob hash, in hex."""

    name: str
    size: int
    checksum: str
    is_large: bool

    @classmethod
    def of(cls, file: RepoSibling) -> _Stated:
        size, checksum = (file.size, file.blob_id) if file.lfs is None else (file.lfs.size, file.lfs.sha256)
        length = 40 if file.lfs is None else 64
        if not isinstance(size, int) or size < 0 or re.fullmatch(rf"[0-9a-f]{{{length}}}", checksum or "") is None:
            raise SourceUnavailableError(f"states no size or no checksum to check {file.rfilename} against")
        return cls(file.rfilename, size, checksum or "", file.lfs is not None)

    def new_digest(self) -> hashlib._Hash:
        """What to feed the file's bytes to, to get `checksum`."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def _with_bytes_before(files: Sequence[_Stated]) -> Iterator[tuple[_Stated, int]]:
    """Each file with the bytes of those before it."""
    return zip(files, accumulate((file.size for file in files), initial=0), strict=False)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {without_addresses(str(error))}"


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
