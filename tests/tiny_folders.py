"""Tiny seeded models as Hugging Face folders: single or sharded, in any float dtype, plain or quantised by MLX.

`write_tiny_folder` takes the config and weights that `tiny_models` makes; what the folder then holds, as float32 by
GGUF's names, is its answer: casting and quantising change the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save_file
from tiny_models import Weights, float_weights
from torch import Tensor

from pilotfish.config import ModelConfig

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""For the eight frequencies of `tiny_config`: some are kept, one lies on the ramp, some are divided by eight."""
_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

ABSENT = object()

FolderTensors = dict[str, Tensor]


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    *layer, part, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_HF_NAMES[part]}.{kind}"


def hf_config(config: ModelConfig, values: Mapping[str, object] | None = None) -> dict[str, object]:
    """The config.json of `config`, without rope scaling; `values` change it, and ABSENT takes a key out."""
    found: dict[str, object] = {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
    }
    return {key: value for key, value in (found | dict(values or {})).items() if value is not ABSENT}


def folder_tensors(
    tensors: Weights, dtype: str = "F32", quantization: Mapping[str, Any] | None = None
) -> tuple[FolderTensors, dict[str, np.ndarray[Any, Any]]]:
    """What a folder holds of `tensors` under Hugging Face's names, and its float32 values under GGUF's.

    Every matrix is quantised as `quantization` says, by `mlx`, unless that has an object or false for its module.
    """
    stored: FolderTensors = {}
    floats: dict[str, np.ndarray[Any, Any]] = {}
    for name, values in float_weights(tensors).items():
        if name == "rope_freqs.weight" or (name == "output.weight" and name not in tensors):
            continue
        values = torch.tensor(values).to(DTYPES[dtype])
        module, _, kind = hf_name(name).rpartition(".")
        scheme = (quantization or {}).get(module, quantization)
        if not scheme or values.ndim == 1:
            stored[f"{module}.{kind}"] = values
            floats[name] = values.float().numpy()
            continue
        options = {"group_size": scheme["group_size"], "bits": scheme["bits"]}
        parts = mx.quantize(_to_mlx(values), **options)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[f"{module}.{part}"] = _to_torch(array)
        # In float32: mlx rounds to the dtype of the scales otherwise.
        codes, scales, biases = parts
        dequantized = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), **options)
        floats[name] = np.array(dequantized)
    return stored, floats


def write_tiny_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Weights,
    *,
    dtype: str = "F32",
    sharded: bool = False,
    quantization: Mapping[str, Any] | None = None,
    values: Mapping[str, object] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Writes config.json and the weights; `values` change the config. Returns the float32 weights by GGUF name."""
    stored, floats = folder_tensors(tensors, dtype, quantization)
    quantized = {} if quantization is None else {"quantization": quantization, "quantization_config": quantization}
    write_folder(folder, hf_config(config, {**quantized, **(values or {})}), stored, sharded=sharded)
    return floats


def write_folder(folder: Path, config: Mapping[str, object], stored: FolderTensors, *, sharded: bool = False) -> Path:
    """Any config.json and tensors; sharded, they are dealt out to three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for index in range(3):
        shard = f"model-0000{index + 1}-of-00003.safetensors"
        part = {name: tensor for place, (name, tensor) in enumerate(stored.items()) if place % 3 == index}
        save_file(part, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    total = sum(tensor.nbytes for tensor in stored.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)
    return folder


def _to_mlx(values: Tensor) -> mx.array:
    if values.dtype is torch.bfloat16:
        return mx.array(values.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(values.numpy())


def _to_torch(array: mx.array) -> Tensor:
    if array.dtype == mx.bfloat16:
        return torch.tensor(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.tensor(np.array(array))
