"""Hostile Hugging Face folders: case n is always the same files, a sound tiny model after mutations of its JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any

from tiny_models import ARCHITECTURES, tiny_config, tiny_metadata, tiny_tensors

from pilotfish.tokenizer.split_rules import SPLIT_RULES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PARTS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Absent from the sound configs, but looked at.
EXTRA_KEYS = (
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "layer_types",
    "use_sliding_window", "sliding_window", "attention_bias", "mlp_bias", "quantization", "quantization_config",
    "bos_token", "eos_token", "bos_token_id", "eos_token_id", "add_bos_token", "chat_template", "normalizer",
    "post_processor", "type", "__metadata__", "dtype", "shape", "data_offsets", "rope_type", "factor",
)  # fmt: skip
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = "\n\x1b[2J\u2028" * 4000
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
VALUES = (
    None, True, False, 0, 1, 2, 3, -1, 2**20, 2**20 + 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**400, 0.0, -0.5, 1.0,
    1.5, 1e-300, 1e308, float("nan"), float("inf"), "", "a", "llama3", "BPE", "ByteLevel", "F32", "BF16", "U32",
    "F8_E4M3", "\ud800", "\0", LONG, [], [0], [0, 0], [1, 2], [2**63, 2**64], ["a", "b"], [[]] * 99, {}, {"a": 1},
    {"type": "Sequence"}, {"bits": 4, "group_size": 32}, ROPE, DEEP, "../../../etc/passwd.safetensors",
)  # fmt: skip

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


class Folder:
    """The JSON files, and the safetensors files as (header, data)."""

    def __init__(self, documents: dict[str, Any], weights: dict[str, tuple[dict[str, Any], bytes]]) -> None:
        self.documents = documents
        self.weights = weights

    def values(self) -> dict[str, Any]:
        return self.documents | {name: header for name, (header, _) in self.weights.items()}


@cache
def sound(architecture: str, sharded: bool, quantized: bool) -> Folder:
    """A whole model; quantised as MLX does it, with codes and scales that mean nothing."""
    size = 32 if quantized else 4
    config = tiny_config(
        architecture, num_layers=1, hidden_size=size, intermediate_size=size, num_heads=2, num_kv_heads=1,
        head_dim=size // 2,
    )  # fmt: skip
    tensors: Tensors = {}
    for name, tensor in tiny_tensors(config, output="untied").items():
        *layer, part, kind = name.split(".")
        module = f"{f'model.layers.{layer[1]}.' if layer else ''}{PARTS[part]}"
        values = tensor.floats()
        if quantized and values.ndim == 2:
            rows = len(values)
            tensors[f"{module}.weight"] = ("U32", (rows, size // 8), bytes(range(size // 2)) * rows)
            for scale in ("scales", "biases"):
                tensors[f"{module}.{scale}"] = ("F16", (rows, size // 32), struct.pack("<e", 0.1) * rows)
        else:
            tensors[f"{module}.{kind}"] = ("F32", values.shape, values.tobytes())
    documents: dict[str, Any] = {
        "config.json": {
            "architectures": [CLASSES[architecture]], "model_type": architecture, "hidden_act": "silu",
            "num_hidden_layers": 1, "hidden_size": size, "intermediate_size": size, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": size // 2, "vocab_size": config.vocab_size,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "tie_word_embeddings": False,
        },
        "generation_config.json": {"eos_token_id": [267, 265], "bos_token_id": 265},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"},
        "tokenizer.json": _tokenizer(tiny_metadata(config)),
    }  # fmt: skip
    if quantized:
        documents["config.json"]["quantization"] = {"bits": 4, "group_size": 32, "model.norm": False}
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]} if sharded else {SINGLE: names}
    if sharded:
        weight_map = {name: shard for shard, held in shards.items() for name in held}
        documents[INDEX] = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return Folder(documents, {shard: _shard({name: tensors[name] for name in held}) for shard, held in shards.items()})


def _shard(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return header, data


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {kind: [index for index, found in enumerate(kinds) if found == kind] for kind in (1, 3)}
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLIT_RULES["qwen2"].pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "added_tokens": [{"id": index, "content": tokens[index], "special": True} for index in ids[3]],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "ByteLevel"},
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE", "ignore_merges": False, "vocab": {tokens[index]: index for index in ids[1]},
            "merges": [merge.split() for merge in metadata["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


# -- mutations ----------------------------------------------------------------------------------------------------


def _places(value: Any, rng: Random) -> Iterator[tuple[Any, Any]]:
    """One way down into a document, as (container, key or index)."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        yield value, key
        value = value[key]


def change_value(folder: Folder, rng: Random) -> None:
    """Something in a document becomes something else, goes, or moves; or a key comes."""
    places = list(_places(rng.choice(list(folder.values().values())), rng))
    if not places:
        return
    container, key = rng.choice(places)
    old = container[key]
    how = rng.randrange(6)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[rng.choice((LONG, "", "\ud800", *EXTRA_KEYS))] = container.pop(key)
    elif how == 2 and isinstance(container, list):
        container.insert(key, old)
    elif how == 3 and isinstance(old, int) and not isinstance(old, bool):
        container[key] = old + rng.choice((-1, 1, 4, 128, -old))
    else:
        container[key] = rng.choice(VALUES)


def add_key(folder: Folder, rng: Random) -> None:
    """A key that a reader may look at, in one of the small documents."""
    names = [name for name in folder.documents if name not in ("tokenizer.json", INDEX)]
    if names and isinstance(document := folder.documents[rng.choice(names)], dict):
        document[rng.choice(EXTRA_KEYS)] = rng.choice(VALUES)


def change_tensor(folder: Folder, rng: Random) -> None:
    """A tensor gets another's place, shape, dtype or name, or comes to lie elsewhere."""
    header, _ = folder.weights[rng.choice(list(folder.weights))]
    entries = [name for name, entry in header.items() if isinstance(entry, dict) and "shape" in entry]
    if len(entries) < 2:
        return
    name, other = rng.sample(entries, 2)
    part = rng.choice(("dtype", "shape", "data_offsets", "all", "name"))
    if part == "name":
        header[rng.choice(("model.norm.bias", LONG, "lm_head.scales", "\ud800", f"{other}s"))] = header.pop(name)
    elif part == "all":
        header[name] = deepcopy(header[other])
    else:
        header[name][part] = deepcopy(header[other].get(part))


def _text(document: Any, rng: Random) -> bytes:
    """The document as JSON, at times with a key that is there twice."""
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.03 and text.startswith(b'{"'):
        key = text[1 : text.index(b'":') + 2] if b'":' in text else b'"a":'
        text = b"{" + key + b" 0, " + text[1:]
    return text


def _damage(content: bytes, rng: Random) -> bytes:
    """Cut, spliced, flipped, or with another header length."""
    if not content:
        return content
    at, copy = rng.randrange(min(len(content), 4096)), bytearray(content)
    how = rng.randrange(5)
    if how == 0:
        del copy[rng.choice((at, 0, 7, 8, 9, len(copy) - 1)) :]
    elif how == 1:
        copy[at : at + rng.randrange(9)] = copy[rng.randrange(len(copy)) :][: rng.randrange(64)]
    elif how == 2:
        copy[at] ^= rng.choice((1 << rng.randrange(8), 255))
    elif how == 3:
        length = int.from_bytes(copy[:8], "little")
        edges = (0, 1, length - 1, length + 1, len(copy), len(copy) - 8, 2**31, 2**32, 2**63, 2**64 - 1)
        copy[:8] = (rng.choice(edges) % 2**64).to_bytes(8, "little")
    else:
        copy = bytearray(
            rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b"{}", b"null", b"\xef\xbb\xbf{}"))
        )
    return bytes(copy)


def case(number: int) -> dict[str, bytes]:
    """The files of one case, by name."""
    rng = Random(number)
    base = sound(rng.choice(ARCHITECTURES), rng.random() < 0.3, rng.random() < 0.3)
    folder = Folder(deepcopy(base.documents), deepcopy(base.weights))
    for _ in range(rng.choice((0, 1, 1, 2))):
        rng.choice((change_value, change_value, add_key, change_tensor))(folder, rng)
    files = {name: _text(document, rng) for name, document in folder.documents.items()}
    for name, (header, data) in folder.weights.items():
        text = _text(header, rng)
        files[name] = struct.pack("<Q", len(text)) + text + data
    if rng.random() < 0.3:
        name = rng.choice(list(files))
        files[name] = _damage(files[name], rng)
    if rng.random() < 0.03:
        del files[rng.choice(list(files))]
    return files
