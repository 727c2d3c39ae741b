"""The parts of a forward on native kernels: packed matrices, attention, and all decoder layers in one call.

What each means is said in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from pilotfish.config import MAX_HEAD_DIM
from pilotfish.ops.backend import AttentionInputs, AttentionLayers, HeadNorms, LayerWeights, Norm, Projection
from pilotfish.ops.native_arguments import TYPE_NUMBERS, check, check_rows, empty, file_rows
from pilotfish.ops.reference import dense


class PackedLinear:
    """Matrix products with weights repacked in their own bit widths; see `Backend.make_linear`.

    For quantised weights x is quantised to int8 block by block (256 values where a block of weights has as many, else
    32; the scale is the largest magnitude over 127). All products and sums within a block are exact integers, so the
    result's bits depend neither on the rows beside a row, nor on threads, nor on the instruction set. Float weights
    meet x as it is.
    """

    def __init__(
        self,
        kernels: ModuleType,
        variant: object,
        projections: Sequence[Projection],
        norm: Norm | None,
        gated: bool,
    ) -> None:
        shapes = [projection.weight.shape for projection in projections]
        self.num_inputs = shapes[0][1]
        if any(shape[1] != self.num_inputs for shape in shapes) or (gated and (len(shapes) != 2 or len({*shapes}) > 1)):
            raise ValueError(f"linear: matrices of the shapes {shapes} cannot read the same rows together")
        self.num_outputs = shapes[0][0] if gated else sum(shape[0] for shape in shapes)
        self._has_norm = norm is not None
        if norm is not None:
            check("linear", "norm", norm.weight, torch.float32, (self.num_inputs,))
        weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        self.handle = kernels.LinearLayer(variant, self.num_inputs, weight, eps, gated)
        self._projections = projections
        for projection in projections:
            self._add(projection)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one call reads."""
        num_bytes: int = self.handle.num_bytes
        return num_bytes

    def pack(self, buffer: object, offset: int) -> None:
        """Repacks the weights into `num_bytes` bytes of a `Buffer`. Before that the layer cannot be called."""
        rows = [file_rows("linear", projection.weight) for projection in self._projections]
        self.handle.pack(buffer, offset, [data.data_ptr() for data in rows])
        for projection in self._projections:  # at once, so that a model is never in memory twice
            projection.weight.evict()
        del self._projections

    def _add(self, projection: Projection) -> None:
        num_outputs = projection.weight.shape[0]
        bias = None if projection.bias is None else dense(projection.bias)
        if bias is not None:
            check("linear", "bias", bias, torch.float32, (num_outputs,))
        kind = TYPE_NUMBERS[projection.weight.weight_type]
        self.handle.add(kind, num_outputs, 0 if bias is None else bias.data_ptr())

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        num_rows = check_rows("linear", "x", x, self.num_inputs)
        delta_address = 0
        if delta is not None:
            if not self._has_norm:
                raise ValueError("linear: delta is added before a norm, and there is none")
            if check_rows("linear", "delta", delta, self.num_inputs) != num_rows:
                raise ValueError(f"linear: delta has {delta.shape[0]} rows, x has {num_rows}")
            delta_address = delta.data_ptr()
        y = empty(num_rows, self.num_outputs)
        self.handle.run(x.data_ptr(), delta_address, num_rows, y.data_ptr())
        return y


class NativeAttention:
    """Attention of one forward: everything that its layers share is checked once; see `AttentionLayers`."""

    def __init__(self, kernels: ModuleType, variant: object, inputs: AttentionInputs) -> None:
        check("attention", "keys", inputs.keys, torch.float16, (None, None, None, None, None))
        num_layers, num_pages, page_size, num_kv_heads, head_dim = inputs.keys.shape
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            raise ValueError(f"attention: heads have an even number of at most {MAX_HEAD_DIM} values, got {head_dim}")
        check("attention", "values", inputs.values, torch.float16, inputs.keys.shape)
        check("attention", "filled", inputs.filled, torch.int32, (num_layers, num_pages))
        check("attention", "positions", inputs.positions, torch.int32, (None,))
        num_rows = inputs.positions.shape[0]
        check("attention", "slot_mapping", inputs.slot_mapping, torch.int32, (num_rows,))
        check("attention", "seq_lens", inputs.seq_lens, torch.int32, (None,))
        num_seqs = inputs.seq_lens.shape[0]
        check("attention", "query_start_loc", inputs.query_start_loc, torch.int32, (num_seqs + 1,))
        check("attention", "page_table", inputs.page_table, torch.int32, (num_seqs, None))
        num_positions = inputs.tables[0].shape[0]
        for table in inputs.tables:
            check("attention", "tables", table, torch.float32, (num_positions, head_dim // 2))
        num_heads = inputs.num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"attention: {num_heads} query heads cannot share {num_kv_heads} key/value heads")
        self.sizes = (num_layers, num_rows, (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim)
        self._head_dim = head_dim
        self._kernels = kernels
        self._inputs = inputs  # the pointers below are good for as long as these live
        self.handle = kernels.Attention(
            variant,
            inputs.positions.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            inputs.query_start_loc.data_ptr(),
            inputs.seq_lens.data_ptr(),
            inputs.page_table.data_ptr(),
            inputs.tables[0].data_ptr(),
            inputs.tables[1].data_ptr(),
            inputs.keys.data_ptr(),
            inputs.values.data_ptr(),
            inputs.filled.data_ptr(),
            num_rows,
            num_seqs,
            inputs.page_table.shape[1],
            num_positions,
            num_pages,
            page_size,
            num_heads,
            num_kv_heads,
            head_dim,
        )

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None = None) -> Tensor:
        num_layers, num_rows, qkv_size, attended_size = self.sizes
        if not 0 <= layer < num_layers:
            raise ValueError(f"attention: there is no layer {layer} among {num_layers}")
        check("attention", "qkv", qkv, torch.float32, (num_rows, qkv_size))
        y = empty(num_rows, attended_size)
        self.handle.run(layer, _head_norms(self._kernels, norms, self._head_dim), qkv.data_ptr(), y.data_ptr())
        return y


class NativeLayers:
    """All layers in one call, which keeps what Python costs a forward small; see `DecoderLayers`."""

    def __init__(self, kernels: ModuleType, variant: object, layers: Sequence[LayerWeights]) -> None:
        self._num_layers = len(layers)
        all_products = [
            [
                PackedLinear(kernels, variant, *arguments)
                for arguments in (
                    (layer.qkv, layer.attention_norm, False),
                    ([layer.attention_output], None, False),
                    ([layer.gate, layer.up], layer.feed_forward_norm, True),
                    ([layer.down], None, False),
                )
            ]
            for layer in layers
        ]
        self._check_shapes({tuple((p.num_inputs, p.num_outputs) for p in products) for products in all_products})
        # One mapping for all, in the order of use: small matrices share huge pages, and reading ahead goes on into the
        # next matrix.
        self.num_bytes = sum(product.num_bytes for products in all_products for product in products)
        buffer, offset = kernels.Buffer(self.num_bytes), 0
        self._layers = kernels.DecoderLayers()
        for layer, products in zip(layers, all_products, strict=True):
            for product in products:
                product.pack(buffer, offset)
                offset += product.num_bytes
            qkv, *others = (product.handle for product in products)
            self._layers.add(qkv, _head_norms(kernels, layer.head_norms), *others)

    def _check_shapes(self, shapes: set[tuple[tuple[int, int], ...]]) -> None:
        """Each product must read what the one before it gives, in all layers alike."""
        if len(shapes) != 1:
            raise ValueError(f"layers: {len(shapes)} kinds of layers, where one is needed")
        ((qkv, attention_output, gate_up, down),) = shapes
        self._hidden_size, self._qkv_size = qkv
        self._attended_size, hidden_size = attention_output
        if not (qkv[0] == hidden_size == gate_up[0] == down[1] and gate_up[1] == down[0]):
            raise ValueError(f"layers: products of the shapes {[qkv, attention_output, gate_up, down]} do not fit")

    def __call__(self, x: Tensor, attention: AttentionLayers) -> Tensor:
        if not isinstance(attention, NativeAttention):
            raise TypeError("layers: native layers need native attention")
        num_rows = check_rows("layers", "x", x, self._hidden_size)
        sizes = (self._num_layers, num_rows, self._qkv_size, self._attended_size)
        if attention.sizes != sizes:
            raise ValueError(f"layers: (layers, rows, qkv, attended) are {sizes}, the attention's {attention.sizes}")
        self._layers.run(attention.handle, x.data_ptr(), num_rows)
        return x


def _head_norms(kernels: ModuleType, norms: HeadNorms | None, head_dim: int | None = None) -> object | None:
    """The norms as the kernels take them, which copies the weights; `ValueError` for two of different sizes."""
    if norms is None:
        return None
    head_dim = len(norms.query.weight) if head_dim is None else head_dim
    for name, norm in (("query", norms.query), ("key", norms.key)):
        check("attention", f"{name} norm", norm.weight, torch.float32, (head_dim,))
    query, key = norms.query, norms.key
    made: object = kernels.HeadNorms(query.weight.data_ptr(), query.eps, key.weight.data_ptr(), key.eps, head_dim)
    return made
