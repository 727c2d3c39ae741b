"""The nastiest GGUF files, each with the reason: what is refused where, or read although it looks absurd."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fuzzing import ARRAY, BOOL, F32, F64, I16, I32, STRING, U8, U32, Array, Document, Info, Pair, sound, write

GIB = 1 << 30
_LONG = b"\n\x1b[2J" * 20_000
_MODEL = sound("qwen2")


@dataclass(frozen=True)
class Hostile:
    """`stage` is where the file must be refused (`sound`: nowhere); so many `zeros` follow what it says."""

    reason: str
    stage: str
    make: Callable[[], Document]
    zeros: int = 0

    def content(self) -> bytes:
        return bytes(write(self.make()).content)


def _with(key: str, kind: int, value: Any, document: Document = _MODEL) -> Document:
    """With a key, which comes first; it replaces the model's own."""
    pairs = [pair for pair in document.pairs if pair.key != key.encode()]
    return replace(document, pairs=[Pair(key.encode(), kind, value), *pairs])


def _array(kind: int, count: int, items: bytes = b"", key: str = "x", document: Document = _MODEL) -> Document:
    return _with(key, ARRAY, Array(kind, items, count), document)


def _text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def _with_tensor(name: bytes, *dimensions: int) -> Document:
    data = _MODEL.data + bytes(-len(_MODEL.data) % 32)
    return replace(_MODEL, infos=[*_MODEL.infos, Info(name, dimensions, 0, len(data))], data=data)


def _embedding(num_rows: int) -> Document:
    """Rows of one number each, behind all other tensors."""
    model = sound("llama", hidden_size=1)
    embedding, *others = model.infos
    return replace(model, infos=[*others, replace(embedding, dimensions=(1, num_rows), offset=len(model.data))])


def _vocabulary(texts: list[bytes], kind: int) -> Document:
    """Tokens that are all of one kind, in a model without an end of text."""
    model = _array(STRING, 0, key="tokenizer.ggml.merges", document=_embedding(1 << 20))
    kinds = struct.pack("<i", kind) * len(texts)
    model = _array(I32, len(texts), kinds, "tokenizer.ggml.token_type", model)
    model = _array(STRING, len(texts), b"".join(map(_text, texts)), "tokenizer.ggml.tokens", model)
    return replace(
        model, pairs=[pair for pair in model.pairs if not pair.key.endswith((b".eos_token_id", b".bos_token_id"))]
    )


def _repeated(place: int, key: bytes, text: bytes) -> Document:
    """One text of an array is another."""
    pairs = list(_MODEL.pairs)
    index = next(index for index, pair in enumerate(pairs) if pair.key == key)
    items = list(pairs[index].value.items)
    items[place : place + 2] = [text, text]
    pairs[index] = replace(pairs[index], value=Array(STRING, tuple(items)))
    return replace(_MODEL, pairs=pairs)


_WIDE = "🐟".encode() + b"a" * 7  # four bytes for each character, for the sake of one


def _numbered(count: int, text: bytes) -> list[bytes]:
    """Texts that are all different, and not in order."""
    return [text % (index * 2_654_435_761 % 2**32) for index in range(count)]


def _pairs(count: int) -> Document:
    return replace(_MODEL, pairs=[*_MODEL.pairs, *(Pair(b"%d" % index, F64, 1.5) for index in range(count))])


def _infos(count: int) -> list[Info]:
    return [Info(b"%d" % index, (8,), 0, len(_MODEL.data) + 32 * index) for index in range(count)]


LARGE = {
    "numbers": Hostile("an array that the file has room for", "file", lambda: _array(I16, 1 << 31), 8 * GIB),
    "bytes": Hostile("eight bytes a number as a list", "file", lambda: _array(U8, 1 << 32), 8 * GIB),
    "flags": Hostile("the same by another way", "file", lambda: _array(BOOL, 1 << 32), 8 * GIB),
    "empty texts": Hostile("zeros are empty texts", "file", lambda: _array(STRING, 1 << 29), 8 * GIB),
    "a text": Hostile("zeros are UTF-8", "file", lambda: _array(STRING, 1, _text(b"", 4 * GIB)), 8 * GIB),
    "most numbers": Hostile("36 bytes each", "sound", lambda: _array(I16, 2_096_000, bytes(range(1, 251)) * 16_768)),
    "short texts": Hostile("each an object", "sound", lambda: _array(STRING, 2_096_000, _text(b"ab") * 2_096_000)),
    "wide texts": Hostile("each wide, too", "sound", lambda: _array(STRING, 1_740_000, _text(_WIDE) * 1_740_000)),
    "a wide text": Hostile("fourfold", "sound", lambda: _with("x", STRING, _WIDE * (2 << 20))),
    "keys": Hostile("each an entry of a dictionary", "sound", lambda: _pairs(32_000)),
    "more keys": Hostile("more than any model has", "file", lambda: _pairs(33_000)),
    "more tensors": Hostile("likewise", "file", lambda: replace(_MODEL, infos=_infos(33_000)), 2 << 20),
    "tensors": Hostile(
        "each an object, and layers for all of them",
        "model",
        lambda: _with("qwen2.block_count", U32, 32_000, replace(_MODEL, infos=[*_MODEL.infos, *_infos(32_000)])),
        2 << 20,
    ),
    "factors": Hostile("they become numbers", "model", lambda: _with_tensor(b"rope_freqs.weight", 1 << 28), 2 * GIB),
    "rows": Hostile("ids that stand for no text", "model", lambda: _embedding(1 << 28), 2 * GIB),
    "padding rows": Hostile("a million of them", "sound", lambda: _embedding(1 << 20), 8 << 20),
    "control tokens": Hostile(
        "what finds them in a text takes eighty times their bytes",
        "tokenizer",
        lambda: _vocabulary(_numbered(1 << 17, b"%060d"), 3),
        8 << 20,
    ),
    "a control token": Hostile(
        "the same at once", "tokenizer", lambda: _vocabulary([b"a", b"b" * (30 << 20)], 3), 8 << 20
    ),
    "a vocabulary": Hostile(
        "three times the largest", "forward", lambda: _vocabulary(_numbered(700_000, b"%08x"), 1), 8 << 20
    ),
    "context": Hostile("nothing is made for it", "sound", lambda: _with("qwen2.context_length", U32, 1 << 20)),
}
"""Files that look large, or become so."""


def _long(stage: str, make: Callable[[], Document], zeros: int = 0) -> Hostile:
    return Hostile("a message would be long, and of many lines", stage, make, zeros)


def _long_value(stage: str, key: str) -> Hostile:
    return _long(stage, lambda: _with(key, STRING, _LONG))


SMALL = {
    "key": _long("file", lambda: _array(13, 0, key=_LONG.decode())),
    "key twice": _long("file", lambda: replace(_MODEL, pairs=[Pair(_LONG, F32, 0.0)] * 2)),
    "alignment": _long_value("file", "general.alignment"),
    "name twice": _long("file", lambda: replace(_MODEL, infos=[Info(_LONG, (1,), 0, 0)] * 2)),
    "name": _long("model", lambda: _with_tensor(_LONG, 4), 64),
    "architecture": _long_value("model", "general.architecture"),
    "architectures": _long("model", lambda: _with("general.architecture", ARRAY, Array(STRING, (_LONG,) * 9))),
    "rope": _long_value("model", "qwen2.rope.scaling.type"),
    "tokenizer": _long_value("tokenizer", "tokenizer.ggml.model"),
    "pre-tokenizer": _long_value("tokenizer", "tokenizer.ggml.pre"),
    "token twice": _long("tokenizer", lambda: _repeated(3, b"tokenizer.ggml.tokens", _LONG)),
    "merge twice": _long("tokenizer", lambda: _repeated(3, b"tokenizer.ggml.merges", _LONG + b" a")),
    "merge": _long("tokenizer", lambda: _array(STRING, 1, _text(_LONG + b" a"), "tokenizer.ggml.merges")),
    "template": Hostile(
        "a loop, which only a chat may run",
        "sound",
        lambda: _with("tokenizer.chat_template", STRING, b"{% for i in range(9**9) %}{{ i.__class__ }}{% endfor %}"),
    ),
}
"""Files whose errors would be long, or not of one line."""

CORPUS = LARGE | SMALL
SLOW = ["short texts", "wide texts", "a wide text", "keys", "tensors", "control tokens", "a vocabulary"]
"""Half a second each, and more."""
