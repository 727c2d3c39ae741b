"""Writes models with random weights in the shapes of real ones, so that their speed can be measured without them.

What a forward costs depends on shapes and weight types alone. What the models say is noise: nothing about acceptance or
text can be learnt from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pilotfish.formats.gguf import GGUFFile

Q4_K, Q6_K, F32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.F32


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model whose output matrix is its embedding; head_dim is 128."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int = 8


HEAD_DIM = 128
QWEN3_0_6B = Shape(num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16)
QWEN3_1_7B = Shape(num_layers=28, hidden_size=2048, intermediate_size=6144, num_heads=16)
QWEN3_4B = Shape(num_layers=36, hidden_size=2560, intermediate_size=9728, num_heads=32)
PAIRS = {"qwen3-1.7b": (QWEN3_1_7B, QWEN3_0_6B), "qwen3-4b": (QWEN3_4B, QWEN3_0_6B)}
"""By the name of the target: target and draft model."""


def write_random_model(path: Path, shape: Shape, tokenizer: GGUFFile, seed: int) -> None:
    """Writes `shape` with weights in the mix of types that llama.cpp calls Q4_K_M, and another file's tokenizer."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in tokenizer.metadata.items():
        if key.startswith("tokenizer."):
            element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), element)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, rng.normal(1, 0.1, size).astype(np.float32), raw_dtype=F32)

    def matrix(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType = Q4_K) -> None:
        writer.add_tensor(name, random_blocks(rng, kind, rows, columns), raw_dtype=kind)

    tokens = tokenizer.metadata["tokenizer.ggml.tokens"]
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    matrix("token_embd.weight", len(tokens), hidden, Q6_K)
    vector("output_norm.weight", hidden)
    for index in range(shape.num_layers):
        layer, more_bits = f"blk.{index}", Q6_K if has_more_bits(index, shape.num_layers) else Q4_K
        for part, size in (("attn", hidden), ("attn_q", HEAD_DIM), ("attn_k", HEAD_DIM), ("ffn", hidden)):
            vector(f"{layer}.{part}_norm.weight", size)
        matrix(f"{layer}.attn_q.weight", q_size, hidden)
        matrix(f"{layer}.attn_k.weight", kv_size, hidden)
        matrix(f"{layer}.attn_v.weight", kv_size, hidden, more_bits)
        matrix(f"{layer}.attn_output.weight", hidden, q_size)
        matrix(f"{layer}.ffn_gate.weight", inner, hidden)
        matrix(f"{layer}.ffn_up.weight", inner, hidden)
        matrix(f"{layer}.ffn_down.weight", hidden, inner, more_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M gives the value and down projections of a layer six bits (llama.cpp's `use_more_bits`)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def random_blocks(
    rng: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int, columns: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Blocks of random codes, uint8 [rows, row_bytes]: weights with a mean near 0 and a spread of about columns^-½."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(rng.bytes(rows * columns // block_size * block_bytes), np.uint8).reshape(-1, block_bytes)
    blocks = blocks.copy()
    scale_at, spread = (0, 242) if kind is Q4_K else (208, 1370)  # the spread of weights whose scale is 1
    scale = np.float16(columns**-0.5 / spread)
    blocks[:, scale_at : scale_at + 2] = np.array([scale]).view(np.uint8)
    if kind is Q4_K:
        blocks[:, 2:4] = np.array([7.5 * scale], np.float16).view(np.uint8)  # the minimum that makes the mean 0
    return blocks.reshape(rows, -1)
