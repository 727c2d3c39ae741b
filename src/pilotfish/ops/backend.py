"""What runs a model's arithmetic: the reference operations, or the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pilotfish.types import RawTensor


@dataclass(frozen=True)
class Projection:
    """A matrix [out, in] and, where the model has one, its bias [out]."""

    weight: RawTensor
    bias: RawTensor | None = None


@dataclass(frozen=True)
class Norm:
    """The RMS norm that rows go through before a product: weight float32 [in]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class HeadNorms:
    """The RMS norms of every query and every key head, weights float32 [head_dim]."""

    query: Norm
    key: Norm


class LinearLayer(Protocol):
    """Products that read the same rows; each row is independent of those beside it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a call reads."""

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """float32 [n, in] to [n, out], the outputs of the projections side by side. With a norm, delta (float32
        [n, in]) is first added to x, in place; without one it raises `ValueError`, as does a wrong shape."""


@dataclass(frozen=True)
class AttentionInputs:
    """What the attention of all layers reads in one forward: the rows as in `ForwardBatch`, and the cache."""

    num_heads: int
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    page_table: Tensor
    tables: tuple[Tensor, Tensor]
    """Cosine and sine of the rotary embedding, float32 [num_positions, head_dim / 2] each."""
    keys: Tensor
    """[num_layers, num_pages, page_size, num_kv_heads, head_dim], and so are the values"""
    values: Tensor
    filled: Tensor
    """int32 [num_layers, num_pages]: slots that each layer has written of each page"""


class AttentionLayers(Protocol):
    """The attention of one forward, layer by layer."""

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None = None) -> Tensor:
        """The norms of the heads, where the layer has such, rotary embedding, the write of keys and values into the
        cache, and attention over the cache.

        qkv is float32 [n, (num_heads + 2 num_kv_heads) · head_dim], the query, key and value heads side by side, and
        may be overwritten; the result is [n, num_heads · head_dim].
        """


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Norm
    qkv: Sequence[Projection]
    head_norms: HeadNorms | None
    attention_output: Projection
    feed_forward_norm: Norm
    gate: Projection
    up: Projection
    down: Projection


class DecoderLayers(Protocol):
    """All layers of a model, from the embedding to the last sum."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a call reads."""

    def __call__(self, x: Tensor, attention: AttentionLayers) -> Tensor:
        """float32 [n, hidden_size] to the same shape; x may be overwritten. `attention` is this backend's own."""


class Backend(Protocol):
    """The operations that cost time; `reference` says what each means."""

    @property
    def name(self) -> str: ...

    def make_linear(
        self, projections: Sequence[Projection], norm: Norm | None = None, gated: bool = False
    ) -> LinearLayer:
        """x · weightᵀ + bias for projections that read the same rows, prepared once; the rows normed before where there
        is a norm. `gated`: the two projections are gate and up, and the one output is silu(gate) · up. The layer keeps
        what it needs of the raw tensors and does not look at them again."""

    def make_layers(self, layers: Sequence[LayerWeights]) -> DecoderLayers:
        """At least one layer, all of the same shapes."""

    def make_embedding(self, weight: RawTensor) -> Callable[[Tensor], Tensor]:
        """Lookup of rows: token ids int32 [n] to float32 [n, hidden_size]; `IndexError` for an id beyond the matrix."""

    def make_attention(self, inputs: AttentionInputs) -> AttentionLayers:
        """For one forward, during which the store must not be resized. The kernels take float16 caches only.

        Raises `ValueError` for tensors that do not fit together, or that name positions, slots or pages there are not.
        """
