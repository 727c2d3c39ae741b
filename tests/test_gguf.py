"""The GGUF reader: against the `gguf` package on sound files, and against every kind of unsound one."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    WEIGHT_TYPES,
    WIDE,
    tiny_config,
    write_tiny_model,
)

from pilotfish.errors import FormatError, ModelNotFoundError, PilotfishError, UnsupportedModelError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.ops.reference import dense

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
TYPE_F32, TYPE_Q8_0, TYPE_Q2_K, TYPE_IQ4_XS = 0, 8, 10, 23
HUGE = (2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


# -- files written byte by byte -----------------------------------------------------------------------------------


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def number(kind: int, value: float) -> bytes:
    return struct.pack("<" + CODES[kind], value)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(element: int, values: Iterable[bytes], count: int | None = None) -> bytes:
    items = list(values)
    return struct.pack("<IQ", element, len(items) if count is None else count) + b"".join(items)


def info(
    name: str | bytes,
    dimensions: Iterable[int] = (4, 2),
    kind: int = TYPE_F32,
    offset: int = 0,
    num_dimensions: int | None = None,
) -> bytes:
    sizes = list(dimensions)
    count = len(sizes) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def build(
    pairs: Iterable[bytes] = (),
    infos: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    pairs, infos = list(pairs), list(infos)
    counts = (len(infos) if num_tensors is None else num_tensors, len(pairs) if num_keys is None else num_keys)
    header = magic + version + struct.pack("<QQ", *counts) + b"".join(pairs) + b"".join(infos)
    return header + (bytes(-len(header) % alignment) + data if data else b"")


def sound() -> bytes:
    """Every value type, an array of each, two tensors; used whole, cut and damaged."""
    pairs = [pair(f"scalar.{kind}", kind, number(kind, 1)) for kind in CODES]
    pairs += [pair(f"array.{kind}", ARRAY, array(kind, [number(kind, 0), number(kind, 1)])) for kind in CODES]
    pairs += [pair("text", STRING, text("ähm")), pair("texts", ARRAY, array(STRING, [text("a"), text("")]))]
    infos = [info("first", (4, 2)), info("second", (32,), TYPE_Q8_0, 32)]
    return build(pairs, infos, bytes(range(32 + 34)))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    path = tmp_path / "file.gguf"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def refused(written: Callable[[bytes], Path]) -> Callable[[bytes], PilotfishError]:
    """Opens the bytes as a file; the one error it must give, after a look at the message."""

    def refuse(content: bytes) -> PilotfishError:
        path = written(content)
        with pytest.raises(PilotfishError) as caught:
            GGUFFile.open(path)
        assert type(caught.value) in (FormatError, UnsupportedModelError)
        assert_one_line(caught.value)
        assert str(path) in str(caught.value)
        return caught.value

    return refuse


def assert_one_line(error: PilotfishError) -> None:
    assert len(str(error).splitlines()) == 1
    assert str(error).strip()


# -- sound files --------------------------------------------------------------------------------------------------


def assert_same_as_oracle(path: Path, sampled_rows: int | None = None) -> None:
    ours, oracle = GGUFFile.open(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    for key, value in expected.items():
        assert type(ours.metadata[key]) is type(value)
    assert ours.tensor_names == {tensor.name for tensor in oracle.tensors}
    for tensor in oracle.tensors:
        raw = ours.tensor(tensor.name)
        assert raw.name == tensor.name
        assert raw.shape == tuple(reversed(tensor.shape.tolist()))
        assert raw.weight_type.label == tensor.tensor_type.name
        expected_bytes = tensor.data.view(np.uint8).reshape(raw.read().shape[0], -1)
        assert np.array_equal(raw.read(), expected_bytes)
        if sampled_rows is None or raw.read().shape[0] <= sampled_rows:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(dense(raw), torch.from_numpy(values.reshape(raw.shape).copy()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_read_as_the_gguf_package_reads_them(tmp_path: Path, architecture: str) -> None:
    kinds = {
        "token_embd.weight": "Q4_0",
        "attn_q.weight": "Q8_0",
        "0.attn_k.weight": "Q4_1",
        "1.attn_k.weight": "Q5_1",
        "attn_v.weight": "Q5_0",
        "ffn_gate.weight": "Q5_K",
        "ffn_up.weight": "Q4_K",
        "0.ffn_down.weight": "Q6_K",
        "1.ffn_down.weight": "BF16",
        "output.weight": "F16",
    }
    assert {*kinds.values(), "F32"} == {*WEIGHT_TYPES}
    config = tiny_config(architecture, **WIDE)
    path = write_tiny_model(tmp_path / "tiny.gguf", config=config, tensor_types=kinds, output="untied")
    assert_same_as_oracle(path)


@pytest.mark.real_model
def test_a_real_file_reads_as_the_gguf_package_reads_it(model_path: Callable[[str], Path]) -> None:
    assert_same_as_oracle(model_path("smollm2-135m"), sampled_rows=600)


def test_every_value_type(written: Callable[[bytes], Path]) -> None:
    metadata = GGUFFile.open(written(sound())).metadata
    for kind in CODES:
        one = {F32: 1.0, F64: 1.0, BOOL: True}.get(kind, 1)
        assert metadata[f"scalar.{kind}"] == one
        assert metadata[f"array.{kind}"] == [type(one)(0), one]
        assert {type(value) for value in metadata[f"array.{kind}"]} == {type(one)}
        assert type(metadata[f"scalar.{kind}"]) is type(one)
    assert metadata["text"] == "ähm"
    assert metadata["texts"] == ["a", ""]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(I8, -128), (I16, -32768), (I32, -(2**31)), (I64, -(2**63)), (U64, 2**64 - 1), (U8, 255), (F64, 1e300)],
)
def test_extreme_values(written: Callable[[bytes], Path], kind: int, value: float) -> None:
    content = build([pair("x", kind, number(kind, value)), pair("xs", ARRAY, array(kind, [number(kind, value)]))])
    assert GGUFFile.open(written(content)).metadata == {"x": value, "xs": [value]}


def test_tensors_lie_where_their_offsets_say_in_any_order(written: Callable[[bytes], Path]) -> None:
    data = np.arange(24, dtype=np.float32)
    infos = [info("late", (4, 2, 1, 1), offset=64), info("early", (8,), offset=0)]
    file = GGUFFile.open(written(build([], infos, data.tobytes())))
    late, early = file.tensor("late"), file.tensor("early")
    assert late.shape == (1, 1, 2, 4)
    assert late.read().view(np.float32).tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert early.shape == (8,)
    assert early.read().view(np.float32).tolist() == [list(range(8))]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_an_alignment_of_the_files_own(written: Callable[[bytes], Path], alignment: int) -> None:
    pairs = [pair("general.alignment", U32, number(U32, alignment))]
    infos = [info("first", (1,)), info("second", (1,), offset=-(-4 // alignment) * alignment)]
    first, second = struct.pack("<f", 1.5), struct.pack("<f", 2.5)
    data = first + bytes(-len(first) % alignment) + second
    file = GGUFFile.open(written(build(pairs, infos, data, alignment=alignment)))
    assert file.tensor("first").read().view(np.float32).tolist() == [[1.5]]
    assert file.tensor("second").read().copy().view(np.float32).tolist() == [[2.5]]


def test_version_2_is_read(written: Callable[[bytes], Path]) -> None:
    content = build([pair("x", U8, b"\x07")], version=struct.pack("<I", 2))
    assert GGUFFile.open(written(content)).metadata == {"x": 7}


def test_the_map_is_private(written: Callable[[bytes], Path]) -> None:
    path = written(sound())
    GGUFFile.open(path).tensor("first").read()[:] = 255
    assert path.read_bytes() == sound()


# -- unsound files ------------------------------------------------------------------------------------------------


def test_every_cut_is_noticed(written: Callable[[bytes], Path], refused: Callable[[bytes], PilotfishError]) -> None:
    content = sound()
    GGUFFile.open(written(content))
    for length in range(len(content)):
        error = refused(content[:length])
        assert isinstance(error, FormatError), length


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize(
    "make",
    [
        lambda n: build(num_tensors=n),
        lambda n: build(num_keys=n),
        lambda n: build(num_tensors=n, num_keys=n, data=bytes(4096)),
        lambda n: build([text(b"key", n) + bytes(64)]),
        lambda n: build([pair("x", STRING, text(b"value", n))]),
        lambda n: build([pair("x", ARRAY, array(U8, [b"\0"], n))]),
        lambda n: build([pair("x", ARRAY, array(F64, [bytes(8)] * 9, n))]),
        lambda n: build([pair("x", ARRAY, array(STRING, [text("a")] * 9, n))]),
        lambda n: build([pair("x", ARRAY, array(STRING, [text("a", n)]))]),
        lambda n: build([], [info("t", (n,))], bytes(64)),
        lambda n: build([], [info("t", (1, n))], bytes(64)),
        lambda n: build([], [info("t", (n - n % 32, n, n, n), TYPE_Q8_0)], bytes(64)),
        lambda n: build([], [info("t", offset=n - n % 32)], bytes(64)),
        lambda n: build([], [text(b"name", n) + bytes(64)]),
        lambda n: build([], [info("t", num_dimensions=n % 2**32 or 5)], bytes(64)),
    ],
)
def test_absurd_counts_cost_no_memory(
    written: Callable[[bytes], Path], make: Callable[[int], bytes], count: int
) -> None:
    path = written(make(count))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            GGUFFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 19
    assert_one_line(caught.value)


ONE = pair("x", U8, b"\1")
EIGHT = bytes(32)
UNSOUND = {
    "wrong magic": (build(magic=b"GGML"), FormatError, "does not start with"),
    "not even a magic": (b"GG", FormatError, "does not start with"),
    "empty": (b"", FormatError, "empty"),
    "version 1": (build(version=struct.pack("<I", 1)), UnsupportedModelError, "version 1"),
    "version 4": (build(version=struct.pack("<I", 4)), UnsupportedModelError, "version 4"),
    "big endian": (build(version=struct.pack(">I", 3)), UnsupportedModelError, "big endian"),
    "key twice": (build([ONE, ONE]), FormatError, "'x' is there twice"),
    "tensor twice": (build([], [info("t"), info("t", offset=32)], bytes(64)), FormatError, "'t' is there twice"),
    "same place": (build([], [info("a"), info("b")], EIGHT), FormatError, "overlap"),
    "one inside another": (
        build([], [info("a", (32,)), info("b", (1,), offset=32)], bytes(128)),
        FormatError,
        "'a' and 'b' overlap",
    ),
    "misaligned": (build([], [info("t", offset=16)], bytes(64)), FormatError, "no multiple of 32"),
    "no dimension": (build([], [info("t", ())], EIGHT), FormatError, "0 dimensions"),
    "five dimensions": (build([], [info("t", (1,) * 5)], EIGHT), FormatError, "5 dimensions"),
    "dimension 0": (build([], [info("t", (4, 0))], EIGHT), FormatError, "'t'"),
    "half a block": (build([], [info("t", (48,), TYPE_Q8_0)], bytes(64)), FormatError, "Q8_0"),
    "half a block in a row": (build([], [info("t", (16, 2), TYPE_Q8_0)], bytes(64)), FormatError, "Q8_0"),
    "Q2_K": (build([], [info("some.weight", (32,), TYPE_Q2_K)], EIGHT), UnsupportedModelError, "some.weight.*Q2_K"),
    "IQ4_XS": (build([], [info("a.weight", (32,), TYPE_IQ4_XS)], EIGHT), UnsupportedModelError, "a.weight.*IQ4_XS"),
    "type 4": (build([], [info("some.weight", (32,), 4)], EIGHT), UnsupportedModelError, "some.weight.*number 4"),
    "type 2³²-1": (build([], [info("t", (32,), 2**32 - 1)], EIGHT), UnsupportedModelError, "number 4294967295"),
    "value type 13": (build([pair("x", 13, bytes(8))]), FormatError, "'x'.*type 13"),
    "value type 2³²-1": (build([pair("x", 2**32 - 1, bytes(8))]), FormatError, "'x'.*type 4294967295"),
    "array in an array": (
        build([pair("x", ARRAY, array(ARRAY, [array(U8, [b"\1"])]))]),
        FormatError,
        "'x'.*array of the unsupported type 9",
    ),
    "array of type 13": (build([pair("x", ARRAY, array(13, [bytes(8)]))]), FormatError, "'x'.*type 13"),
    "key not UTF-8": (build([pair(b"\xff\xfe", U8, b"\1")]), FormatError, "not UTF-8"),
    "value not UTF-8": (build([pair("x", STRING, text(b"\xc3\x28"))]), FormatError, "not UTF-8"),
    "a surrogate": (build([pair("x", STRING, text(b"\xed\xa0\x80"))]), FormatError, "not UTF-8"),
    "an element not UTF-8": (build([pair("x", ARRAY, array(STRING, [text(b"\xff")]))]), FormatError, "not UTF-8"),
    "tensor name not UTF-8": (build([], [info(b"\xff")], EIGHT), FormatError, "not UTF-8"),
    "a key with line breaks": (build([pair("a\nb", 13, bytes(8))]), FormatError, r"a\\nb"),
    "a tensor name with line breaks": (build([], [info("a\r\n\u2028b", (1,) * 5)], EIGHT), FormatError, "5 dim"),
} | {
    f"alignment {value} of type {kind}": (
        build([pair("general.alignment", kind, raw)], [info("t")], EIGHT),
        FormatError,
        "general.alignment",
    )
    for kind, value, raw in [
        (U32, 0, number(U32, 0)),
        (U32, 3, number(U32, 3)),
        (U32, 2**21, number(U32, 2**21)),
        (U64, 2**63, number(U64, 2**63)),
        (I32, -32, number(I32, -32)),
        (F32, 32.0, number(F32, 32)),
        (BOOL, True, number(BOOL, 1)),
        (STRING, "32", text("32")),
        (ARRAY, [32], array(U32, [number(U32, 32)])),
    ]
}


@pytest.mark.parametrize(("content", "error_type", "message"), UNSOUND.values(), ids=UNSOUND.keys())
def test_each_fault_has_its_own_message(
    written: Callable[[bytes], Path], content: bytes, error_type: type[PilotfishError], message: str
) -> None:
    with pytest.raises(error_type, match=message) as caught:
        GGUFFile.open(written(content))
    assert type(caught.value) is error_type
    assert_one_line(caught.value)


@pytest.mark.parametrize("kind", [I16, BOOL, STRING])
def test_the_elements_of_all_arrays_are_bounded_together(
    written: Callable[[bytes], Path], refused: Callable[[bytes], PilotfishError], kind: int
) -> None:
    content = [text("") if kind == STRING else number(kind, 1)] * (1 << 20)
    half = array(kind, content)
    metadata = GGUFFile.open(written(build([pair("x", ARRAY, half), pair("y", ARRAY, half)]))).metadata
    assert [len(value) for value in metadata.values() if isinstance(value, list)] == [1 << 20, 1 << 20]
    error = refused(build([pair("x", ARRAY, half), pair("y", ARRAY, half), pair("z", ARRAY, array(U8, [b"\0"]))]))
    assert "more than 2097152 elements" in str(error)


def test_keys_and_tensors_are_bounded(
    written: Callable[[bytes], Path], refused: Callable[[bytes], PilotfishError]
) -> None:
    keys = [pair(str(index), BOOL, b"\1") for index in range((1 << 15) + 1)]
    assert len(GGUFFile.open(written(build(keys[:-1]))).metadata) == 1 << 15
    assert "32769 keys" in str(refused(build(keys)))
    infos = [info(str(index), (8,), offset=32 * index) for index in range((1 << 15) + 1)]
    assert len(GGUFFile.open(written(build([], infos[:-1], bytes(32 << 15)))).tensor_names) == 1 << 15
    assert "32769 tensors" in str(refused(build([], infos, bytes(33 << 15))))


def test_a_header_is_bounded(written: Callable[[bytes], Path], refused: Callable[[bytes], PilotfishError]) -> None:
    rest = len(build([pair("x", STRING, text("")), ONE]))
    largest = bytes((32 << 20) - rest)
    assert len(str(GGUFFile.open(written(build([pair("y", STRING, text(largest)), ONE]))).metadata["y"])) == len(
        largest
    )
    for content in (
        build([pair("y", STRING, text(largest + b" ")), ONE]),
        build([pair("y", STRING, text(largest + bytes(99)))]),
        build([pair("y", ARRAY, array(F64, [bytes(16 << 20)], 1 << 21)), pair("z", STRING, text(bytes(17 << 20)))]),
    ):
        assert "33554432 bytes that a header may have" in str(refused(content))


@pytest.mark.parametrize(
    "make",
    [
        lambda long: build([pair(long, 13, bytes(8))]),
        lambda long: build([pair(long, U8, b"\1")] * 2),
        lambda long: build([pair(long, ARRAY, array(13, [bytes(8)]))]),
        lambda long: build([pair(long, ARRAY, array(U8, [], 2**40))]),
        lambda long: build([pair(long, ARRAY, array(U8, [], 2**20))]),
        lambda long: build([pair("general.alignment", STRING, text(long))], [info("t")], EIGHT),
        lambda long: build([], [info(long, (1,) * 5)], EIGHT),
        lambda long: build([], [info(long, kind=4)], EIGHT),
        lambda long: build([], [info(long, offset=4)], EIGHT),
        lambda long: build([], [info(long, (0,))], EIGHT),
        lambda long: build([], [info(long, (2**20,))], EIGHT),
        lambda long: build([], [info(long), info(long)], EIGHT),
        lambda long: build([], [info(long), info("t")], EIGHT),
    ],
)
def test_a_message_is_short_whatever_it_quotes(
    refused: Callable[[bytes], PilotfishError], make: Callable[[str], bytes], tmp_path: Path
) -> None:
    message = str(refused(make("\n\x1b\u2028" * 20_000)))
    assert len(message) < 500 + len(str(tmp_path))
    assert message.isprintable()


def test_every_type_that_is_not_supported_is_named_as_the_gguf_package_names_it(
    refused: Callable[[bytes], PilotfishError],
) -> None:
    others = [kind for kind in gguf.GGMLQuantizationType if kind.name not in WEIGHT_TYPES]
    assert len(others) > 20
    for kind in others:
        error = refused(build([], [info("some.weight", (256,), kind.value)], bytes(1024)))
        assert isinstance(error, UnsupportedModelError)
        assert f"'some.weight' has the type {kind.name};" in str(error) or f"number {kind.value}" in str(error)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.gguf", "no such file"), (tmp_path, "cannot open")):
        with pytest.raises(ModelNotFoundError, match=message) as caught:
            GGUFFile.open(path)
        assert_one_line(caught.value)
