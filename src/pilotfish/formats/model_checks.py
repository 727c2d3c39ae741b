"""What holds for every model, whatever file it comes from: architecture, sizes, and the tensors under GGUF's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pilotfish.config import MAX_HEAD_DIM, MAX_HEADS, ModelConfig
from pilotfish.errors import FormatError, UnsupportedModelError, brief

RECURRENT_LAYERS = "has recurrent layers, whose state cannot be taken back to an earlier token"
WINDOWED_LAYERS = "has sliding-window layers, whose cache forgets what a rejected draft pushed out"

# By the names of GGUF and of Hugging Face.
_REASONS = dict.fromkeys(
    (
        "bamba", "falcon-h1", "falcon_h1", "falcon_mamba", "granitehybrid", "granitemoehybrid", "jamba", "kimi-linear",
        "lfm2", "lfm2moe", "lfm2_moe", "mamba", "mamba2", "minimax", "minimax-m1", "nemotron_h", "nemotron_h_moe",
        "plamo2", "plamo3", "qwen35", "qwen35moe", "qwen3_5", "qwen3_5_moe", "qwen3next", "qwen3_next",
        "recurrent_gemma", "recurrentgemma", "rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "zamba", "zamba2",
    ),
    RECURRENT_LAYERS,
) | dict.fromkeys(
    (
        "afmoe", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3n", "gemma3_text", "gemma3n_text", "gpt-oss",
        "gpt_oss", "llama4", "llama4_text", "mimo2", "ministral", "olmo3", "phi3", "smallthinker",
    ),
    WINDOWED_LAYERS,
)  # fmt: skip


def check_architecture(path: Path, name: object, supported: Collection[str]) -> None:
    """Raises `UnsupportedModelError` unless `name` is in `supported`, with the reason where it can never be."""
    if isinstance(name, str) and name in _REASONS:
        raise not_rewindable(path, f"holds the architecture {name!r}, which {_REASONS[name]}")
    if not isinstance(name, str) or name not in supported:
        raise UnsupportedModelError(
            f"{path} holds the architecture {brief(name)}; supported are {', '.join(supported)}"
        )


def not_rewindable(path: Path, reason: str) -> UnsupportedModelError:
    """The error for a model whose cache cannot be brought back to an earlier token exactly, as every step needs it."""
    return UnsupportedModelError(f"{path} {reason}: it can be neither target nor draft model")


def check_heads(path: Path, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises `FormatError` for heads that cannot be, `UnsupportedModelError` for more than the kernels are made for."""
    if head_dim % 2 or num_heads % num_kv_heads:
        raise FormatError(f"{path}: {num_heads} heads of {head_dim} over {num_kv_heads} key/value heads cannot be")
    if head_dim > MAX_HEAD_DIM or num_heads > MAX_HEADS:
        raise UnsupportedModelError(
            f"{path}: {num_heads} heads of {head_dim} values; this version runs at most {MAX_HEADS} of {MAX_HEAD_DIM}"
        )


def check_rope_factors(path: Path, factors: Collection[float], head_dim: int) -> None:
    """Raises `FormatError` unless there is a positive factor for each rotary frequency."""
    if len(factors) != head_dim // 2 or not all(0 < factor < float("inf") for factor in factors):
        raise FormatError(f"{path}: the rotary frequencies need {head_dim // 2} positive factors")


def check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    name_in_file: Callable[[str], str] = str,
) -> None:
    """Raises `FormatError` unless `found` (shapes by name) are the tensors of such a model, and `UnsupportedModelError`
    for one that it does not have. `output.weight` may be absent: the output matrix is then the embedding.

    `found` has the file's names; `name_in_file` makes one of GGUF's name."""
    if config.num_layers > len(found):  # before anything is made for each layer
        raise FormatError(f"{path} announces {config.num_layers} layers, but has {len(found)} tensors")
    shapes = {name_in_file(name): shape for name, shape in tensor_shapes(config).items()}
    missing = sorted(shapes.keys() - found.keys() - {name_in_file("output.weight")})
    if missing:
        raise FormatError(f"{path} lacks the tensor {missing[0]!r} ({len(missing)} missing in all)")
    extra = sorted(found.keys() - shapes.keys())
    if extra:
        raise UnsupportedModelError(
            f"{path} has the tensor {brief(extra[0])}, which a {config.architecture} model does not use here"
        )
    for name, shape in found.items():
        if shape != shapes[name]:
            raise FormatError(
                f"{path}: tensor {name!r} has the shape {brief(shape)}, the config asks for {shapes[name]}"
            )


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
    if config.qk_norm:
        layer |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (config.vocab_size, hidden),
    }
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{suffix}": shape for suffix, shape in layer.items()}
    return shapes
