"""Turns an open GGUF file into a model's config and its tensors, each checked against the shape the config demands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pilotfish.config import ModelConfig
from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.config_values import MAX_SIZE, ConfigValues
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.model_checks import (
    RECURRENT_LAYERS,
    WINDOWED_LAYERS,
    check_architecture,
    check_heads,
    check_rope_factors,
    check_tensors,
    not_rewindable,
)
from pilotfish.types import RawTensor, WeightType


@dataclass(frozen=True)
class _Architecture:
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_factors: bool = False
    """Whether a file may have factors for the rotary frequencies (Llama 3's)."""
    permuted_qk: bool = False
    """Whether the converter stored q and k rows in the order of interleaved rotary pairs (it does so for llama)."""


_ARCHITECTURES = {
    "llama": _Architecture(rope_factors=True, permuted_qk=True),
    "qwen2": _Architecture(qkv_bias=True),
    "qwen3": _Architecture(qk_norm=True),
}
# Keys that change what a forward computes, with the value under which they change nothing.
_MUST_BE_OFF: dict[str, object] = {
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
    "rope.scaling.factor": 1.0,
    "attention.scale": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "expert_count": 0,
}

_ROPE_FACTORS = "rope_freqs.weight"
"""Where a converter puts what Llama 3's scaling makes of the rotary frequencies."""


def read_model(file: GGUFFile) -> tuple[ModelConfig, dict[str, RawTensor]]:
    """Config and tensors, under their GGUF names, with q and k rows in the order of half-split rotary pairs.

    `output.weight` is always there: a file without one shares the embedding matrix (tied).

    Raises `FormatError` for missing or impossible values and shapes, `UnsupportedModelError` for an architecture, an
    option or a tensor that this version cannot run exactly.
    """
    name = file.metadata.get("general.architecture")
    check_architecture(file.path, name, _ARCHITECTURES)
    architecture = _ARCHITECTURES[str(name)]
    config = _Config(file, str(name)).read(architecture)
    not_weights = {_ROPE_FACTORS} if architecture.rope_factors else set()
    tensors = {tensor_name: file.tensor(tensor_name) for tensor_name in file.tensor_names - not_weights}
    check_tensors(file.path, {tensor_name: raw.shape for tensor_name, raw in tensors.items()}, config)
    if architecture.permuted_qk:
        for tensor_name, raw in tensors.items():
            if tensor_name.endswith(("attn_q.weight", "attn_k.weight")):
                tensors[tensor_name] = unpermute_rows(raw, config.head_dim)
    tensors.setdefault("output.weight", tensors["token_embd.weight"])
    return config, tensors


def unpermute_rows(raw: RawTensor, head_dim: int) -> RawTensor:
    """Rows of each head from the order (0, d/2, 1, d/2 + 1, …) back to (0, 1, …): whole rows move."""

    def read() -> np.ndarray[Any, Any]:
        data = raw.read()
        moved: np.ndarray[Any, Any] = (
            data.reshape(-1, head_dim // 2, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        )
        return moved

    return replace(raw, read=read)


class _Config:
    """Reads the architecture's own keys out of the metadata."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self.metadata: Mapping[str, object] = file.metadata
        self.values = ConfigValues(f"{file.path}: metadata", file.metadata)

    def count(self, key: str, default: int | None = None) -> int:
        return self.values.count(f"{self.architecture}.{key}", default)

    def positive(self, key: str, default: float | None = None) -> float:
        return self.values.positive(f"{self.architecture}.{key}", default)

    def rope_factors(self, head_dim: int) -> tuple[float, ...] | None:
        if _ROPE_FACTORS not in self.file.tensor_names:
            return None
        raw = self.file.tensor(_ROPE_FACTORS)
        if raw.weight_type is not WeightType.F32 or raw.shape != (head_dim // 2,):
            raise FormatError(
                f"{self.file.path}: tensor {_ROPE_FACTORS!r} has the type {raw.weight_type.label} and the shape "
                f"{raw.shape}, where F32 and {(head_dim // 2,)} are needed"
            )
        factors = tuple(raw.read().copy().view(np.float32)[0].tolist())
        check_rope_factors(self.file.path, factors, head_dim)
        return factors

    def refuse_what_cannot_be_rewound(self) -> None:
        if any(key.startswith(f"{self.architecture}.ssm.") for key in self.metadata):
            raise not_rewindable(self.file.path, RECURRENT_LAYERS)
        if self.metadata.get(f"{self.architecture}.attention.sliding_window", 0) != 0:
            raise not_rewindable(self.file.path, WINDOWED_LAYERS)

    def read(self, architecture: _Architecture) -> ModelConfig:
        self.refuse_what_cannot_be_rewound()
        for key, off in _MUST_BE_OFF.items():
            value = self.metadata.get(f"{self.architecture}.{key}", off)
            if value != off:
                raise UnsupportedModelError(
                    f"{self.file.path}: '{self.architecture}.{key}' is {brief(value)}; this version runs only models "
                    f"where it is {off!r} or absent"
                )
        if "token_embd.weight" not in self.file.tensor_names:
            raise FormatError(f"{self.file.path} lacks the tensor 'token_embd.weight'")
        vocab_size = self.file.tensor("token_embd.weight").shape[0]
        if vocab_size > MAX_SIZE:
            raise FormatError(f"{self.file.path}: the embedding has {vocab_size} rows; {MAX_SIZE} are possible")
        hidden_size, num_heads = self.count("embedding_length"), self.count("attention.head_count")
        num_kv_heads = self.count("attention.head_count_kv", num_heads)
        head_dim = self.count("attention.key_length", max(1, hidden_size // num_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.count(key, head_dim) != head_dim:
                raise UnsupportedModelError(
                    f"{self.file.path}: '{self.architecture}.{key}' is {self.count(key)}, "
                    f"unlike the head size {head_dim}"
                )
        check_heads(self.file.path, num_heads, num_kv_heads, head_dim)
        return ModelConfig(
            architecture=self.architecture,
            num_layers=self.count("block_count"),
            hidden_size=hidden_size,
            intermediate_size=self.count("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_length=self.count("context_length"),
            rms_norm_eps=self.positive("attention.layer_norm_rms_epsilon"),
            rope_theta=self.positive("rope.freq_base", 10000.0),
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            rope_factors=self.rope_factors(head_dim) if architecture.rope_factors else None,
        )
