"""Which of a folder's safetensors files holds which tensor, as its index says; needs no numpy."""

from __future__ import annotations

import re
from pathlib import Path

from pilotfish.errors import FormatError, brief
from pilotfish.json_files import read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 4 << 20
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.safetensors")


def read_weight_map(index: Path) -> dict[str, str]:
    """File name by tensor name. Raises as `read_object`, and `FormatError` where the names are not those of files
    beside the index."""
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: 'weight_map' must be an object of tensor and file names; fetch it again")
    for name, shard in weight_map.items():
        # Only a file beside the index: hostile names lead elsewhere.
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise FormatError(
                f"{index}: the shard of tensor {brief(name)} must be the plain name of a safetensors file, "
                f"got {brief(shard)}"
            )
    return weight_map
