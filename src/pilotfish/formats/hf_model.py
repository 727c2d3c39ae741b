"""Turns a Hugging Face folder, MLX-quantised or not, into a model's config and its checked tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.config import ModelConfig
from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.config_values import ConfigValues
from pilotfish.formats.mlx import join_quantized, read_quantization
from pilotfish.formats.model_checks import (
    RECURRENT_LAYERS,
    WINDOWED_LAYERS,
    check_architecture,
    check_heads,
    check_tensors,
    not_rewindable,
    tensor_shapes,
)
from pilotfish.formats.rope_config import read_rope
from pilotfish.formats.safetensors_folder import read_weights
from pilotfish.json_files import read_object
from pilotfish.types import RawTensor

CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 4 << 20
"""One of a few KB; MLX's may name every module."""


@dataclass(frozen=True)
class _Architecture:
    class_name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Where the config names none; None stands for hidden_size / num_attention_heads."""
    must_be_false: tuple[str, ...] = ()
    """Options of the architecture that add biases, or (in mlx-lm) pair the rotated values otherwise."""


# Defaults as in transformers 5.24; tie_word_embeddings is false in all three.
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", must_be_false=("attention_bias", "mlp_bias", "rope_traditional")),
    "qwen2": _Architecture("Qwen2ForCausalLM", qkv_bias=True, must_be_false=("rope_traditional",)),
    "qwen3": _Architecture("Qwen3ForCausalLM", qk_norm=True, head_dim=128, must_be_false=("attention_bias",)),
}
_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_REASONS = dict.fromkeys(("linear_attention", "recurrent", "mamba", "conv"), RECURRENT_LAYERS) | dict.fromkeys(
    ("sliding_attention", "chunked_attention"), WINDOWED_LAYERS
)
# Rotary frequencies that old converters stored: transformers computes its own too.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_COMPARED_BYTES = 1 << 24


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, RawTensor]]:
    """Config and tensors, under GGUF's names; q and k rows are in the order of half-split rotary pairs as they are.

    `output.weight` is always there: a tied model shares the embedding matrix. One that says it is tied and has an
    `lm_head.weight` all the same must hold the same bytes in both, since engines differ in which of them counts.

    Raises `ModelNotFoundError` where a file is missing, `FormatError` for missing or impossible values, files, tensors
    and shapes, `UnsupportedModelError` for an architecture, an option, a quantisation or a tensor that this version
    cannot run exactly.
    """
    path = folder / CONFIG_FILE
    values = read_object(path, _MAX_CONFIG_BYTES)
    config = read_config(path, values)
    tied = ConfigValues(f"{path}:", values).flag("tie_word_embeddings", False)
    quantization = read_quantization(path, values)
    stored = {name: tensor for name, tensor in read_weights(folder).items() if not _IGNORED.fullmatch(name)}
    found = join_quantized(stored, quantization)
    check_tensors(folder, {name: raw.shape for name, raw in found.items()}, config, hf_name)
    tensors = {name: found[hf_name(name)] for name in tensor_shapes(config) if hf_name(name) in found}
    if tied:
        _tie(folder, tensors)
    elif "output.weight" not in tensors:
        raise FormatError(
            f"{folder} lacks the tensor 'lm_head.weight', and 'tie_word_embeddings' is not true in {path}"
        )
    return config, tensors


def hf_name(name: str) -> str:
    """GGUF's name of a tensor in Hugging Face's: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *layer, part, kind = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_PARTS[part]}.{kind}"


def read_config(path: Path, config: Mapping[str, object]) -> ModelConfig:
    """The `ModelConfig` that a config.json at `path` describes; raises as `read_folder` does."""
    check_architecture(path, config.get("model_type"), _ARCHITECTURES)
    name = str(config["model_type"])
    architecture = _ARCHITECTURES[name]
    values = ConfigValues(f"{path}:", config)
    if values.get("architectures", [architecture.class_name]) != [architecture.class_name]:
        raise UnsupportedModelError(
            f"{path}: 'architectures' is {brief(config['architectures'])}; of the type {name} only "
            f"{architecture.class_name} is supported"
        )
    num_layers, hidden_size = values.count("num_hidden_layers"), values.count("hidden_size")
    _refuse_what_cannot_be_rewound(path, values, num_layers)
    for key in architecture.must_be_false:
        if values.flag(key, False):
            raise UnsupportedModelError(f"{path}: {key!r} is true; this version runs only models where it is false")
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{path}: 'hidden_act' is {brief(config['hidden_act'])}; supported is silu")
    num_heads = values.count("num_attention_heads")
    num_kv_heads = values.count("num_key_value_heads", num_heads)
    head_dim = values.count("head_dim", architecture.head_dim or max(1, hidden_size // num_heads))
    check_heads(path, num_heads, num_kv_heads, head_dim)
    rope_theta, rope_factors = read_rope(path, config, head_dim)
    return ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=values.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=values.count("vocab_size"),
        context_length=values.count("max_position_embeddings"),
        rms_norm_eps=values.positive("rms_norm_eps"),
        rope_theta=rope_theta,
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        rope_factors=rope_factors,
    )


def _refuse_what_cannot_be_rewound(path: Path, values: ConfigValues, num_layers: int) -> None:
    if values.flag("use_sliding_window", False):
        raise not_rewindable(path, WINDOWED_LAYERS)
    layer_types = values.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise values.fail("layer_types", f"a list with a type for each of the {num_layers} layers")
    for layer_type in layer_types:
        reason = _LAYER_REASONS.get(layer_type) if isinstance(layer_type, str) else None
        if reason is not None:
            raise not_rewindable(path, reason)
        if layer_type != "full_attention":
            raise UnsupportedModelError(
                f"{path} has layers of the type {brief(layer_type)}; supported is full_attention"
            )


def _tie(folder: Path, tensors: dict[str, RawTensor]) -> None:
    embedding, output = tensors["token_embd.weight"], tensors.get("output.weight")
    tensors["output.weight"] = embedding
    if output is None:
        return
    if output.weight_type is not embedding.weight_type or not _equal(output.read(), embedding.read()):
        raise FormatError(
            f"{folder}: 'tie_word_embeddings' is true, but 'lm_head.weight' is not the embedding; set it to false in "
            f"{CONFIG_FILE} if 'lm_head.weight' is to count"
        )
    output.evict()
    embedding.evict()


def _equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Whether two uint8 matrices of one shape are equal; in pieces, since comparing makes a byte for each byte."""
    num_rows = max(1, _COMPARED_BYTES // first.shape[1])
    return all(
        np.array_equal(first[start : start + num_rows], second[start : start + num_rows])
        for start in range(0, len(first), num_rows)
    )
