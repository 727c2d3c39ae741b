"""How many cores this process may use: what the number of the kernels' threads follows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def num_usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may use, at most what its CPU quota pays for (a part of a core is one).

    Logical cores where the system does not say which belong together: two threads on one core share what the kernels
    are bound by. The kernel's files are looked for under `root`.
    """
    # With more threads than the quota pays for, all of them would be stopped for most of every period.
    return math.ceil(min(_num_physical_cores(root), cpu_quota(root)))


def _num_physical_cores(root: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    folder = root / "sys/devices/system/cpu"
    try:
        return len({(folder / f"cpu{cpu}/topology/core_cpus_list").read_text() for cpu in cpus})
    except OSError:
        return len(cpus)


def cpu_quota(root: Path = ROOT) -> float:
    """The CPUs' worth of time that this process's control groups allow its threads together; inf without a limit."""
    quotas = [math.inf]
    for folder in _control_groups(root):
        with suppress(OSError, ValueError):  # version 2; "max" is no number and no limit
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with suppress(OSError, ValueError):  # version 1; -1 is no limit
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups for CPU time and of all that these lie in.

    In a container the groups' names may be the host's, while the folder that is mounted there is the container's own:
    then only that one exists.
    """
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = mounted / "cpu" if controllers else mounted
        yield folder
        for part in Path(name).parts[1:]:
            folder /= part
            yield folder
