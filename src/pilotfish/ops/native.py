"""The C++ kernels: checks device, dtype, shape and contiguity, then passes pointers and sizes.

Only this module imports the extension `pilotfish._kernels`. What each operation means is said in `reference`.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config import MAX_HEAD_DIM, MAX_THREADS
from pilotfish.errors import NonFiniteLogitsError, OptionError
from pilotfish.ops import reference
from pilotfish.ops.backend import (
    AttentionInputs,
    AttentionLayers,
    Backend,
    DecoderLayers,
    HeadNorms,
    LayerWeights,
    LinearLayer,
    Norm,
    Projection,
)
from pilotfish.ops.cores import num_usable_cores
from pilotfish.ops.reference import ReferenceBackend, dense, raw_bytes
from pilotfish.types import Distribution, RawTensor, WeightType

# The number each type has in csrc/kernels.h, which names them in the same order.
_TYPES = {weight_type: number for number, weight_type in enumerate(WeightType)}


def choose_backend(threads: int | None = None, environment: Mapping[str, str] = os.environ) -> Backend:
    """The native backend, or with a warning the reference where the extension was not built.

    `threads` comes before `PILOTFISH_THREADS`, and this before `num_usable_cores`; `PILOTFISH_ISA` forces an
    instruction set. `OptionError` for a value that is unknown or that this machine does not have.
    """
    try:
        from pilotfish import _kernels
    except ImportError as error:
        warnings.warn(
            f"the native kernels are missing ({error}): running the reference operations, which are very slow; "
            "reinstall pilotfish with a C++ compiler at hand",
            RuntimeWarning,
            stacklevel=2,
        )
        return ReferenceBackend()
    names: list[str] = _kernels.instruction_sets()
    isa = environment.get("PILOTFISH_ISA") or names[0]
    if isa not in names:
        raise OptionError(f"PILOTFISH_ISA is {isa!r}; this machine has {', '.join(names)}")
    name, value = "threads", str(threads)
    if threads is None:
        name, value = "PILOTFISH_THREADS", environment.get("PILOTFISH_THREADS") or str(num_usable_cores())
    if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
        raise OptionError(f"{name} must be a number from 1 to {MAX_THREADS}, got {value!r}")
    return NativeBackend(_kernels, isa, int(value))


class NativeBackend:
    """The kernels of one instruction set, run by a number of threads."""

    def __init__(self, kernels: ModuleType, isa: str, threads: int) -> None:
        self.name = f"native ({isa}, {threads} threads)"
        self.isa = isa
        self.threads = threads
        self._kernels = kernels
        self._variant = kernels.Variant(isa, threads)

    def make_linear(
        self, projections: Sequence[Projection], norm: Norm | None = None, gated: bool = False
    ) -> LinearLayer:
        linear = PackedLinear(self._kernels, self._variant, projections, norm, gated)
        linear.pack(self._kernels.Buffer(linear.num_bytes), 0)
        return linear

    def make_layers(self, layers: Sequence[LayerWeights]) -> DecoderLayers:
        return NativeLayers(self._kernels, self._variant, layers)

    def make_embedding(self, weight: RawTensor) -> Callable[[Tensor], Tensor]:
        data = _file_rows("embedding", weight)
        kind, (num_rows, size) = _TYPES[weight.weight_type], weight.shape

        def lookup(token_ids: Tensor) -> Tensor:
            _check("embedding", "token_ids", token_ids, torch.int32, (None,))
            y = _empty(len(token_ids), size)
            ids = token_ids.data_ptr()
            self._kernels.embedding(kind, data.data_ptr(), num_rows, size, ids, len(token_ids), y.data_ptr())
            return y

        return lookup

    def make_attention(self, inputs: AttentionInputs) -> AttentionLayers:
        return NativeAttention(self._kernels, self._variant, inputs)

    def argmax(self, logits: Tensor) -> list[int]:
        """See `reference.argmax`."""
        _check("argmax", "logits", logits, torch.float32, (None, None))
        best: list[int] = self._variant.argmax(logits.data_ptr(), *logits.shape)
        if -1 in best:
            raise NonFiniteLogitsError(best.index(-1))
        return best

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """See `reference.log_sum_exp`."""
        _check("log_sum_exp", "logits", logits, torch.float32, (None, None))
        y = _empty(len(logits))
        self._variant.log_sum_exp(logits.data_ptr(), *logits.shape, y.data_ptr())
        return y

    def distribution(
        self, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> Distribution | None:
        """See `sampling_reference.distribution`."""
        _check("distribution", "logits", logits, torch.float32, (None,))
        size = len(logits)
        token_ids, probs = np.empty(size, np.int32), np.empty(size, np.float64)
        places = token_ids.ctypes.data, probs.ctypes.data
        count = self._variant.distribution(logits.data_ptr(), size, temperature, top_k, top_p, min_p, *places)
        return None if count < 0 else Distribution(token_ids[:count], probs[:count])

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int32] | None:
        """See `sampling_reference.largest`."""
        _check("largest", "logits", logits, torch.float32, (None,))
        token_ids = np.empty(min(count, len(logits)), np.int32)
        sound = self._variant.largest(logits.data_ptr(), len(logits), len(token_ids), token_ids.ctypes.data) >= 0
        return token_ids if sound else None

    def gumbel_argmax(self, distribution: Distribution, stream: int) -> int:
        """See `sampling_reference.gumbel_argmax`."""
        token_ids, probs = distribution.token_ids, distribution.probs
        place = self._variant.gumbel_argmax(token_ids.ctypes.data, probs.ctypes.data, len(token_ids), stream)
        return int(token_ids[place])


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
            _check("linear", "norm", norm.weight, torch.float32, (self.num_inputs,))
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
        rows = [_file_rows("linear", projection.weight) for projection in self._projections]
        self.handle.pack(buffer, offset, [data.data_ptr() for data in rows])
        for projection in self._projections:  # at once, so that a model is never in memory twice
            projection.weight.evict()
        del self._projections

    def _add(self, projection: Projection) -> None:
        num_outputs = projection.weight.shape[0]
        bias = None if projection.bias is None else dense(projection.bias)
        if bias is not None:
            _check("linear", "bias", bias, torch.float32, (num_outputs,))
        kind = _TYPES[projection.weight.weight_type]
        self.handle.add(kind, num_outputs, 0 if bias is None else bias.data_ptr())

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        num_rows = _check_rows("linear", "x", x, self.num_inputs)
        delta_address = 0
        if delta is not None:
            if not self._has_norm:
                raise ValueError("linear: delta is added before a norm, and there is none")
            if _check_rows("linear", "delta", delta, self.num_inputs) != num_rows:
                raise ValueError(f"linear: delta has {delta.shape[0]} rows, x has {num_rows}")
            delta_address = delta.data_ptr()
        y = _empty(num_rows, self.num_outputs)
        self.handle.run(x.data_ptr(), delta_address, num_rows, y.data_ptr())
        return y


class NativeAttention:
    """Attention of one forward: everything that its layers share is checked once; see `AttentionLayers`."""

    def __init__(self, kernels: ModuleType, variant: object, inputs: AttentionInputs) -> None:
        _check("attention", "keys", inputs.keys, torch.float16, (None, None, None, None, None))
        num_layers, num_pages, page_size, num_kv_heads, head_dim = inputs.keys.shape
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            raise ValueError(f"attention: heads have an even number of at most {MAX_HEAD_DIM} values, got {head_dim}")
        _check("attention", "values", inputs.values, torch.float16, inputs.keys.shape)
        _check("attention", "filled", inputs.filled, torch.int32, (num_layers, num_pages))
        _check("attention", "positions", inputs.positions, torch.int32, (None,))
        num_rows = inputs.positions.shape[0]
        _check("attention", "slot_mapping", inputs.slot_mapping, torch.int32, (num_rows,))
        _check("attention", "seq_lens", inputs.seq_lens, torch.int32, (None,))
        num_seqs = inputs.seq_lens.shape[0]
        _check("attention", "query_start_loc", inputs.query_start_loc, torch.int32, (num_seqs + 1,))
        _check("attention", "page_table", inputs.page_table, torch.int32, (num_seqs, None))
        num_positions = inputs.tables[0].shape[0]
        for table in inputs.tables:
            _check("attention", "tables", table, torch.float32, (num_positions, head_dim // 2))
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
        _check("attention", "qkv", qkv, torch.float32, (num_rows, qkv_size))
        y = _empty(num_rows, attended_size)
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
        num_rows = _check_rows("layers", "x", x, self._hidden_size)
        sizes = (self._num_layers, num_rows, self._qkv_size, self._attended_size)
        if attention.sizes != sizes:
            raise ValueError(f"layers: (layers, rows, qkv, attended) are {sizes}, the attention's {attention.sizes}")
        self._layers.run(attention.handle, x.data_ptr(), num_rows)
        return x


class MachineProbe:
    """Work that only the machine limits, with the kernels' own instructions, threads and kind of memory."""

    def __init__(self, backend: NativeBackend, num_bytes: int) -> None:
        """`num_bytes` of memory to read: far more than the caches hold."""
        self._variant = backend._variant
        self._memory = backend._kernels.Buffer(num_bytes)
        # Pages that nobody has written are all the same page of zeros.
        ctypes.memset(self._memory.address, 1, num_bytes)
        self._num_bytes = num_bytes

    def read(self) -> int:
        """Reads the memory once, in order, each thread its part; returns the bytes read, which are whole pages."""
        count: int = self._variant.read_memory(self._memory.address, self._num_bytes)
        return count

    def multiply(self, iterations: int) -> int:
        """Integer dot products on registers, in every thread; returns the multiply-accumulates done."""
        count: int = self._variant.dot_products(iterations)
        return count


@cache
def default_backend() -> NativeBackend | None:
    """The kernels for operations that belong to no model; None where they were not built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the kernels are missing was said when a model loaded
        backend = choose_backend()
    return backend if isinstance(backend, NativeBackend) else None


def argmax(logits: Tensor) -> list[int]:
    """`reference.argmax`, by the kernels where they were built: there is just one right answer."""
    backend = default_backend()
    return reference.argmax(logits) if backend is None else backend.argmax(logits.contiguous())


def _file_rows(operation: str, weight: RawTensor) -> Tensor:
    """A matrix's bytes, uint8 [num_rows, row_bytes], as the kernels read them."""
    data = raw_bytes(weight)
    num_rows, num_columns = weight.shape
    if num_columns % weight.weight_type.block_size:
        raise ValueError(
            f"{operation}: rows of {num_columns} weights are no whole blocks of {weight.weight_type.block_size}"
        )
    _check(operation, weight.name, data, torch.uint8, (num_rows, weight.weight_type.row_bytes(num_columns)))
    return data


def _head_norms(kernels: ModuleType, norms: HeadNorms | None, head_dim: int | None = None) -> object | None:
    """The norms as the kernels take them, which copies the weights; `ValueError` for two of different sizes."""
    if norms is None:
        return None
    head_dim = len(norms.query.weight) if head_dim is None else head_dim
    for name, norm in (("query", norms.query), ("key", norms.key)):
        _check("attention", f"{name} norm", norm.weight, torch.float32, (head_dim,))
    query, key = norms.query, norms.key
    made: object = kernels.HeadNorms(query.weight.data_ptr(), query.eps, key.weight.data_ptr(), key.eps, head_dim)
    return made


def _empty(*shape: int) -> Tensor:
    """Memory for a kernel to fill, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _check(operation: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """`ValueError` unless the kernel can read the tensor as it lies; None in `shape` is any size."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{operation}: {name} must be contiguous {dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
        )
    found = tensor.shape
    if len(found) != len(shape) or not all(size in (None, found[i]) for i, size in enumerate(shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{operation}: {name} must be [{wanted}], got {list(found)}")


def _check_rows(operation: str, name: str, tensor: Tensor, size: int) -> int:
    """The number of rows of float32 [n, size], checked as `_check` does, but quickly: it runs for every product."""
    shape = tensor.shape
    fits = len(shape) == 2 and shape[1] == size
    if not (fits and tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.is_cpu):
        _check(operation, name, tensor, torch.float32, (None, size))
    return shape[0]
