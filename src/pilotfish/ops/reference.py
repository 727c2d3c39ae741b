"""The meaning of every operation, in plain torch and float32: right first, and each token row on its own.

Rows are independent: the bits of a result row depend on that row, the weights and its own context, never on how many
rows ran with it. Stock torch operations do not promise that (a matrix product over eight rows differs from eight over
one), so here every reduction and every transcendental runs row by row, on shapes that do not know the row count; the
one exception is `linear`, see there. Purely elementwise sums and products need no such care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.errors import NonFiniteLogitsError
from pilotfish.ops.backend import (
    AttentionInputs,
    AttentionLayers,
    DecoderLayers,
    HeadNorms,
    LayerWeights,
    LinearLayer,
    Norm,
    Projection,
)
from pilotfish.ops.dequantize import dequantize
from pilotfish.types import RawTensor, WeightType

ROW_BLOCK = 8
"""`linear` zero-pads its rows to a multiple of this."""
_CHECKED_ROW_COUNTS = (8, 16, 24, 40, 64, 128)
_CHUNK_WEIGHTS = 1 << 22  # weights dequantised at once: bounds the memory that loading needs beside the result


@dataclass(frozen=True)
class Embedding:
    """An embedding matrix as its file holds it: uint8 [vocab_size, row_bytes]."""

    data: Tensor
    weight_type: WeightType


@dataclass(frozen=True)
class Linear:
    """A dense layer: float32 [out, in] and, where the model has one, a bias float32 [out]."""

    weight: Tensor
    bias: Tensor | None
    pads_rows: bool
    """Whether zero-padded row blocks were found to be independent on this machine; else rows run one by one."""


def raw_bytes(raw: RawTensor) -> Tensor:
    """The tensor's bytes, uint8 [num_rows, row_bytes]."""
    return torch.from_numpy(raw.read())


def dense(raw: RawTensor) -> Tensor:
    """The whole tensor as float32 [rows, columns] (or [columns]), filled chunk by chunk."""
    out = torch.empty(raw.shape, dtype=torch.float32)
    data, rows = raw_bytes(raw), out.view(-1, raw.shape[-1])
    chunk = max(1, _CHUNK_WEIGHTS // raw.shape[-1])
    for start in range(0, len(rows), chunk):
        rows[start : start + chunk] = dequantize(data[start : start + chunk], raw.weight_type)
    return out


def padding_keeps_rows_independent(weight: Tensor) -> bool:
    """Whether products of zero-padded rows with `weight` [out, in] have the same bits for every count and position.

    BLAS libraries choose their blocking by shape, so this is measured once for each shape: a few rows, alone and at
    changing places among others, over row counts up to a prefill chunk.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(_CHECKED_ROW_COUNTS), weight.shape[1], generator=generator)
    expected = functional.linear(rows[:ROW_BLOCK], weight)
    for count in _CHECKED_ROW_COUNTS:
        order = torch.randperm(count, generator=generator)
        found = functional.linear(rows[order], weight)
        for row in range(ROW_BLOCK):
            if not torch.equal(found[order == row][0], expected[row]):
                return False
    return True


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x · weightᵀ + bias: float32 [n, in] to [n, out].

    Rows are zero-padded to a multiple of `ROW_BLOCK`, at most a prefill chunk at a time, which
    `padding_keeps_rows_independent` has checked; where that check failed each row runs alone.
    """
    size = max(_CHECKED_ROW_COUNTS) if layer.pads_rows else 1
    padding = -len(x) % ROW_BLOCK if layer.pads_rows else 0
    padded = functional.pad(x, (0, 0, 0, padding))
    out = torch.cat([functional.linear(rows, layer.weight) for rows in torch.split(padded, size)])[: len(x)]
    return out if layer.bias is None else out + layer.bias


def embedding(token_ids: Tensor, table: Embedding) -> Tensor:
    """Rows of the embedding matrix, dequantised on lookup: int32 [n] to float32 [n, hidden_size]."""
    return dequantize(table.data.index_select(0, token_ids), table.weight_type)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, by row: float32 [n, size] (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def normalise(row: Tensor) -> Tensor:
        return row / torch.sqrt((row * row).mean() + eps) * weight

    return _by_row(normalise, x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up: float32 [n, size] each (Shazeer 2020, arXiv 2002.05202)."""
    return _by_row(functional.silu, gate) * up


def rotary_tables(
    head_dim: int, num_positions: int, theta: float, factors: Sequence[float] | None = None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position · theta^(-2i/d) / factors[i], computed in float64.

    Float32 [num_positions, head_dim / 2] each; positions count from `first`.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(first, first + num_positions, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotary(x: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs (i, i + d/2) of each head by its position's angle (Su et al. 2021, arXiv 2104.09864).

    x is float32 [n, num_heads, head_dim], positions int32 [n]; the result has x's shape.
    """
    cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_cache(slot_mapping: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, filled: Tensor) -> None:
    """Stores rows k and v, float32 [n, num_kv_heads, head_dim], in the slots int32 [n] of one layer, and counts them.

    keys and values are the layer's [num_pages, page_size, num_kv_heads, head_dim], float16 (to which k and v are
    rounded) or float32; filled, int32 [num_pages], is how many slots of each page the layer has written.
    """
    page_size = keys.shape[1]
    slots = slot_mapping.long()
    keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k.to(keys.dtype), v.to(values.dtype)
    filled.scatter_reduce_(0, slots // page_size, slot_mapping % page_size + 1, "amax")


def attention(
    q: Tensor, keys: Tensor, values: Tensor, query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor
) -> Tensor:
    """Causal softmax attention over the cache, in which the new rows' own keys and values already stand.

    q is float32 [n, num_heads, head_dim], the new rows of all sequences one after the other; keys and values are one
    layer's float16 or float32 [num_pages, page_size, num_kv_heads, head_dim]; query_start_loc int32 [num_seqs + 1],
    seq_lens int32 [num_seqs] (new rows included) and page_table int32 [num_seqs, max_pages] are as in `ForwardBatch`.
    Query heads share key/value heads in groups (Ainslie et al. 2023, arXiv 2305.13245). Returns a tensor of q's shape.
    """
    page_size, num_kv_heads, head_dim = keys.shape[1:]
    starts = query_start_loc.tolist()
    out = torch.empty_like(q)
    for sequence, length in enumerate(seq_lens.tolist()):
        positions = torch.arange(length, dtype=torch.int32)
        slots = page_table[sequence].index_select(0, positions // page_size) * page_size + positions % page_size
        seq_keys = keys.flatten(0, 1).index_select(0, slots).float()
        seq_values = values.flatten(0, 1).index_select(0, slots).float()
        start, stop = starts[sequence], starts[sequence + 1]
        for row in range(start, stop):
            visible = length - (stop - row) + 1
            queries = q[row].view(num_kv_heads, -1, head_dim)
            scores = queries @ seq_keys[:visible].permute(1, 2, 0) * head_dim**-0.5
            out[row] = (torch.softmax(scores, dim=-1) @ seq_values[:visible].transpose(0, 1)).view(-1, head_dim)
    return out


def argmax(logits: Tensor) -> list[int]:
    """Per row of float32 [n, vocab_size] the lowest id with the largest logit.

    Raises `NonFiniteLogitsError` where a row holds NaN, +infinity, or nothing above -infinity.
    """
    best: list[int] = []
    for index, row in enumerate(logits):
        value, token_id = row.max(dim=0)
        if not torch.isfinite(value):
            raise NonFiniteLogitsError(index)
        best.append(int(token_id))
    return best


def log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logit))) by row: float32 [n, vocab_size] to [n]. NaN where a row holds NaN."""
    sums = torch.empty(len(logits), dtype=torch.float32)
    for index, row in enumerate(logits):
        sums[index] = row.double().logsumexp(dim=0)
    return sums


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` on each row of x [n, size] by itself, into a tensor of x's shape."""
    out = torch.empty_like(x)
    for index, row in enumerate(x):
        out[index] = function(row)
    return out


@dataclass(frozen=True)
class _Products:
    """See `LinearLayer`."""

    layers: Sequence[Linear]
    norm: Norm | None
    gated: bool

    @property
    def num_bytes(self) -> int:
        return sum(layer.weight.nbytes for layer in self.layers)

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None and self.norm is None:
            raise ValueError("linear: delta is added before a norm, and there is none")
        if self.norm is not None:
            x = rms_norm(x if delta is None else x.add_(delta), self.norm.weight, self.norm.eps)
        outputs = [linear(x, layer) for layer in self.layers]
        return silu_mul(*outputs) if self.gated else torch.cat(outputs, dim=1)


def _norm_heads(x: Tensor, norm: Norm) -> Tensor:
    """The norm of every head of float32 [n, num_heads, head_dim]."""
    return rms_norm(x.flatten(0, 1), norm.weight, norm.eps).view(x.shape)


@dataclass(frozen=True)
class _Attention:
    """See `AttentionLayers`."""

    inputs: AttentionInputs

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None = None) -> Tensor:
        to = self.inputs
        keys, values = to.keys[layer], to.values[layer]
        num_kv_heads, head_dim = keys.shape[2:]
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = torch.split(heads, [to.num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = _norm_heads(q, norms.query), _norm_heads(k, norms.key)
        write_cache(to.slot_mapping, rotary(k, to.positions, to.tables), v, keys, values, to.filled[layer])
        q = rotary(q, to.positions, to.tables)
        return attention(q, keys, values, to.query_start_loc, to.seq_lens, to.page_table).flatten(1)


class _Layers:
    """See `DecoderLayers`."""

    def __init__(self, backend: ReferenceBackend, layers: Sequence[LayerWeights]) -> None:
        make = backend.make_linear
        self._layers = [
            (
                make(layer.qkv, layer.attention_norm),
                layer.head_norms,
                make([layer.attention_output]),
                make([layer.gate, layer.up], layer.feed_forward_norm, gated=True),
                make([layer.down]),
            )
            for layer in layers
        ]

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for qkv, _, *others in self._layers for product in (qkv, *others))

    def __call__(self, x: Tensor, attention: AttentionLayers) -> Tensor:
        delta = None  # what the last product adds to x: `qkv` and `gate_up` do that before their norm
        for index, (qkv, head_norms, attention_output, gate_up, down) in enumerate(self._layers):
            attended = attention(index, qkv(x, delta), head_norms)  # [n, num_heads · head_dim]
            gated = gate_up(x, attention_output(attended))  # [n, intermediate_size]
            delta = down(gated)
        return x if delta is None else x + delta


class ReferenceBackend:
    """The operations of this module; each shape of matrix is checked once for independent rows."""

    name = "reference"

    def __init__(self) -> None:
        self._pads_rows: dict[tuple[int, ...], bool] = {}

    def make_linear(
        self, projections: Sequence[Projection], norm: Norm | None = None, gated: bool = False
    ) -> LinearLayer:
        return _Products([self._prepare(projection) for projection in projections], norm, gated)

    def make_embedding(self, weight: RawTensor) -> Callable[[Tensor], Tensor]:
        table = Embedding(raw_bytes(weight), weight.weight_type)
        return lambda token_ids: embedding(token_ids, table)

    def _prepare(self, projection: Projection) -> Linear:
        matrix = dense(projection.weight)
        projection.weight.evict()
        if matrix.shape not in self._pads_rows:
            self._pads_rows[matrix.shape] = padding_keeps_rows_independent(matrix)
        bias = None if projection.bias is None else dense(projection.bias)
        return Linear(matrix, bias, self._pads_rows[matrix.shape])

    def make_layers(self, layers: Sequence[LayerWeights]) -> DecoderLayers:
        return _Layers(self, layers)

    def make_attention(self, inputs: AttentionInputs) -> AttentionLayers:
        return _Attention(inputs)
