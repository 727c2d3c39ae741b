"""The safetensors reader and its folders: against the `safetensors` package, and against every kind of unsound file."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from pilotfish.errors import FormatError, ModelNotFoundError, PilotfishError, UnsupportedModelError
from pilotfish.formats.safetensors import MAX_HEADER_BYTES, StoredTensor, read_safetensors
from pilotfish.formats.safetensors_folder import read_weights
from pilotfish.json_files import parse_object
from pilotfish.ops.reference import dense

# Bits of each dtype, as the format's description lists them.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
SOUND = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def build(header: object, data: bytes = bytes(32), *, length: int | None = None) -> bytes:
    """A file of a header, which is made JSON unless it is bytes, and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def changed(tensor: str = "a", **fields: object) -> dict[str, object]:
    """The sound header with other `fields` in one tensor's entry; None takes one out."""
    entry = {key: value for key, value in (SOUND[tensor] | fields).items() if value is not None}
    return {**SOUND, tensor: entry}


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], dict[str, StoredTensor]]:
    def read(content: bytes) -> dict[str, StoredTensor]:
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        return read_safetensors(path)

    return read


@pytest.fixture
def refusal(read: Callable[[bytes], object]) -> Callable[..., str]:
    """The message, of one line, of the FormatError that a file must give."""

    def refusal(content: bytes) -> str:
        with pytest.raises(PilotfishError) as caught:
            read(content)
        assert type(caught.value) is FormatError
        assert "x.safetensors" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 1000
        return str(caught.value)

    return refusal


# -- sound files --------------------------------------------------------------------------------------------------


@st.composite
def sound_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.uint32, torch.int64, torch.uint8, torch.bool]
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
    tensors = {}
    for index, name in enumerate(names):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(dtypes))
        values = torch.tensor(np.random.default_rng(index).integers(0, 2, shape))
        tensors[name] = values.to(dtype)
    return {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}


@given(sound_tensors(), st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=2))
def test_what_the_package_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    path = tmp_path_factory.mktemp("sound") / "x.safetensors"
    save_file(tensors, path, metadata)
    found = read_safetensors(path)
    expected = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == expected.keys() == tensors.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, list(tensor.shape)) == (expected[name]["dtype"], expected[name]["shape"])
        if tensors[name].numel():
            assert tensor.read().tobytes() == bytes(expected[name]["data"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_read_and_read_again_when_evicted(tmp_path: Path, dtype: torch.dtype) -> None:
    # Names of all lengths put the data at places that are multiples of nothing.
    tensors = {"x" * index: torch.randn(5, 7).to(dtype) for index in range(1, 10)}
    tensors["vector"] = torch.randn(7).to(dtype)
    save_file(tensors, tmp_path / "x.safetensors")
    for name, tensor in read_safetensors(tmp_path / "x.safetensors").items():
        raw = tensor.raw()
        assert raw.shape == tuple(tensors[name].shape)
        assert torch.equal(dense(raw), tensors[name].float())
        raw.read()[0, 0] ^= 1  # private to this process, and gone with the pages
        raw.evict()
        assert torch.equal(dense(raw), tensors[name].float())


def test_data_may_start_anywhere(read: Callable[[bytes], dict[str, StoredTensor]]) -> None:
    values = np.arange(6, dtype=np.float32)
    for padding in range(8):
        header = json.dumps(SOUND).encode() + b" " * padding
        raw = read(build(header, values.tobytes() + bytes(8)))["a"].raw()
        assert dense(raw).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_of_the_format_has_its_size(
    read: Callable[[bytes], dict[str, StoredTensor]], refusal: Callable[..., str], dtype: str
) -> None:
    num_bytes = 8 * BITS[dtype] // 8
    entry = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, num_bytes]}
    content = build({"a": entry}, bytes(num_bytes))
    assert dict(safetensors.deserialize(content))["a"]["dtype"] == dtype
    tensor = read(content)["a"]
    assert (tensor.dtype, tensor.shape, len(tensor.read())) == (dtype, (2, 4), num_bytes)
    if dtype not in ("F32", "F16", "BF16"):
        with pytest.raises(UnsupportedModelError, match=f"tensor 'a' has the dtype {dtype}; supported are"):
            tensor.raw()
    refusal(build({"a": entry | {"data_offsets": [0, num_bytes + 1]}}, bytes(num_bytes + 1)))


def test_weights_have_numbers_and_dimensions(read: Callable[[bytes], dict[str, StoredTensor]]) -> None:
    for shape, num_bytes in (([], 4), ([0], 0), ([3, 0], 0)):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
        with pytest.raises(FormatError, match="tensor 'a' has the shape"):
            read(build({"a": entry}, bytes(num_bytes)))["a"].raw()


# -- unsound files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (bytes(7), "a length and a JSON object"),
        (bytes(8), "a length and a JSON object"),
        (b"GGUF" + bytes(100), "a length and a JSON object"),
        (b"PK\x03\x04" + bytes(100), "a length and a JSON object"),
        (build(SOUND, length=0), "x.safetensors"),
        (build(SOUND, length=1), "not sound JSON"),
        (build(SOUND, length=1000), "truncated"),
        (build(SOUND, length=MAX_HEADER_BYTES + 1), "more than"),
        (build(SOUND, length=2**63), "more than"),
        (build(SOUND, length=2**64 - 1), "more than"),
        (build(b"[]"), "a length and a JSON object"),
        (build(b'{"a": '), "not sound JSON"),
        (build(b'{"\xff": 1}'), "not UTF-8"),
        (build(b'{"a": NaN}'), "NaN"),
        (build(b'{"a": ' + b"[" * 100_000), "nested too deeply"),
        (build(b'{"a": 1' + b"0" * 5000 + b"}"), "not sound JSON"),
        (build(SOUND, bytes(31)), "truncated: tensor 'b' ends at byte 32 of the data"),
        (build(SOUND, bytes(33)), "belong to no tensor"),
        (build(SOUND, b""), "truncated"),
        (build({}, bytes(1)), "belong to no tensor"),
    ],
    ids=range(21),
)
def test_a_file_that_is_damaged_as_a_whole(refusal: Callable[..., str], content: bytes, what: str) -> None:
    assert what in refusal(content)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": None},
        {"dtype": "F33"},
        {"dtype": 1},
        {"dtype": ["F32"]},
        {"shape": None},
        {"shape": 6},
        {"shape": "6"},
        {"shape": {"0": 6}},
        {"shape": [2, -3]},
        {"shape": [-2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [2, "3"]},
        {"shape": [2, True, 3]},
        {"shape": [2, None]},
        {"shape": [2, 2]},
        {"shape": [2**32, 2**32]},
        {"shape": [2**63, 2]},
        {"shape": [2**40] * 1000},
        {"shape": [10**4000] * 100},
        {"data_offsets": None},
        {"data_offsets": [0]},
        {"data_offsets": [0, 12, 24]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [0, 24.0]},
        {"data_offsets": [False, 24]},
        {"data_offsets": [0, 2**64 + 24]},
        {"data_offsets": {"start": 0, "end": 24}},
        {"extra": 1},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_damaged_entry_names_its_tensor(refusal: Callable[..., str], fields: dict[str, object]) -> None:
    assert "tensor 'a' " in refusal(build(changed(**fields)))


@pytest.mark.parametrize("entry", [None, 1, "F32", [], {}], ids=str)
def test_an_entry_is_an_object(refusal: Callable[..., str], entry: object) -> None:
    assert "tensor 'a' " in refusal(build({**SOUND, "a": entry}))


@pytest.mark.parametrize("metadata", [None, 1, "x", [], {"a": 1}, {"a": None}, {"a": {}}], ids=str)
def test_metadata_are_texts(refusal: Callable[..., str], metadata: object) -> None:
    assert "__metadata__" in refusal(build({"__metadata__": metadata, **SOUND}))


def test_tensors_neither_overlap_nor_leave_holes(refusal: Callable[..., str]) -> None:
    inside = changed("b", data_offsets=[16, 24])
    assert "tensors 'b' and 'a' overlap" in refusal(build(changed("b", data_offsets=[0, 8]), bytes(24)))
    assert "tensors 'a' and 'b' overlap" in refusal(build(inside, bytes(24)))
    assert "tensors 'a' and 'b' have a hole" in refusal(build(changed("b", data_offsets=[25, 33]), bytes(33)))
    assert "belong to no tensor" in refusal(build({"a": SOUND["a"] | {"data_offsets": [1, 25]}}, bytes(25)))


def test_a_name_is_there_once_and_not_endless(refusal: Callable[..., str]) -> None:
    entry = json.dumps(SOUND["a"]).encode()
    assert "'a' is there twice" in refusal(build(b'{"a": ' + entry + b', "a": ' + entry + b"}", bytes(24)))
    assert "257 characters" in refusal(build({"n" * 257: SOUND["a"]}, bytes(24)))


def test_the_last_of_many_names_that_is_there_twice_is_found_at_once() -> None:
    # Comparing them in pairs would take many minutes.
    names = [f'"{index}":0' for index in range(300_000)]
    with pytest.raises(FormatError, match="'299999' is there twice"):
        parse_object(("{" + ",".join([*names, names[-1]]) + "}").encode(), "this")


@pytest.mark.parametrize("header", [b'{"a":[' + b"[]," * (MAX_HEADER_BYTES // 3 - 10) + b"[]]}"])
def test_memory_is_bounded_by_the_header(refusal: Callable[..., str], header: bytes) -> None:
    content = build(header)
    tracemalloc.start()
    try:
        refusal(content)
        assert tracemalloc.get_traced_memory()[1] < 35 * MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Two tensors that may have any shape and place, sound or not, and data of about their size."""
    dtype, size = st.sampled_from(["F32", "F16", "U8", "F4", "F9"]), st.integers(0, 4)
    entries: dict[str, object] = {}
    end = 0
    for name in ("a", "b"):
        shape = draw(st.lists(size, max_size=2))
        kind = draw(dtype)
        num_bytes = int(np.prod(shape)) * BITS.get(kind, 8) // 8
        start = end + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        end = start + num_bytes + draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    if draw(st.booleans()):
        entries["__metadata__"] = draw(st.sampled_from([{"x": "y"}, {"x": 1}]))
    return build(entries, bytes(max(0, end + draw(st.sampled_from([0, 0, 0, 1, -1])))))


@given(headers())
def test_what_is_sound_is_what_the_package_takes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(content)
    try:
        expected = {name: entry["shape"] for name, entry in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        with pytest.raises(FormatError):
            read_safetensors(path)
        return
    assert {name: list(tensor.shape) for name, tensor in read_safetensors(path).items()} == expected


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(ModelNotFoundError, match="cannot open"):
        read_safetensors(tmp_path)


# -- folders ------------------------------------------------------------------------------------------------------

SHARDS = ("one.safetensors", "two.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of two tensors each, and their index."""
    for index, shard in enumerate(SHARDS):
        save_file({f"t{2 * index + i}": torch.full((2, 2), 2.0 * index + i) for i in range(2)}, tmp_path / shard)
    write_index(tmp_path)
    return tmp_path


def write_index(folder: Path, weight_map: Any = None, **changes: object) -> None:
    if weight_map is None:
        weight_map = {f"t{index}": SHARDS[index // 2] for index in range(4)} | changes
    content = {"metadata": {"total_size": 64}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))


def folder_refusal(folder: Path, kind: type[PilotfishError] = FormatError) -> str:
    with pytest.raises(PilotfishError) as caught:
        read_weights(folder)
    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def values(folder: Path) -> dict[str, float]:
    return {name: dense(tensor.raw())[1, 1].item() for name, tensor in read_weights(folder).items()}


def test_shards_are_read_through_the_index_and_stray_files_are_not(folder: Path) -> None:
    (folder / "three.safetensors").write_bytes(b"no such thing")
    (folder / "pytorch_model.bin").write_bytes(b"no such thing")
    assert values(folder) == {"t0": 0, "t1": 1, "t2": 2, "t3": 3}


def test_the_single_file_counts_before_the_index(folder: Path) -> None:
    save_file({"t0": torch.full((2, 2), 7.0)}, folder / "model.safetensors")
    assert values(folder) == {"t0": 7}
    (folder / INDEX).write_text("no JSON")
    assert values(folder) == {"t0": 7}


def test_a_folder_without_weights(tmp_path: Path) -> None:
    message = folder_refusal(tmp_path, ModelNotFoundError)
    assert "model.safetensors" in message
    assert INDEX in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    assert "lacks the shard 'two.safetensors'" in folder_refusal(folder)
    (folder / SHARDS[1]).mkdir()
    assert "lacks the shard 'two.safetensors'" in folder_refusal(folder)


def test_a_damaged_shard_is_named(folder: Path) -> None:
    content = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(content[:-1])
    assert "two.safetensors is truncated" in folder_refusal(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    write_index(folder, t4=SHARDS[1])
    message = folder_refusal(folder)
    assert "assigns the tensor 't4' to the shard 'two.safetensors', which lacks it" in message
    write_index(folder, **{"n" * 5000: SHARDS[1]})
    folder_refusal(folder)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(folder: Path) -> None:
    write_index(folder, t1=SHARDS[1])
    message = folder_refusal(folder)
    assert "'one.safetensors' holds the tensor 't1'" in message
    assert "assigns to 'two.safetensors'" in message


def test_a_tensor_that_the_index_does_not_name_is_named(folder: Path) -> None:
    write_index(folder, {"t0": SHARDS[0], "t2": SHARDS[1], "t3": SHARDS[1]})
    message = folder_refusal(folder)
    assert "'one.safetensors' holds the tensor 't1'" in message
    assert "does not name" in message


@pytest.mark.parametrize(
    "shard",
    [
        1,
        None,
        ["one.safetensors"],
        "",
        ".",
        "..",
        "one.bin",
        ".safetensors",
        "/etc/one.safetensors",
        "../one.safetensors",
        "a/one.safetensors",
        "a\\one.safetensors",
        "C:one.safetensors",
        "one\0.safetensors",
        "one\n.safetensors",
        "one.safetensors\n",
        "\ud800.safetensors",
        "n" * 5000 + ".safetensors",
    ],
    ids=lambda shard: repr(shard)[:30],
)
def test_a_shard_is_a_plain_file_name(folder: Path, shard: object) -> None:
    write_index(folder, t3=shard)
    assert "the shard of tensor 't3' must be the plain name" in folder_refusal(folder)


@pytest.mark.parametrize("weight_map", [{}, [], 1, "x", ["one.safetensors"]], ids=str)
def test_a_weight_map_is_an_object(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "weight_map" in folder_refusal(folder)


def test_an_index_is_bounded_json(folder: Path) -> None:
    for content in ("", "[]", "{}", '{"weight_map": {"a": 1, "a": 1}}'):
        (folder / INDEX).write_text(content)
        assert INDEX in folder_refusal(folder)
    (folder / INDEX).write_text("{" + " " * (5 << 20) + "}")
    assert f"{INDEX} has more than" in folder_refusal(folder)
