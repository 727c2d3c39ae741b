"""What a loaded model keeps in memory of its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ARCHITECTURES, tiny_config, write_tiny_model

import pilotfish
from pilotfish import SamplingParams
from pilotfish.formats.gguf import GGUFFile
from pilotfish.ops.native_layers import PackedLinear
from pilotfish.ops.reference import ReferenceBackend

SIZES = {"num_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 16, "num_kv_heads": 8}


def resident_bytes(path: Path) -> int:
    """Bytes of this process's mappings of `path` that are in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            counts = line.endswith(str(path))
        elif key == "Rss:" and counts:
            total += int(values[0]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_weights_leave_the_map_matrix_by_matrix(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", config=tiny_config(architecture, **SIZES), output="untied")
    size = path.stat().st_size

    file = GGUFFile.open(path)
    assert sum(int(file.tensor(name).read().sum()) for name in file.tensor_names) > 0
    assert resident_bytes(path) > 0.9 * size  # so the measure can fail
    for name in file.tensor_names:
        file.tensor(name).evict()
    assert resident_bytes(path) < 0.1 * size
    del file

    seen, honest = [], PackedLinear.pack

    def pack(*arguments: Any) -> None:
        honest(*arguments)
        seen.append(resident_bytes(path))

    monkeypatch.setattr(PackedLinear, "pack", pack)
    model, tokenizer = pilotfish.load(path)
    assert len(seen) == 1 + 4 * SIZES["num_layers"]
    assert max(*seen, resident_bytes(path)) < 0.1 * size

    sampling = SamplingParams(max_tokens=8)
    reference, _ = pilotfish.load(path, backend=ReferenceBackend())
    expected = pilotfish.generate(reference, tokenizer, "the end", sampling=sampling)
    assert pilotfish.generate(model, tokenizer, "the end", sampling=sampling).token_ids == expected.token_ids


def test_an_evicted_tensor_is_read_again(tmp_path: Path) -> None:
    file = GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf"))
    for name in file.tensor_names:
        tensor = file.tensor(name)
        before = tensor.read().copy()
        tensor.evict()
        assert (tensor.read() == before).all()
        assert before.any()
