"""What a model is, as data: one transformer serves every architecture, and the differences stand here."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PROPOSAL_LENGTH = 4
"""Most tokens drafted per step where there is a drafter and the user set no length."""


MAX_HEAD_DIM = 512
"""Most values of an attention head that the kernels are made for."""
MAX_HEADS = 1024
MAX_THREADS = 1024


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder-only transformer.

    `vocab_size` counts the rows of the embedding and output matrices; it may exceed the tokenizer's ids (padding
    rows). `context_length` is the largest number of tokens, prompt and output together.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool
    """Whether the q, k and v projections add a bias (Qwen2) or not (Llama, Qwen3)."""
    qk_norm: bool
    """Whether each query and key head goes through an RMS norm of its own before it is rotated (Qwen3)."""
    rope_factors: tuple[float, ...] | None = None
    """What divides each of the head_dim / 2 rotary frequencies (Llama 3); None divides none."""

    @property
    def macs_per_row(self) -> int:
        """Multiply-accumulates in the matrix products of one row with logits; attention's own are not counted."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q_size + 2 * kv_size + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size
