"""Fresh processes for `pilotfish.bench.worker` and its like, which die with the measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from pydantic import ValidationError

from pilotfish.bench.worker import Event, Task
from pilotfish.errors import BenchmarkError

# Not -m, which lets modules in the current folder come before all others.
_START = "import sys; sys.path[:] = filter(None, sys.path); from pilotfish.bench.worker import main; main()"
OWN_WORKER = (sys.executable, "-c", _START)


@contextmanager
def fresh_process(task: Task, seed: int, command: Sequence[str] = OWN_WORKER) -> Iterator[Iterator[Event]]:
    """The events of a process of its own that runs `task`, which is ended at the latest when the context is left.

    `command` starts what reads the task, one line, from stdin and writes events to stdout; where stdin ends, so must
    it, since then whoever started it is gone. The iterator raises `BenchmarkError` where the process fails or says
    something else.
    """
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C is for the measurement, which then ends the process
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            try:
                process.stdin.write(task.model_dump_json() + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # why, its status and what it printed will say
            yield _events(process, process.stdout, errors, task)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):  # what it did not read
                process.stdin.close()


def _events(process: subprocess.Popen[str], lines: Iterator[str], errors: IO[bytes], task: Task) -> Iterator[Event]:
    for line in lines:
        try:
            event = Event.model_validate_json(line)
        except ValidationError:
            raise BenchmarkError(f"the process of {task.arm} said {line[:200]!r}") from None
        if event.kind == "error":
            raise BenchmarkError(event.text if task.purpose == "check" else f"{task.arm}: {event.text}")
        yield event
    status = process.wait()
    if status < 0:
        raise BenchmarkError(
            f"the process of {task.arm} was killed by signal {-status}; if nobody did that, memory ran out"
        )
    if status != 0:
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
        raise BenchmarkError(f"the process of {task.arm} ended with status {status}: {said[-1] if said else 'no word'}")
