"""Turns an open GGUF file into a model's config and its tensors, each checked against the shape the config demands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short

from pilotfish.config import MAX_HEAD_DIM, MAX_HEADS, ModelConfig
from pilotfish.errors import FormatError, UnsupportedModelError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.types import RawTensor

_MAX_SIZE = 1 << 20  # no count in a config of ours is beyond; larger ones are damage, and would cost memory


@dataclass(frozen=True)
class _Architecture:
    qkv_bias: bool
    permuted_qk: bool
    """Whether the converter stored q and k rows in the order of interleaved rotary pairs (it does so for llama)."""


_ARCHITECTURES = {
    "llama": _Architecture(qkv_bias=False, permuted_qk=True),
    "qwen2": _Architecture(qkv_bias=True, permuted_qk=False),
}
# Keys that change what a forward computes, with the value under which they change nothing.
_MUST_BE_OFF: dict[str, object] = {
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
    "rope.scaling.factor": 1.0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "expert_count": 0,
}


def read_model(file: GGUFFile) -> tuple[ModelConfig, dict[str, RawTensor]]:
    """Config and tensors, under their GGUF names, with q and k rows in the order of half-split rotary pairs.

    `output.weight` is always there: a file without one shares the embedding matrix (tied).

    Raises `FormatError` for missing or impossible values and shapes, `UnsupportedModelError` for an architecture, an
    option or a tensor that this version cannot run exactly.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds the architecture {short(name)}; supported are {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[name]
    config = _Config(file, name).read(architecture)
    if config.num_layers > len(file.tensor_names):  # before anything is made for each layer
        raise FormatError(f"{file.path} announces {config.num_layers} layers, but has {len(file.tensor_names)} tensors")
    shapes = tensor_shapes(config)
    missing = sorted(shapes.keys() - file.tensor_names - {"output.weight"})
    if missing:
        raise FormatError(f"{file.path} lacks the tensor {missing[0]!r} ({len(missing)} missing in all)")
    extra = sorted(file.tensor_names - shapes.keys())
    if extra:
        raise UnsupportedModelError(f"{file.path} has the tensor {extra[0]!r}, which a {name} model does not use here")

    tensors: dict[str, RawTensor] = {}
    for tensor_name in file.tensor_names:
        raw = file.tensor(tensor_name)
        if raw.shape != shapes[tensor_name]:
            raise FormatError(
                f"{file.path}: tensor {tensor_name!r} has the shape {raw.shape}, "
                f"the config asks for {shapes[tensor_name]}"
            )
        if architecture.permuted_qk and tensor_name.endswith(("attn_q.weight", "attn_k.weight")):
            mapped, raw = raw, unpermute_rows(raw, config.head_dim)
            mapped.evict()
        tensors[tensor_name] = raw
    tensors.setdefault("output.weight", tensors["token_embd.weight"])
    return config, tensors


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor such a model has, by its GGUF name, as (rows, columns) or (columns,)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_size, hidden),
        "attn_k.weight": (kv_size, hidden),
        "attn_v.weight": (kv_size, hidden),
        "attn_output.weight": (hidden, q_size),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config.vocab_size, hidden),
    }
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{suffix}": shape for suffix, shape in layer.items()}
    return shapes


def unpermute_rows(raw: RawTensor, head_dim: int) -> RawTensor:
    """Rows of each head from the order (0, d/2, 1, d/2 + 1, …) back to (0, 1, …): whole rows move."""
    heads = raw.data.reshape(-1, head_dim // 2, 2, raw.data.shape[1])
    return RawTensor(raw.name, raw.weight_type, raw.shape, heads.swapaxes(1, 2).reshape(raw.data.shape))


class _Config:
    """Reads the architecture's own keys out of the metadata."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self.metadata: Mapping[str, object] = file.metadata

    def fail(self, key: str, value: object, wanted: str) -> FormatError:
        return FormatError(
            f"{self.file.path}: metadata '{self.architecture}.{key}' must be {wanted}, got {short(value)}"
        )

    def count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise self.fail(key, value, f"an integer from 1 to {_MAX_SIZE}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, value, "a positive number")
        return value

    def read(self, architecture: _Architecture) -> ModelConfig:
        for key, off in _MUST_BE_OFF.items():
            value = self.metadata.get(f"{self.architecture}.{key}", off)
            if value != off:
                raise UnsupportedModelError(
                    f"{self.file.path}: '{self.architecture}.{key}' is {short(value)}; this version runs only models "
                    f"where it is {off!r} or absent"
                )
        if "token_embd.weight" not in self.file.tensor_names:
            raise FormatError(f"{self.file.path} lacks the tensor 'token_embd.weight'")
        embedding_shape = self.file.tensor("token_embd.weight").shape
        hidden_size, num_heads = self.count("embedding_length"), self.count("attention.head_count")
        num_kv_heads = self.count("attention.head_count_kv", num_heads)
        head_dim = self.count("attention.key_length", max(1, hidden_size // num_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.count(key, head_dim) != head_dim:
                raise UnsupportedModelError(
                    f"{self.file.path}: '{self.architecture}.{key}' is {self.count(key)}, "
                    f"unlike the head size {head_dim}"
                )
        if head_dim % 2 or num_heads % num_kv_heads:
            raise FormatError(
                f"{self.file.path}: {num_heads} heads of {head_dim} over {num_kv_heads} key/value heads cannot be"
            )
        if head_dim > MAX_HEAD_DIM or num_heads > MAX_HEADS:
            raise UnsupportedModelError(
                f"{self.file.path}: {num_heads} heads of {head_dim} values; this version runs at most {MAX_HEADS} of "
                f"{MAX_HEAD_DIM}"
            )
        return ModelConfig(
            architecture=self.architecture,
            num_layers=self.count("block_count"),
            hidden_size=hidden_size,
            intermediate_size=self.count("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=embedding_shape[0],
            context_length=self.count("context_length"),
            rms_norm_eps=self.positive("attention.layer_norm_rms_epsilon"),
            rope_theta=self.positive("rope.freq_base", 10000.0),
            qkv_bias=architecture.qkv_bias,
        )
