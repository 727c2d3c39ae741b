"""Hostile GGUF files: case n is always the same bytes, a sound tiny model after mutations that know the format."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

from tiny_models import ARCHITECTURES, OUTPUTS, tiny_config, tiny_metadata, tiny_tensors

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
ALIGNMENT = 32
TENSOR_TYPES = (*range(16), 24, 30, 31, 39, 255, 2**31, 2**32 - 1)

_BOUNDARIES = (0, 1, 2, 3, 2**16, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = (b"", b"\0", b"gpt2", b"qwen2", b"llama-bpe", b"a\nb\r\x1b[31m\xe2\x80\xa8", b"\xf0\x9f\x90\x9f" * 99,
          b"\xff\xfe", b"\xed\xa0\x80", b"{{ ''.__class__ }}", b"x" * 70_000)  # fmt: skip
_OWN_KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.scale", "attention.causal", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type",
    "rope.scale_linear", "rope.scaling.factor", "ssm.state_size", "attn_logit_softcapping", "final_logit_softcapping",
    "logit_scale", "embedding_scale", "residual_scale", "expert_count",
)  # fmt: skip
_TOKENIZER_KEYS = (
    "model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token", "bos_token_id", "eos_token_id",
    "eot_token_id", "eom_token_id",
)  # fmt: skip


def keys(architecture: str) -> tuple[str, ...]:
    """Every metadata key that a reader might look at."""
    own = (f"{architecture}.{key}" for key in _OWN_KEYS)
    vocabulary = (f"tokenizer.ggml.{key}" for key in _TOKENIZER_KEYS)
    return ("general.architecture", "general.alignment", "tokenizer.chat_template", *own, *vocabulary)


@dataclass(frozen=True)
class Array:
    """An array of items, or of `count` items whose bytes are `items`."""

    kind: int
    items: Any
    count: int | None = None


@dataclass(frozen=True)
class Pair:
    key: bytes
    kind: int
    value: Any


@dataclass(frozen=True)
class Info:
    name: bytes
    dimensions: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Document:
    """What a GGUF file says; parts are replaced, never changed, so that a copy of the lists is a copy."""

    architecture: str
    pairs: list[Pair]
    infos: list[Info]
    data: bytes


@dataclass
class Written:
    """A file's bytes, and where its counts, lengths, types, dimensions and offsets stand: (start, size)."""

    content: bytearray = field(default_factory=bytearray)
    fields: list[tuple[int, int]] = field(default_factory=list)
    inner_fields: list[tuple[int, int]] = field(default_factory=list)
    """The lengths of an array's texts, which are far more than all others."""

    def number(self, kind: int, value: float) -> None:
        raw = struct.pack("<" + CODES[kind], value)
        self.fields.append((len(self.content), len(raw)))
        self.content += raw

    def text(self, value: bytes) -> None:
        self.number(U64, len(value))
        self.content += value

    def value(self, kind: int, value: Any) -> None:
        if kind == ARRAY:
            self.array(value)
        elif kind == STRING:
            self.text(value)
        else:
            self.content += struct.pack("<" + CODES[kind], value)

    def array(self, array: Array) -> None:
        self.number(U32, array.kind)
        self.number(U64, len(array.items) if array.count is None else array.count)
        if isinstance(array.items, bytes):
            self.content += array.items
        elif array.kind in CODES:
            self.content += struct.pack(f"<{len(array.items)}{CODES[array.kind]}", *array.items)
        else:
            outer = len(self.fields)
            for item in array.items:
                self.value(array.kind, item)
            self.inner_fields += self.fields[outer:]
            del self.fields[outer:]

    def any_field(self, rng: Random) -> tuple[int, int]:
        inner = self.inner_fields and rng.random() < 0.1
        return rng.choice(self.inner_fields if inner else self.fields)


def write(document: Document) -> Written:
    file = Written(bytearray(b"GGUF"))
    for kind, value in ((U32, 3), (U64, len(document.infos)), (U64, len(document.pairs))):
        file.number(kind, value)
    for pair in document.pairs:
        file.text(pair.key)
        file.number(U32, pair.kind)
        file.value(pair.kind, pair.value)
    for info in document.infos:
        file.text(info.name)
        file.number(U32, len(info.dimensions))
        for dimension in info.dimensions:
            file.number(U64, dimension)
        file.number(U32, info.kind)
        file.number(U64, info.offset)
    file.content += bytes(-len(file.content) % ALIGNMENT) + document.data
    return file


@cache
def sound(architecture: str, output: str = "tied", weight_type: str = "F32", **sizes: int) -> Document:
    """A whole model."""
    tiny = {"num_layers": 1, "hidden_size": 4, "intermediate_size": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
    config = tiny_config(architecture, **(tiny | sizes))
    pairs = [_pair(key, value) for key, value in tiny_metadata(config).items()]
    infos, data = [], bytearray()
    for name, tensor in tiny_tensors(config, output=output, weight_type=weight_type).items():
        shape = tensor.floats().shape
        infos.append(Info(name.encode(), tuple(reversed(shape)), int(tensor.kind), len(data)))
        data += tensor.data.tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    return Document(architecture, pairs, infos, bytes(data))


def _pair(key: str, value: Any) -> Pair:
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING}
    if isinstance(value, list):
        kind = kinds[type(value[0])]
        items = tuple(item.encode() if isinstance(item, str) else item for item in value)
        return Pair(key.encode(), ARRAY, Array(kind, items))
    return Pair(key.encode(), kinds[type(value)], value.encode() if isinstance(value, str) else value)


# -- mutations of what a file says --------------------------------------------------------------------------------


def hostile_value(rng: Random, *, nested: bool = True) -> tuple[int, Any]:
    """A value of any type, most of them at the edge of something."""
    kind = rng.choice((*CODES, STRING, ARRAY) if nested else (*CODES, STRING))
    if kind == STRING:
        return kind, rng.choice(_TEXTS)
    if kind == ARRAY:
        element, item = hostile_value(rng, nested=rng.random() < 0.1)
        return kind, Array(element, (item,) * rng.choice((0, 1, 2, 270, 300)))
    if kind in (F32, F64):
        return kind, rng.choice(_FLOATS if kind == F32 else (*_FLOATS, 1e300, 5e-324))
    size = struct.calcsize(CODES[kind])
    value = rng.choice(_BOUNDARIES) % 256**size
    return kind, value - 256**size if kind in (I8, I16, I32, I64) and value >= 256**size // 2 else value


def change_value(document: Document, rng: Random) -> None:
    """A key that is read gets a value of any type, whether it was there or not."""
    key = rng.choice(keys(document.architecture)).encode()
    kind, value = hostile_value(rng)
    old = next((pair for pair in document.pairs if pair.key == key), None)
    if old is not None and old.kind in CODES and rng.random() < 0.5:  # of the right type, or nearly
        same_kind = old.kind if rng.random() < 0.8 else rng.choice((U32, I32, U64, F32, F64))
        kind, value = same_kind, rng.choice((0, 1, 2, 3, 4, 6, 8, 255)) % (2 if same_kind == BOOL else 256)
    place = len(document.pairs) if old is None else document.pairs.index(old)
    document.pairs[place : place + 1] = [Pair(key, kind, value)]


def change_element(document: Document, rng: Random) -> None:
    """One element of an array becomes another, doubled, moved or gone."""
    places = [place for place, pair in enumerate(document.pairs) if pair.kind == ARRAY and pair.value.items]
    if not places:
        return
    pair = document.pairs[place := rng.choice(places)]
    items = list(pair.value.items)
    at = rng.randrange(len(items))
    other = items[rng.randrange(len(items))]
    if pair.value.kind == STRING:
        fresh: Any = rng.choice((*_TEXTS, other, other + other, b" ", b"a  b", b"a", b"th e"))
    else:
        fresh = rng.choice((0, 1, 2, 3, 4, 5, 6, other)) if pair.value.kind in CODES else other
    items[at : at + 1] = rng.choice(([fresh], [fresh], [items[at]] * 2, [other, items[at]], []))
    document.pairs[place] = replace(pair, value=replace(pair.value, items=tuple(items)))


def change_tensor(document: Document, rng: Random) -> None:
    """A tensor gets another name, type, shape or place."""
    if not document.infos:
        return
    info = document.infos[place := rng.randrange(len(document.infos))]
    other = rng.choice(document.infos)
    sizes = list(info.dimensions) or [1]
    sizes[rng.randrange(len(sizes))] = rng.choice((*_BOUNDARIES, 4, 8, 32, *other.dimensions))
    names = (b"", b"rope_freqs.weight", b"output.weight", b"blk.1.ffn_up.weight", b"\n" * 60, b"x" * 70_000, other.name)
    document.infos[place] = rng.choice(
        (
            replace(info, name=rng.choice(names)),
            replace(info, kind=rng.choice(TENSOR_TYPES)),
            replace(info, dimensions=tuple(sizes)),
            replace(info, dimensions=rng.choice(((), info.dimensions[::-1], (*info.dimensions, 1), (1,) * 5))),
            replace(info, offset=rng.choice((other.offset, info.offset + ALIGNMENT, info.offset + 4, 2**64 - 32))),
        )
    )


def double_or_drop(document: Document, rng: Random) -> None:
    """A key or a tensor is there twice, not at all, or elsewhere."""
    parts: list[Any] = rng.choice((document.pairs, document.infos))
    if parts:
        part = parts.pop(rng.randrange(len(parts)))
        for _ in range(rng.choice((0, 0, 1, 2))):
            parts.insert(rng.randrange(len(parts) + 1), part)


# -- mutations of the bytes ---------------------------------------------------------------------------------------


def set_field(file: Written, rng: Random) -> None:
    """A count, length, type, dimension or offset becomes a number at the edge of something."""
    start, size = file.any_field(rng)
    old, end = int.from_bytes(file.content[start : start + size], "little"), len(file.content)
    edges = (*_BOUNDARIES, old - 1, old + 1, 2 * old, end - 1, end, end + 1, end - start, end - start - size, end // 8)
    file.content[start : start + size] = (rng.choice(edges) % 256**size).to_bytes(size, "little")


def cut(file: Written, rng: Random) -> None:
    start, size = file.any_field(rng)
    del file.content[rng.choice((start, start + size, start + 1, rng.randrange(len(file.content)))) :]


def splice(file: Written, rng: Random) -> None:
    """A run between two fields is doubled, moved or gone."""
    (first, _), (last, _), (to, _) = (file.any_field(rng) for _ in range(3))
    run = bytes(file.content[min(first, last) : max(first, last)])[:4096]
    file.content[to : to + rng.choice((0, len(run)))] = rng.choice((run, run, b""))


def flip_bits(file: Written, rng: Random) -> None:
    """Bits near a field, which is where names and values are too."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = file.any_field(rng)[0] + rng.randrange(24)
        if at < len(file.content):
            file.content[at] ^= rng.choice((1 << rng.randrange(8), 255))


DOCUMENT_MUTATIONS = (change_value, change_value, change_element, change_tensor, double_or_drop)
BYTE_MUTATIONS = (set_field, set_field, cut, splice, flip_bits)


def case(number: int) -> bytes:
    """The bytes of one case: a model of random small sizes, and up to four mutations."""
    rng = Random(number)
    base = _base(rng)
    document = replace(base, pairs=list(base.pairs), infos=list(base.infos))
    for _ in range(rng.choice((0, 1, 1, 2))):
        rng.choice(DOCUMENT_MUTATIONS)(document, rng)
    file = write(document)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        if file.content:
            rng.choice(BYTE_MUTATIONS)(file, rng)
    return bytes(file.content)


def _base(rng: Random) -> Document:
    sizes = {}
    if rng.random() < 0.3:
        num_kv_heads = rng.choice((1, 2, 3))
        sizes = {
            "num_layers": rng.choice((1, 2)), "hidden_size": rng.choice((1, 2, 5, 32)), "num_kv_heads": num_kv_heads,
            "num_heads": num_kv_heads * rng.choice((1, 2)), "head_dim": rng.choice((2, 6)),
            "vocab_size": rng.choice((270, 304)),
        }  # fmt: skip
    return sound(rng.choice(ARCHITECTURES), rng.choice(OUTPUTS), rng.choice(("F32", "F16")), **sizes)
