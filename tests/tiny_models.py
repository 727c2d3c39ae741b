"""Tiny seeded models as GGUF files: both architectures, every weight type, and a tokenizer that `pilotfish.load` takes.

A model is made in three steps, each of which a test may use alone: `tiny_config` gives its sizes, `tiny_tensors` its
weights (in the row order of Hugging Face, so that `float_weights` of them is what an oracle computes with) and
`write_tiny_model` the file, with the q and k rows of a llama permuted as llama.cpp's converter does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from pilotfish.config import ModelConfig
from pilotfish.types import WeightType

ARCHITECTURES = ("llama", "qwen2", "qwen3")
WEIGHT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Those of GGUF files."""
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
"""`gguf` cannot quantise to these, so their blocks are drawn at random; rows are multiples of 256 (`WIDE`)."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "head_dim": 32}
"""Changes to `tiny_config` under which every weight type fits."""
OUTPUTS = ("tied", "copy", "untied")
"""No output.weight; an output.weight equal to the embedding; one of its own."""

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "Ġ t")
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5

Weights = dict[str, "TinyTensor"]


@dataclass(frozen=True)
class TinyTensor:
    """A matrix [rows, row_bytes or columns] or a vector [columns], as a file holds it."""

    data: np.ndarray[Any, Any]
    kind: gguf.GGMLQuantizationType

    def floats(self) -> np.ndarray[Any, Any]:
        """float32 values, dequantised by the `gguf` package."""
        return gguf.dequantize(self.data, self.kind)


ROPE_FACTORS = (1.0, 1.0, 1.5, 2.25, 3.0, 5.0, 8.0, 8.0)
"""Such as Llama 3's scaling gives, for the head size of `tiny_config`."""


def tiny_config(architecture: str = "qwen2", **changes: Any) -> ModelConfig:
    """Two layers, two query heads to each key/value head, and no constant that happens to be a reader's default."""
    config = ModelConfig(
        architecture=architecture,
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=304,
        context_length=512,
        rms_norm_eps=float(np.float32(3e-5)),
        rope_theta=50000.0,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    return replace(config, **changes)


def tiny_tensors(
    config: ModelConfig,
    *,
    seed: int = 0,
    weight_type: str = "F32",
    tensor_types: Mapping[str, str] | None = None,
    output: str = "tied",
    noise: float = 0.0,
    noise_seed: int = 1,
) -> Weights:
    """Random weights by GGUF name, with the q and k rows in the order of Hugging Face.

    Matrices have `weight_type`, or what `tensor_types` says for the first of its keys that the name ends with;
    vectors are float32. What attention and feed-forward add outweighs the embedding, so that the argmax depends on
    the whole context. `noise` adds that share of each weight's own spread, from a seed of its own: two models that
    differ only in `noise` agree often, but not always. K types have no noise.
    """
    rng, noise_rng = np.random.default_rng(seed), np.random.default_rng(noise_seed)

    def vector(size: int, mean: float, spread: float) -> TinyTensor:
        values = rng.normal(mean, spread, size) + noise_rng.normal(0, noise * spread, size)
        return TinyTensor(values.astype(np.float32), gguf.GGMLQuantizationType.F32)

    def matrix(name: str, rows: int, columns: int, spread: float) -> TinyTensor:
        endings = (ending for ending in tensor_types or {} if name.endswith(ending))
        ending = next(endings, None)
        kind = gguf.GGMLQuantizationType[weight_type if ending is None else (tensor_types or {})[ending]]
        if kind.name in K_TYPES:
            if noise:
                raise ValueError("the blocks of K types are random: they take no noise")
            return TinyTensor(random_blocks(kind.name, rows, columns, rng, spread), kind)
        values = rng.normal(0, spread, (rows, columns)) + noise_rng.normal(0, noise * spread, (rows, columns))
        return TinyTensor(gguf.quantize(values.astype(np.float32), kind), kind)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"token_embd.weight": matrix("token_embd.weight", config.vocab_size, hidden, 0.3)}
    for index in range(config.num_layers):
        for part, (rows, columns) in {
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            name = f"blk.{index}.{part}.weight"
            tensors[name] = matrix(name, rows, columns, 1.5 * columns**-0.5)
            if config.qkv_bias and part in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{index}.{part}.bias"] = vector(rows, 0, 0.5)
        if config.qk_norm:
            for part in ("attn_q_norm", "attn_k_norm"):
                tensors[f"blk.{index}.{part}.weight"] = vector(config.head_dim, 1.5, 0.5)
        for part in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{index}.{part}.weight"] = vector(hidden, 1, 0.1)
    tensors["output_norm.weight"] = vector(hidden, 1, 0.1)
    if config.rope_factors is not None:
        factors = np.array(config.rope_factors, np.float32)
        tensors["rope_freqs.weight"] = TinyTensor(factors, gguf.GGMLQuantizationType.F32)
    if output == "copy":
        tensors["output.weight"] = tensors["token_embd.weight"]
    elif output == "untied":
        tensors["output.weight"] = matrix("output.weight", config.vocab_size, hidden, 0.3)
    elif output != "tied":
        raise ValueError(f"output is one of {', '.join(OUTPUTS)}, not {output!r}")
    return tensors


def float_weights(tensors: Weights) -> dict[str, np.ndarray[Any, Any]]:
    """The float32 values of `tensors`, with output.weight in any case."""
    weights = {name: tensor.floats() for name, tensor in tensors.items()}
    weights.setdefault("output.weight", weights["token_embd.weight"])
    return weights


def scale_dtype(weight_type: WeightType) -> torch.dtype:
    """The type of a block's scales and minima; MLX names end with it."""
    scale_types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return scale_types[weight_type.name.split("_")[2]] if weight_type.name.startswith("MLX") else torch.float16


def random_blocks(
    kind: str, rows: int, columns: int, rng: np.random.Generator, spread: float = 1.0
) -> np.ndarray[Any, Any]:
    """Rows of any block type with random codes, uint8 [rows, row_bytes]; weights have a mean near 0 and about `spread`.

    Every byte is random but the scales, which are finite and positive, and the minima.
    """
    weight_type = WeightType[kind]
    count = rows * (columns // weight_type.block_size)
    blocks = rng.integers(0, 256, (count, weight_type.block_bytes), dtype=np.uint8)
    dtype = scale_dtype(weight_type)
    # Where the scale stands, what to divide `spread` by, and how many scales a minimum is, which comes after it.
    scale_at, divisor, minimum = {
        "Q8_0": (0, 74, None),
        "Q4_0": (0, 4.6, None),
        "Q4_1": (0, 4.6, -7.5),
        "Q5_0": (0, 9.2, None),
        "Q5_1": (0, 9.2, -15.5),
        "Q4_K": (0, 242, 7.5),
        "Q5_K": (0, 484, 15.5),
        "Q6_K": (208, 1370, None),
        "MLX4": (0, 4.6, -7.5),
        "MLX8": (0, 74, -127.5),
    }[kind[:4]]
    scales = torch.from_numpy(spread / divisor * rng.uniform(0.5, 1.5, (count, 1))).to(dtype)
    minima_at, end = scale_at + dtype.itemsize, scale_at + 2 * dtype.itemsize
    blocks[:, scale_at:minima_at] = scales.view(torch.uint8)
    if minimum is not None:
        blocks[:, minima_at:end] = (minimum * scales).view(torch.uint8)
    return blocks.reshape(rows, -1)


def permute_rows(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's `convert_hf_to_gguf.py` does to the q and k matrices of a llama: whole rows move."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiny_metadata(
    config: ModelConfig, *, chat_template: str | None = CHAT_TEMPLATE, num_unused: int = 2
) -> dict[str, object]:
    """A header: the config, and a byte-level vocabulary, which is smaller than the embedding (padding rows follow).

    The ids: 256 bytes, the merged words, <|endoftext|>, <|im_start|>, <|im_end|> (EOS), `num_unused` unused ones.
    """
    name = config.architecture
    words = ["".join(merge.split()) for merge in _MERGES]
    normal = [*_byte_alphabet(), *words]
    tokens = [*normal, END_OF_TEXT, IM_START, IM_END, *(f"[PAD{index}]" for index in range(num_unused))]
    return {
        "general.architecture": name,
        "general.name": f"tiny {name}",
        f"{name}.block_count": config.num_layers,
        f"{name}.context_length": config.context_length,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_heads,
        f"{name}.attention.head_count_kv": config.num_kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm" if name == "llama" else "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * len(normal) + [_CONTROL] * 3 + [_UNUSED] * num_unused,
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": len(normal),
        "tokenizer.ggml.eos_token_id": len(normal) + 2,
        "tokenizer.ggml.add_bos_token": False,
    } | ({} if chat_template is None else {"tokenizer.chat_template": chat_template})


def write_tiny_model(
    path: Path,
    architecture: str = "qwen2",
    *,
    config: ModelConfig | None = None,
    tensors: Weights | None = None,
    metadata: Mapping[str, object] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    **weights: Any,
) -> Path:
    """Writes a whole model to `path` and returns it.

    `config` is `tiny_config(architecture)` unless given, `tensors` are `tiny_tensors(config, **weights)` unless given.
    `metadata` changes the header's values; None takes a key out.
    """
    config = config or tiny_config(architecture)
    tensors = tiny_tensors(config, **weights) if tensors is None else tensors
    if config.architecture == "llama":
        tensors = tensors | {
            name: replace(tensor, data=permute_rows(tensor.data, num_heads))
            for part, num_heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads))
            for name, tensor in tensors.items()
            if name.endswith(f"{part}.weight")
        }
    values = tiny_metadata(config, chat_template=chat_template) | dict(metadata or {})
    return write_gguf(path, {key: value for key, value in values.items() if value is not None}, tensors)


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Weights) -> Path:
    """Any header and tensors, by the `gguf` package: integers become uint32 (int64 if need be), floats float32."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        kind = _value_type(value)
        element = _value_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, element)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's intra-op threads for a while. One is by far the fastest on models this small, above all on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _value_type(value: object) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32 if 0 <= value < 1 << 32 else gguf.GGUFValueType.INT64
    kinds = {float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}
    return kinds[type(value)]


@cache
def _byte_alphabet() -> tuple[str, ...]:
    """GPT-2's `bytes_to_unicode` in the order of its own vocabulary: printable bytes first, then the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return (*map(chr, printable), *(chr(256 + index) for index in range(256 - len(printable))))
