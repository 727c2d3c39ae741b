"""Runs hostile files through `pilotfish.load` in a process of its own, which a crash or a hang may end.

`fuzz_child.py files START STOP` and `fuzz_child.py folders START STOP` run cases of the fuzzers, `fuzz_child.py corpus
NAME…` models of the kept corpus (all, without a name), each in a fork with a limit of memory.

Prints one JSON object: how many files came to which end, or what each did.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import fuzzing
import fuzzing_folders
import torch
from hostile_folders import FOLDERS
from hostile_gguf import CORPUS

import pilotfish
from pilotfish import errors
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
from pilotfish.formats.hf_model import read_folder
from pilotfish.ops.native import choose_backend
from pilotfish.tokenizer import Tokenizer

HANG_SECONDS = 120
"""Far more than any file takes: a hang ends the process, with a traceback."""
WATCHED = 25
"""Each so-manieth case is watched for memory and work, which makes it ten times slower."""
MAX_LINES = 30_000
MAX_LINES_PER_BYTE = 2
MAX_TRACED_BYTES = 1 << 18
MAX_TRACED_BYTES_PER_BYTE = 4
MAX_ADDRESSES = 1 << 30
"""Addresses beyond the file's: an absurd allocation must fail, and not be granted because nobody touches it."""
_OF_A_FILE = (errors.FormatError, errors.UnsupportedModelError, errors.TokenizerError, errors.ModelNotFoundError)
_OF_A_FORWARD = (errors.PromptError, errors.NonFiniteLogitsError)

BACKEND = choose_backend(1)


def gguf_stages(path: Path) -> Iterator[str]:
    """Does to a file what `load` does, and then a step; the name of each stage comes before it."""
    yield "file"
    file = GGUFFile.open(path)
    yield "model"
    read_model(file)
    yield "tokenizer"
    Tokenizer.from_gguf_metadata(file.metadata)
    del file
    yield from _load_and_step(path)


def folder_stages(folder: Path) -> Iterator[str]:
    """The same for a folder."""
    yield "model"
    read_folder(folder)
    yield "tokenizer"
    Tokenizer.from_folder(folder)
    yield from _load_and_step(folder)


def _load_and_step(path: Path) -> Iterator[str]:
    yield "load"
    model, tokenizer = pilotfish.load(path, backend=BACKEND)
    yield "forward"
    pilotfish.generate(model, tokenizer, "the end", sampling=pilotfish.SamplingParams(max_tokens=2))
    yield "sound"


def outcome(stages: Iterator[str]) -> tuple[str, str]:
    """The stage at which a file is refused, or `sound`, and the message. Anything but one line of ours is a failure."""
    stage = ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            for stage in stages:  # noqa: B007
                pass
        except errors.PilotfishError as error:
            refusal = error
        else:
            return stage, ""
    allowed = _OF_A_FILE + (_OF_A_FORWARD if stage == "forward" else ())
    assert type(refusal) in allowed, f"{stage}: {refusal!r}"
    message = str(refusal)
    assert 10 < len(message) < 500, f"{stage}: {len(message)} characters: {message[:200]!r}"
    assert message.isprintable(), f"{stage}: {message!r}"
    return stage, message


def watched(run: Callable[[], Any], num_bytes: int) -> Any:
    """Runs with a bound on Python's allocations and on the lines of Python that are run."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    tracemalloc.start()
    sys.settrace(count)
    try:
        return run()
    finally:
        sys.settrace(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_TRACED_BYTES + MAX_TRACED_BYTES_PER_BYTE * num_bytes, f"{peak} bytes for {num_bytes}"
        assert num_lines < MAX_LINES + MAX_LINES_PER_BYTE * num_bytes, f"{num_lines} lines for {num_bytes} bytes"


def write(path: Path, files: dict[str, bytes] | bytes, zeros: int = 0) -> int:
    """A file, or a folder of files, in the place of what was there; gives the bytes written."""
    if path.is_dir():
        shutil.rmtree(path)
    if isinstance(files, bytes):
        path.write_bytes(files)
        os.truncate(path, len(files) + zeros)
        return len(files)
    path.unlink(missing_ok=True)
    path.mkdir()
    return sum((path / name).write_bytes(content) for name, content in files.items())


def run_cases(path: Path, kind: str, numbers: range) -> dict[str, int]:
    case, stages = CASES[kind]
    ends = Counter[str]()
    for number in numbers:
        os.write(2, b"%d\n" % number)  # the last one is that of a crash
        if number % 100 == 0:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        size = write(path, case(number))
        run = partial(outcome, stages(path))
        # Not the very first, which imports.
        ends[(watched(run, size) if number % WATCHED == 1 else run())[0]] += 1
    return ends


CASES: dict[str, tuple[Callable[[int], Any], Callable[[Path], Iterator[str]]]] = {
    "files": (fuzzing.case, gguf_stages),
    "folders": (fuzzing_folders.case, folder_stages),
}


def run_bounded(path: Path, name: str) -> dict[str, Any]:
    """One model of the corpus in a fork, which has no more memory than it may take."""
    if name in FOLDERS:
        size, stages = write(path, FOLDERS[name].make()), folder_stages
    else:
        size, stages = write(path, CORPUS[name].content(), CORPUS[name].zeros) + CORPUS[name].zeros, gguf_stages
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            before = _status("VmRSS")
            limit = _status("VmSize") + size + MAX_ADDRESSES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            stage, message = outcome(stages(path))
            found = {"stage": stage, "message": message, "growth": _status("VmHWM") - before}
        except BaseException:  # noqa: BLE001
            found = {"stage": "failed", "message": traceback.format_exc(), "growth": 0}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    died = {"stage": "failed", "message": f"the process ended with the status {status}", "growth": 0}
    found: dict[str, Any] = json.loads(answer) if answer else died
    return found


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    memory = Path("/dev/shm")  # a file for each case: on a disk they would take longer than the reading
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "case"
        if arguments[0] in CASES:
            result: dict[str, Any] = run_cases(path, arguments[0], range(*map(int, arguments[1:])))
        else:
            result = {name: run_bounded(path, name) for name in arguments[1:] or [*CORPUS, *FOLDERS]}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
