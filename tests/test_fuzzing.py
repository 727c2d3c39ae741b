"""Hostile files: every one is read, or refused with one line, within bounded memory and work, and nothing ever crashes.

To run one case again: `python tests/fuzz_child.py files N N+1`, and likewise for `folders`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing_folders
import pytest
from fuzzing import case, keys, sound, write
from hostile_folders import FOLDERS
from hostile_gguf import CORPUS, SLOW
from tiny_models import ARCHITECTURES

from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
from pilotfish.tokenizer import Tokenizer

CHILD = Path(__file__).parent / "fuzz_child.py"
MAX_SECONDS = 1800
"""Of a whole run, on the slowest machine: only a hang takes longer."""
MAX_GROWTH = 320 << 20
"""Bytes of memory that a file may take beyond its size, whatever it says."""


def run_child(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("files", "folders"),
    [pytest.param(300, 200, id="short"), pytest.param(100_000, 50_000, id="long", marks=pytest.mark.full)],
)
def test_every_case_is_read_or_refused(files: int, folders: int) -> None:
    # The damage gets everywhere: no stage hides behind an earlier one.
    for kind, count, stages in (
        ("files", files, ("file", "model", "tokenizer", "sound")),
        ("folders", folders, ("model", "tokenizer", "sound")),
    ):
        ends = run_child(kind, 0, count)
        assert sum(ends.values()) == count
        assert all(ends[stage] > count / 20 for stage in stages), ends


@pytest.mark.skipif(sys.platform != "linux", reason="limits and reads a process's memory as Linux does")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in [*CORPUS, *FOLDERS] if name not in SLOW], id="quick"),
        pytest.param(SLOW, id="slow", marks=pytest.mark.full),
    ],
)
def test_the_kept_corpus(names: list[str]) -> None:
    found = run_child("corpus", *names)
    for name in names:
        expected = (CORPUS | FOLDERS)[name]
        message = f"{name} ({expected.reason}): {found[name]['message']}"
        assert found[name]["stage"] == expected.stage, message
        assert found[name]["growth"] < MAX_GROWTH, message


@pytest.mark.parametrize("case", [case, fuzzing_folders.case])
def test_a_case_is_always_the_same_bytes(case: Callable[[int], object]) -> None:
    numbers = range(50)
    once = [case(number) for number in numbers]
    assert [case(number) for number in reversed(numbers)] == once[::-1]
    assert len({repr(content) for content in once}) > 45


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_fuzzer_knows_every_key_that_is_read(tmp_path: Path, architecture: str) -> None:
    class Recorder(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            seen.add(key)
            return super().get(key, default)

    seen: set[str] = set()
    path = tmp_path / "sound.gguf"
    path.write_bytes(write(sound(architecture)).content)
    file = GGUFFile.open(path)
    file.metadata = Recorder(file.metadata)
    read_model(file)
    Tokenizer.from_gguf_metadata(file.metadata)
    assert len(seen) > 25
    assert seen <= set(keys(architecture))
