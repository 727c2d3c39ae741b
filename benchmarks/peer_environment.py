"""Where a peer lives: an environment of its own with what it needs, and the models in the form that it reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish.errors import PilotfishError

# Apart from our own scripts: transformers would take kernels.py for a package that it knows by that name.
WORKERS = Path(__file__).with_name("peer_workers")
_MARK = "done.json"


@dataclass(frozen=True)
class Peer:
    """Another system: how it is installed and run."""

    name: str
    package: str
    """Whose version is the system's."""
    requirements: Sequence[str]
    script: str
    """In the folder of workers; runs in the peer's environment."""
    proposal_length: int
    settings: Mapping[str, str]
    """How it runs, in words."""
    pip_options: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment in which it is installed."""


@dataclass(frozen=True)
class Installed:
    """A peer that can be run: `command` starts it, `models_folder` has what it made of the model files."""

    peer: Peer
    version: str
    command: Sequence[str]
    models_folder: Path


class PeerUnavailableError(PilotfishError):
    """A peer cannot be installed, or cannot read the models."""


Execute = Callable[[Sequence[str], Mapping[str, str], Path], str]
"""Runs a command with more environment variables and a file for all it says; gives what it printed to stdout."""


def execute(command: Sequence[str], variables: Mapping[str, str], log: Path) -> str:
    """Raises `PeerUnavailableError` with the last line that the command wrote to stderr."""
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, errors="replace")
    with log.open("a", encoding="utf-8") as file:
        print(*command, done.stdout, done.stderr, sep="\n", file=file)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no word")
        raise PeerUnavailableError(f"{reason} (status {done.returncode}; all of it is in {log})")
    return done.stdout


def install(
    peer: Peer,
    folder: Path,
    target: Path,
    draft: Path,
    note: Callable[[str], None],
    run: Execute = execute,
) -> Installed:
    """Installs a peer into `folder` and lets it prepare the models; what an earlier run finished is left as it is.

    Raises `PeerUnavailableError`.
    """
    folder = folder.resolve() / peer.name.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "install.log"
    environment = folder / "venv"
    python = environment / "bin/python"
    wanted = [*peer.requirements, *peer.pip_options, json.dumps(dict(peer.variables), sort_keys=True)]
    if _finished(environment) != wanted:
        note(f"installing {peer.name} into {environment}, once")
        shutil.rmtree(environment, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(environment)], {}, log)
        command = [str(python), "-m", "pip", "install", "--quiet", *peer.pip_options, *peer.requirements]
        run(command, peer.variables, log)
        _finish(environment, wanted)
    version = run([str(python), "-c", f"import importlib.metadata as m; print(m.version({peer.package!r}))"], {}, log)
    script = str(WORKERS / peer.script)
    sources = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in (target, draft)]
    models = folder / f"models-{hashlib.sha256(' '.join(sources).encode()).hexdigest()[:12]}"
    made_by = [*sources, version.strip(), Path(script).read_text("utf-8")]
    if _finished(models) != made_by:
        note(f"preparing the models for {peer.name}, once")
        shutil.rmtree(models, ignore_errors=True)
        models.mkdir()
        run([str(python), script, "prepare", str(target), str(draft), str(models)], {}, log)
        _finish(models, made_by)
    return Installed(peer, version.strip(), [str(python), script], models)


def _finished(folder: Path) -> list[str] | None:
    try:
        return json.loads((folder / _MARK).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _finish(folder: Path, made_of: list[str]) -> None:
    (folder / _MARK).write_text(json.dumps(made_of), "utf-8")
