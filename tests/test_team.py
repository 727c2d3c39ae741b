"""The kernels' threads: how many there are, who calls them, and a fork change no bit; signals are none of theirs."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_native import layer, matrix, normal

from pilotfish.types import WeightType

WEIGHT = matrix(WeightType.Q4_K, 1040, 512)  # large enough for several threads even with one row
ROWS = [normal(rows, 512, seed=rows) for rows in (1, 2, 5, 70)]


def test_callers_take_turns_with_teams_of_any_size() -> None:
    expected = [layer(WEIGHT, threads=1)(x) for x in ROWS]
    layers = [layer(WEIGHT, threads=threads) for threads in (2, 3, 8, 5)]

    def work(first: int) -> bool:
        return all(
            torch.equal(layers[(first + i) % 4](x), wanted)
            for i in range(50)
            for x, wanted in zip(ROWS, expected, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_team import ROWS, WEIGHT, layer
product = layer(WEIGHT, threads=3)
expected = [product(x) for x in ROWS]
for generation in range(3):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    signal.alarm(60)  # a child that waits for threads it does not have ends
    for x, wanted in zip(ROWS, expected):
        assert (product(x).numpy() == wanted.numpy()).all()  # torch's own threads do not survive
os._exit(7)
"""


def test_a_fork_computes_on_with_threads_of_its_own() -> None:
    run = [sys.executable, "-c", CHILD, str(Path(__file__).parent)]
    outcome = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 7, outcome.stderr


def blocked_signals() -> list[int]:
    """The signals that each thread of this process blocks, as a bit mask."""
    statuses = [task.joinpath("status").read_text() for task in Path("/proc/self/task").iterdir()]
    return [int(status.split("SigBlk:")[1].split()[0], 16) for status in statuses]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are looked at in /proc")
def test_signals_are_left_to_the_callers_threads() -> None:
    own = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    layer(WEIGHT, threads=12)(ROWS[0])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == own
    interrupt = 1 << 1  # SIGINT is 2
    blocked = [mask for mask in blocked_signals() if mask & interrupt]
    assert len(blocked) >= 11
