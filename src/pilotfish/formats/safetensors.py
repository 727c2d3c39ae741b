"""Reads safetensors files, trusting nothing: the header is bounded, and each tensor lies where and as it must.

Source: the format description in the README of the safetensors project. The layout is the header's length (uint64,
little endian), the header (a JSON object), then the tensors' data without holes.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.mapped_file import evict, map_file
from pilotfish.json_files import parse_object
from pilotfish.types import RawTensor, WeightType

MAX_HEADER_BYTES = 4 << 20
"""A header has some 1.5 KB for each layer. As Python objects JSON takes up to thirty times its bytes."""
_MAX_NAME_LENGTH = 256
_MAX_ELEMENTS = 1 << 56
_LENGTH_BYTES = 8

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_WEIGHT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, whatever its dtype."""

    path: Path
    name: str
    dtype: str
    """As the format names it: F32, BF16, U32, …"""
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]
    """Gives uint8 [num_bytes], a view into the memory map."""
    evict: Callable[[], None]
    """Gives back the memory that `read` took of the map; who looks at it again reads the file again."""

    def raw(self) -> RawTensor:
        """The tensor as weights. Raises `UnsupportedModelError` for a dtype that is none of F32, F16 and BF16, and
        `FormatError` for a tensor without numbers or without dimensions."""
        if self.dtype not in _WEIGHT_TYPES:
            known = ", ".join(_WEIGHT_TYPES)
            raise UnsupportedModelError(
                f"{self.path}: tensor {brief(self.name)} has the dtype {self.dtype}; supported are {known}"
            )
        if not self.shape or 0 in self.shape:
            raise FormatError(
                f"{self.path}: tensor {brief(self.name)} has the shape {brief(self.shape)}, which holds no weights"
            )
        weight_type, num_columns = _WEIGHT_TYPES[self.dtype], self.shape[-1]
        return RawTensor(
            self.name,
            weight_type,
            self.shape,
            lambda: self.read().reshape(-1, weight_type.row_bytes(num_columns)),
            self.evict,
        )


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Maps the file and gives its tensors by name.

    Raises `ModelNotFoundError` where there is no such file and `FormatError` where it is not a sound safetensors file.
    """
    data = map_file(path)
    header, data_start = _header(path, data)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _unsound(path, "__metadata__ is not an object of texts")
    places = {name: _place(path, name, value) for name, value in header.items()}
    _check_coverage(path, places, len(data) - data_start)
    tensors = {}
    for name, place in places.items():
        start, num_bytes = data_start + place.start, place.end - place.start
        tensors[name] = StoredTensor(
            path,
            name,
            place.dtype,
            place.shape,
            partial(np.frombuffer, data, np.uint8, num_bytes, start),
            partial(evict, data, start, num_bytes),
        )
    return tensors


@dataclass(frozen=True)
class _Place:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _unsound(path: Path, what: str) -> FormatError:
    return FormatError(f"{path} is not a sound safetensors file: {what}; fetch it again, or use another")


def _header(path: Path, data: mmap.mmap) -> tuple[dict[str, object], int]:
    """The header's object, and where the data begin."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    # Whatever file this is has a large number there, or an opening brace is missing.
    if len(data) <= _LENGTH_BYTES or data[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise _unsound(path, "it does not start with a length and a JSON object")
    if length > MAX_HEADER_BYTES:
        raise _unsound(path, f"its header has {length} bytes, more than the {MAX_HEADER_BYTES} that are possible")
    if data_start > len(data):
        raise FormatError(
            f"{path} is truncated: the header ends at byte {data_start}, the file at byte {len(data)}; fetch it again"
        )
    return parse_object(data[_LENGTH_BYTES:data_start], f"the header of {path}"), data_start


def _place(path: Path, name: str, value: object) -> _Place:
    """One tensor's entry in the header, each part of it checked."""
    if len(name) > _MAX_NAME_LENGTH:
        raise _unsound(path, f"a tensor's name has {len(name)} characters")

    def unsound(what: str) -> FormatError:
        return _unsound(path, f"tensor {brief(name)} {what}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise unsound("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise unsound("has a dtype that the format does not have")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise unsound("has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise unsound("has data_offsets that are not two positions")
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_ELEMENTS:
            raise unsound("has more elements than any file has room for")
    start, end = offsets
    if (end - start) * 8 != count * _BITS[dtype]:
        raise unsound(f"of the dtype {dtype} and {count} elements cannot have {end - start} bytes")
    return _Place(dtype, tuple(shape), start, end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ELEMENTS


def _check_coverage(path: Path, places: dict[str, _Place], num_data_bytes: int) -> None:
    """Tensors follow each other without overlaps and holes, from the first byte of the data to the last."""
    ordered = sorted(places.items(), key=lambda item: (item[1].start, item[1].end))
    end = ordered[-1][1].end if ordered else 0
    if end > num_data_bytes:
        raise FormatError(
            f"{path} is truncated: tensor {brief(ordered[-1][0])} ends at byte {end} of the data, which have "
            f"{num_data_bytes}; fetch it again"
        )
    for (name, place), (next_name, next_place) in itertools.pairwise(ordered):
        if place.end != next_place.start:
            what = "overlap" if place.end > next_place.start else "have a hole between them"
            raise _unsound(path, f"tensors {brief(name)} and {brief(next_name)} {what}")
    if (ordered and ordered[0][1].start) or end != num_data_bytes:
        raise _unsound(path, "there are bytes that belong to no tensor")
