"""How many threads are the default: physical cores within the affinity mask, and within a container's CPU quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pilotfish.ops.cores import cpu_quota, num_usable_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no way to choose CPUs here")

V2, V1 = "0::/\n", "5:memory:/\n4:cpuset:/\n3:cpu,cpuacct:/\n0::/\n"
V1_NONE = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}


def machine(root: Path, groups: str = "", files: dict[str, str] | None = None, siblings: int = 1) -> Path:
    """A file tree of 8 logical CPUs, `siblings` to a core, with files of control groups."""
    for cpu in range(8):
        first = cpu - cpu % siblings
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{first}-{first + siblings - 1}\n")
    write(root / "proc/self/cgroup", groups)
    for name, text in (files or {}).items():
        write(root / "sys/fs/cgroup" / name, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine_has_some() -> None:
    assert 1 <= num_usable_cores() <= len(os.sched_getaffinity(0))


def test_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, siblings=2)
    for cpus, count in (({0, 1, 2, 3}, 2), ({1, 2, 3}, 2), ({5}, 1), (set(range(8)), 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus)
        assert num_usable_cores(root) == count
        assert num_usable_cores(root / "nothing here") == len(cpus)


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("", {}, math.inf),
        (V2, {}, math.inf),
        (V2, {"cpu.max": "max 100000\n"}, math.inf),
        (V2, {"cpu.max": "200000 100000\n"}, 2),
        (V2, {"cpu.max": "125000 50000\n"}, 2.5),
        (V2, {"cpu.max": "10000 100000\n"}, 0.1),
        (V2, {"cpu.max": ""}, math.inf),
        (V1, V1_NONE, math.inf),
        (V1, V1_NONE | {"cpu/cpu.cfs_quota_us": "300000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "300000\n"}, math.inf),
        # a service on the host: the tightest of its own group and those around it
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "200000 100000"}, 2),
        ("0::/a.slice/b.service\n", {"a.slice/cpu.max": "1 1", "a.slice/b.service/cpu.max": "2 1"}, 1),
        ("0::/a.slice/b.service\n", {"a.slice/c.service/cpu.max": "1 1"}, math.inf),
        ("3:cpu,cpuacct:/docker/7\n", {f"cpu/docker/7/{name[4:]}": "6" for name in V1_NONE}, 1),
        # a container that is told the host's name of its group, but sees only its own folder
        ("3:cpu,cpuacct:/docker/7\n", V1_NONE | {"cpu/cpu.cfs_quota_us": "150000\n"}, 1.5),
        ("3:cpuset:/x\n", {"cpu/x/cpu.cfs_quota_us": "1\n", "cpu/x/cpu.cfs_period_us": "1\n"}, math.inf),
    ],
)
def test_threads_stay_within_the_cpu_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], quota: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = machine(tmp_path, groups, files)
    assert cpu_quota(root) == quota
    assert num_usable_cores(root) == {2.5: 3, 1.5: 2, 0.1: 1, math.inf: 8}.get(quota, quota)


def test_a_quota_above_the_cores_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert num_usable_cores(machine(tmp_path, V2, {"cpu.max": "600000 100000"}, siblings=2)) == 4
