"""What a measurement ran on: the machine, the software, and the source it came from."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pilotfish
from pilotfish.bench.artifact import Host

_PACKAGES = ("torch", "numpy", "tokenizers")


def describe_host(instruction_set: str, num_cores: int, num_threads: int) -> Host:
    """This machine. The kernels' own choices are given, since only they know them."""
    cpu, memory_bytes = _cpu_name(), _memory_bytes()
    # Virtual machines made from one image share an id, and some systems have none: what they run on is part of it.
    identity = f"pilotfish-bench {_machine_id()} {cpu} {os.cpu_count()} {memory_bytes}"
    return Host(
        machine_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        cpu=cpu,
        instruction_set=instruction_set,
        num_logical_cpus=os.cpu_count() or 1,
        num_cores=num_cores,
        num_threads=num_threads,
        memory_bytes=memory_bytes,
        operating_system=platform.platform(),
        versions={
            "pilotfish": pilotfish.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        commit=_commit(Path(pilotfish.__file__).parent),
    )


def load_average() -> float:
    """Processes that ran or wanted to, on average over the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def reset_peak_memory() -> None:
    """Lets `peak_memory_bytes` count from now on, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """The most memory that was resident in this process."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * next(int(line.split()[1]) for line in _lines(status) if line.startswith("VmHWM"))
    import resource  # not on Windows

    # Not where there is /proc: a child begins with its parent's figure there. Elsewhere the unit is the byte.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cpu_name() -> str:
    fields = (line.partition(":") for line in _lines(Path("/proc/cpuinfo")))
    names = (value.strip() for key, _, value in fields if key.strip() == "model name")
    return next(names, platform.processor() or platform.machine())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _machine_id() -> str:
    return next(iter(_lines(Path("/etc/machine-id"))), "")


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()


def _commit(folder: Path) -> str | None:
    """The last commit that changed `folder`; other files of the repository may change during a measurement."""

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments, "--", "."]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%H")  # empty where git does not track the folder
    if not commit:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
