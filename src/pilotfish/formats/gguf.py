"""Reads GGUF files (versions 2 and 3, little endian), trusting nothing: every length is bounded before it is used.

Source: the format description `docs/gguf.md` of the ggml project. The layout is a header (magic, version, counts),
key/value metadata, tensor infos, padding to `general.alignment`, then the tensors' data.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.mapped_file import evict, map_file
from pilotfish.types import RawTensor, WeightType

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MIN_KEY_VALUE_BYTES = 8 + 4 + 1  # an empty key, a type, a one-byte value
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension
MAX_HEADER_BYTES = 32 << 20
"""Twice what the largest vocabularies take."""
_MAX_ENTRIES = 1 << 15  # keys, and tensors; models have a few hundred
_MAX_ELEMENTS = 1 << 21
"""Of all arrays. 262,144 tokens with scores and types, and half a million merges, are 1.3 million."""
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20

_WEIGHT_TYPES = {
    0: WeightType.F32,
    1: WeightType.F16,
    2: WeightType.Q4_0,
    3: WeightType.Q4_1,
    6: WeightType.Q5_0,
    7: WeightType.Q5_1,
    8: WeightType.Q8_0,
    12: WeightType.Q4_K,
    13: WeightType.Q5_K,
    14: WeightType.Q6_K,
    30: WeightType.BF16,
}
# Known to the format but not to us: so that an error can name the type.
_OTHER_TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True)
class _TensorInfo:
    weight_type: WeightType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` as views into a private memory map."""

    def __init__(self, path: Path, metadata: dict[str, object], infos: dict[str, _TensorInfo], data: mmap.mmap) -> None:
        self.path = path
        self.metadata = metadata
        self._infos = infos
        self._data = data

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Maps the file and reads its header.

        Whatever the bytes are, what becomes of the header takes at most 256 MB, and the data are not looked at.
        Nobody may shorten the file while it is open: reading beyond its end would end the process.

        Raises `ModelNotFoundError` where there is no such file, `FormatError` where it is not a sound GGUF file and
        `UnsupportedModelError` where a tensor has a type this version cannot read.
        """
        path = Path(path)
        data = map_file(path)
        reader = _Reader(path, data)
        metadata, infos = reader.header()
        return cls(path, metadata, infos, data)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._infos)

    def tensor(self, name: str) -> RawTensor:
        """The tensor `name`; shape is (rows, columns) or (columns,), the file's order of dimensions reversed."""
        info = self._infos[name]
        rows = math.prod(info.shape[:-1])
        view = np.frombuffer(self._data, np.uint8, info.num_bytes, info.start).reshape(rows, -1)
        give_back = partial(evict, self._data, info.start, info.num_bytes)
        return RawTensor(name, info.weight_type, info.shape, lambda: view, give_back)


class _Reader:
    """A cursor over the header bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.num_elements = 0

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path} is not a sound GGUF file: {what}; fetch it again, or use another")

    def truncated(self, where: str) -> FormatError:
        return FormatError(f"{self.path} is truncated or damaged: {where}; fetch it again")

    def too_long(self, where: str) -> FormatError:
        if self.end < self.size:
            return self.fail(f"{where} of the {MAX_HEADER_BYTES} bytes that a header may have")
        return self.truncated(f"{where} of its {self.size} bytes")

    # -- primitives ----------------------------------------------------------------------------------------------

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        if self.position + size > self.end:
            raise self.too_long("the header runs past the end")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value  # type: ignore[no-any-return]

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # A vocabulary and its merges are some 300,000 texts: one loop over them, and not a call for each.
        data, end, position = self.data, self.end, self.position
        texts: list[str] = []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > end:
                raise self.too_long("the header runs past the end")
            (length,) = _LENGTH.unpack_from(data, position)
            position = start + length
            if position > end:
                raise self.too_long(f"a text of {length} bytes at byte {start} runs past the end")
            try:
                texts.append(data[start:position].decode())
            except UnicodeDecodeError:
                raise self.fail(f"the text at byte {start} is not UTF-8") from None
        self.position = position
        return texts

    def value(self, kind: int, key: str) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"metadata {brief(key)} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, key: str) -> Sequence[object]:
        kind, count = self.integer("I"), self.integer("Q")
        self.num_elements += count
        if self.num_elements > _MAX_ELEMENTS:
            raise self.fail(f"its arrays have more than {_MAX_ELEMENTS} elements, {count} of them in {brief(key)}")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise self.fail(f"metadata {brief(key)} is an array of the unsupported type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.uint8)
        if count > (self.end - self.position) // dtype.itemsize:
            raise self.too_long(f"metadata {brief(key)} of {count} numbers runs past the end")
        numbers = np.frombuffer(self.data, dtype, count, self.position).tolist()
        self.position += count * dtype.itemsize
        return [bool(number) for number in numbers] if kind == 7 else numbers

    # -- the header ----------------------------------------------------------------------------------------------

    def header(self) -> tuple[dict[str, object], dict[str, _TensorInfo]]:
        if self.data[:4] != _MAGIC:
            raise FormatError(
                f"{self.path} is not a GGUF file (it does not start with the bytes GGUF); give the path of one"
            )
        self.position = 4
        version = self.integer("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big endian" if swapped in (2, 3) else f"has GGUF version {version}"
            raise UnsupportedModelError(f"{self.path} {what}; versions 2 and 3, little endian, are supported")
        num_tensors, num_keys = self.integer("Q"), self.integer("Q")
        room = self.size - self.position
        if num_keys * _MIN_KEY_VALUE_BYTES + num_tensors * _MIN_TENSOR_INFO_BYTES > room:
            raise self.truncated(f"the header announces {num_keys} keys and {num_tensors} tensors in {room} bytes")
        if max(num_keys, num_tensors) > _MAX_ENTRIES:
            raise self.fail(f"it has {num_keys} keys and {num_tensors} tensors; {_MAX_ENTRIES} of each are possible")

        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.fail(f"metadata {brief(key)} is there twice")
            metadata[key] = self.value(self.integer("I"), key)
        return metadata, self.tensor_infos(num_tensors, self.alignment(metadata))

    def alignment(self, metadata: dict[str, object]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 1 <= value <= _MAX_ALIGNMENT
            or value & (value - 1)
        ):
            raise self.fail(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got {brief(value)}")
        return value

    def tensor_infos(self, count: int, alignment: int) -> dict[str, _TensorInfo]:
        found: dict[str, tuple[WeightType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self.string()
            if name in found:
                raise self.fail(f"tensor {brief(name)} is there twice")
            num_dimensions = self.integer("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self.fail(
                    f"tensor {brief(name)} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible"
                )
            dimensions = [self.integer("Q") for _ in range(num_dimensions)]
            type_id, offset = self.integer("I"), self.integer("Q")
            if type_id not in _WEIGHT_TYPES:
                type_name = _OTHER_TYPE_NAMES.get(type_id, f"number {type_id}")
                known = ", ".join(weight_type.label for weight_type in _WEIGHT_TYPES.values())
                raise UnsupportedModelError(
                    f"{self.path}: tensor {brief(name)} has the type {type_name}; supported are {known}"
                )
            weight_type = _WEIGHT_TYPES[type_id]
            if min(dimensions) < 1 or dimensions[0] % weight_type.block_size:
                raise self.fail(
                    f"tensor {brief(name)} of type {weight_type.label} cannot have the dimensions {dimensions}"
                )
            if offset % alignment:
                raise self.fail(f"tensor {brief(name)} starts at {offset}, which is no multiple of {alignment}")
            found[name] = (weight_type, tuple(reversed(dimensions)), offset)

        data_start = -(-self.position // alignment) * alignment
        infos: dict[str, _TensorInfo] = {}
        for name, (weight_type, shape, offset) in found.items():
            num_bytes = math.prod(shape[:-1]) * weight_type.row_bytes(shape[-1])
            end = data_start + offset + num_bytes
            if end > self.size:
                raise self.truncated(f"tensor {brief(name)} ends at byte {end}, the file at byte {self.size}")
            infos[name] = _TensorInfo(weight_type, shape, data_start + offset, num_bytes)
        self.refuse_overlaps(infos)
        return infos

    def refuse_overlaps(self, infos: dict[str, _TensorInfo]) -> None:
        ordered = sorted(infos.items(), key=lambda item: item[1].start)
        for (name, info), (next_name, next_info) in itertools.pairwise(ordered):
            if info.start + info.num_bytes > next_info.start:
                raise self.fail(f"tensors {brief(name)} and {brief(next_name)} overlap")
