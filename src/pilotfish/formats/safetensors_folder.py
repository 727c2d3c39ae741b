"""The weights of a Hugging Face folder: one safetensors file, or the shards that an index assigns tensors to."""

from __future__ import annotations

import os
from pathlib import Path

from pilotfish.errors import FormatError, ModelNotFoundError, brief
from pilotfish.formats.safetensors import StoredTensor, read_safetensors
from pilotfish.formats.safetensors_index import INDEX_FILE, SINGLE_FILE, read_weight_map


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name.

    Where there are both, `model.safetensors` counts and the index does not, as in `transformers` 5; any other file is
    not looked at. Raises `ModelNotFoundError` where there is neither, and `FormatError` for an index that does not
    describe its shards exactly, or a shard that is missing or unsound.
    """
    if os.path.lexists(folder / SINGLE_FILE):  # one that cannot be read is no reason to take another
        return read_safetensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise ModelNotFoundError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return _read_shards(folder, read_weight_map(folder / INDEX_FILE))


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise FormatError(f"{folder} lacks the shard {brief(shard)} that {INDEX_FILE} names; fetch it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard).items():
            assigned = weight_map.get(name)
            if assigned != shard:
                where = "does not name" if assigned is None else f"assigns to {brief(assigned)}"
                raise FormatError(
                    f"{folder}: the shard {brief(shard)} holds the tensor {brief(name)}, which {INDEX_FILE} {where}; "
                    "fetch both again"
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise FormatError(
                f"{folder}: {INDEX_FILE} assigns the tensor {brief(name)} to the shard {brief(shard)}, which lacks "
                "it; fetch both again"
            )
    return tensors
