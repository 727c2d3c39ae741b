"""The nastiest Hugging Face folders, each with the reason: what is refused where, or read although it looks absurd."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzzing_folders import INDEX, LONG, SINGLE, sound

_MODEL = sound("qwen2", sharded=False, quantized=False)


@dataclass(frozen=True)
class HostileFolder:
    """`stage` is where the folder must be refused."""

    reason: str
    stage: str
    make: Callable[[], dict[str, bytes]]


def _with(**raw: bytes) -> dict[str, bytes]:
    """The sound folder, with other bytes for some files; `_` stands for a point in their names."""
    files = {name: json.dumps(document).encode() for name, document in _MODEL.documents.items()}
    header, data = _MODEL.weights[SINGLE]
    files[SINGLE] = _shard(json.dumps(header).encode(), data)
    return files | raw


def _shard(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _json(count: int, value: bytes) -> bytes:
    return b'{"a":[' + value + (b"," + value) * (count - 1) + b"]}"


def _values(name: str, **values: Any) -> dict[str, bytes]:
    return _with(**{name: json.dumps(_MODEL.documents[name] | values).encode()})


def _header(entries: dict[str, Any], data: bytes = b"") -> dict[str, bytes]:
    return _with(**{SINGLE: _shard(json.dumps(entries).encode(), data)})


def _changed(name: str, **entry: object) -> dict[str, bytes]:
    """With other values for a tensor, or another tensor."""
    header, data = _MODEL.weights[SINGLE]
    return _header(header | {name: header.get(name, {}) | entry}, data)


def _index(weight_map: object) -> dict[str, bytes]:
    files = _with(**{INDEX: json.dumps({"weight_map": weight_map}).encode()})
    return {name: content for name, content in files.items() if name != SINGLE}


_MESSAGE = "a message would be long, and of many lines"
_TINY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
_ADDED = [{"id": 268 + index, "content": f"{index * 2_654_435_761 % 2**40:060}"} for index in range(1 << 15)]

_FOLDERS = {
    "header length": HostileFolder(
        "a number of 64 bits", "model", lambda: _with(**{SINGLE: _shard(b"{}", length=2**64 - 1)})
    ),
    "header of lists": HostileFolder(
        "64 bytes for two", "model", lambda: _with(**{SINGLE: _shard(_json(1_300_000, b"[]"))})
    ),
    "header of numbers": HostileFolder(
        "no tensors", "model", lambda: _with(**{SINGLE: _shard(_json(2_000_000, b"7"))})
    ),
    "deep header": HostileFolder("recursion", "model", lambda: _with(**{SINGLE: _shard(b'{"a":' * 500_000)})),
    "many tensors": HostileFolder(
        "each an object", "model",
        lambda: _header({str(index): _TINY | {"shape": [0], "data_offsets": [0, 0]} for index in range(60_000)}),
    ),
    "long shape": HostileFolder(
        _MESSAGE, "model",
        lambda: _changed("lm_head.weight", shape=[304, 4] + [1] * 500_000),
    ),
    "huge sizes": HostileFolder(
        "a product of a million digits", "model",
        lambda: _header({"lm_head.weight": _TINY | {"shape": [2**55] * 100_000}}, bytes(4)),
    ),
    "name": HostileFolder(_MESSAGE, "model", lambda: _changed(LONG[:250], shape=[0], dtype="F32", data_offsets=[0, 0])),
    "scales": HostileFolder(
        _MESSAGE, "model",
        lambda: _values("config.json", quantization={"bits": 4, "group_size": 32})
        | {SINGLE: _shard(json.dumps({"a\n\x7fb.scales": _TINY}).encode(), bytes(4))},
    ),
    "shard elsewhere": HostileFolder("a path", "model", lambda: _index({"a": "../../etc/passwd.safetensors"})),
    "shard": HostileFolder(_MESSAGE, "model", lambda: _index({LONG: LONG})),
    "layers": HostileFolder("a million", "model", lambda: _values("config.json", num_hidden_layers=2**20)),
    "layer types": HostileFolder(_MESSAGE, "model", lambda: _values("config.json", layer_types=[LONG])),
    "tokenizer of lists": HostileFolder(
        "64 bytes for two", "tokenizer", lambda: _with(**{"tokenizer.json": _json(6_000_000, b"[]")})
    ),
    "generation of lists": HostileFolder(
        "likewise", "tokenizer", lambda: _with(**{"generation_config.json": _json(6_000_000, b"[]")})
    ),
    "ids": HostileFolder(
        "an id that is far away is a long list", "tokenizer",
        lambda: _values("tokenizer.json", added_tokens=[{"id": 2**62, "content": "a b", "special": True}]),
    ),
    "added tokens": HostileFolder(
        "what finds them in a text takes eighty times their bytes", "tokenizer",
        lambda: _values("tokenizer.json", added_tokens=_MODEL.documents["tokenizer.json"]["added_tokens"] + _ADDED),
    ),
    "pattern": HostileFolder(
        "a regular expression that never ends", "tokenizer",
        lambda: _values("tokenizer.json", pre_tokenizer={
            "type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]}),
    ),
    "end of text": HostileFolder(_MESSAGE, "tokenizer", lambda: _values("tokenizer_config.json", eos_token=LONG)),
    "template": HostileFolder("a long text", "tokenizer", lambda: _with(**{"chat_template.jinja": b"a" * (2 << 20)})),
}  # fmt: skip
FOLDERS = {f"folder: {name}": folder for name, folder in _FOLDERS.items()}
