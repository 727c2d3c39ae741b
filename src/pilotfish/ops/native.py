"""The C++ kernels: checks device, dtype, shape and contiguity, then passes pointers and sizes.

Only this module imports the extension `pilotfish._kernels`. What each operation means is said in `reference`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from pilotfish.errors import OptionError
from pilotfish.ops.backend import Backend, LinearLayer
from pilotfish.ops.reference import ReferenceBackend, dense, raw_bytes
from pilotfish.types import RawTensor, WeightType

# The number each type has in csrc/kernels.h.
_PACKED_TYPES = {
    WeightType.Q8_0: 0,
    WeightType.Q4_1: 1,
    WeightType.Q5_0: 2,
    WeightType.Q4_K: 3,
    WeightType.Q6_K: 4,
}
_SMALLEST_SUM = 16  # activations in a sum that a block's offset needs, at least: room for the most sums
_PREFETCH_BYTES = 8192  # the kernels ask for bytes somewhat beyond a matrix


def choose_backend(environment: Mapping[str, str] = os.environ) -> Backend:
    """The native backend, or with a warning the reference where the extension was not built.

    `PILOTFISH_ISA` forces an instruction set, `PILOTFISH_THREADS` a number of threads; `OptionError` for a value that
    is unknown or that this machine does not have.
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
    threads = environment.get("PILOTFISH_THREADS") or str(torch.get_num_threads())
    if not threads.isdecimal() or not 1 <= int(threads) <= 1024:
        raise OptionError(f"PILOTFISH_THREADS must be a number from 1 to 1024, got {threads!r}")
    return NativeBackend(_kernels, isa, int(threads))


class NativeBackend:
    """The kernels of one instruction set. Quantised matrices are repacked once; others stay float32, run by torch."""

    def __init__(self, kernels: ModuleType, isa: str, threads: int) -> None:
        self.name = f"native ({isa}, {threads} threads)"
        self._kernels = kernels
        self._isa = isa
        self._threads = threads
        self._reference = ReferenceBackend()

    def make_linear(self, weight: RawTensor, bias: RawTensor | None) -> LinearLayer:
        if weight.weight_type not in _PACKED_TYPES:
            return self._reference.make_linear(weight, bias)
        return PackedLinear(self._kernels, self._isa, self._threads, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check("rms_norm", "x", x, torch.float32, (None, None))
        _check("rms_norm", "weight", weight, torch.float32, (x.shape[1],))
        y = torch.empty_like(x)
        self._kernels.rms_norm(self._isa, x.data_ptr(), weight.data_ptr(), eps, *x.shape, y.data_ptr())
        return y

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        _check("silu_mul", "gate", gate, torch.float32, (None, None))
        _check("silu_mul", "up", up, torch.float32, gate.shape)
        y = torch.empty_like(gate)
        self._kernels.silu_mul(self._isa, gate.data_ptr(), up.data_ptr(), *gate.shape, y.data_ptr())
        return y

    def rotary_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        keys: Tensor,
        values: Tensor,
        filled: Tensor,
    ) -> Tensor:
        _check("rotary_write", "q", q, torch.float32, (None, None, None))
        num_rows, num_heads, head_dim = q.shape
        _check("rotary_write", "keys", keys, torch.float32, (None, None, None, head_dim))
        num_pages, page_size, num_kv_heads, _ = keys.shape
        _check("rotary_write", "values", values, torch.float32, keys.shape)
        _check("rotary_write", "filled", filled, torch.int32, (num_pages,))
        _check("rotary_write", "k", k, torch.float32, (num_rows, num_kv_heads, head_dim))
        _check("rotary_write", "v", v, torch.float32, k.shape)
        _check("rotary_write", "positions", positions, torch.int32, (num_rows,))
        _check("rotary_write", "slot_mapping", slot_mapping, torch.int32, (num_rows,))
        for table in tables:
            _check("rotary_write", "tables", table, torch.float32, (None, head_dim // 2))
        rotated_q = torch.empty_like(q)
        self._kernels.rotary_write(
            self._isa,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            tables[0].data_ptr(),
            tables[1].data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            filled.data_ptr(),
            num_rows,
            page_size,
            num_heads,
            num_kv_heads,
            head_dim,
            rotated_q.data_ptr(),
        )
        return rotated_q

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor
    ) -> Tensor:
        _check("attention", "q", q, torch.float32, (None, None, None))
        num_heads, head_dim = q.shape[1:]
        _check("attention", "keys", keys, torch.float32, (None, None, None, head_dim))
        _check("attention", "values", values, torch.float32, keys.shape)
        _check("attention", "seq_lens", seq_lens, torch.int32, (None,))
        _check("attention", "query_start_loc", query_start_loc, torch.int32, (len(seq_lens) + 1,))
        _check("attention", "page_table", page_table, torch.int32, (len(seq_lens), None))
        page_size, num_kv_heads = keys.shape[1:3]
        if num_heads % num_kv_heads:
            raise ValueError(f"attention: {num_heads} query heads cannot share {num_kv_heads} key/value heads")
        y = torch.empty_like(q)
        self._kernels.attention(
            self._isa,
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            page_table.data_ptr(),
            *page_table.shape,
            page_size,
            num_heads,
            num_kv_heads,
            head_dim,
            y.data_ptr(),
            self._threads,
        )
        return y


class PackedLinear:
    """x · weightᵀ + bias with quantised weights, and x quantised to int8 block by block.

    A block of x is as long as a block of the weights (32 or 256); its scale is its largest magnitude over 127. All
    products and sums within a block are exact integers, so the result's bits depend neither on the rows beside a row,
    nor on threads, nor on the instruction set.
    """

    def __init__(self, kernels: ModuleType, isa: str, threads: int, weight: RawTensor, bias: RawTensor | None) -> None:
        self._kernels = kernels
        self._isa = isa
        self._threads = threads
        self._num_outputs, self._num_inputs = weight.shape
        self._block_size = weight.weight_type.block_size
        self._type = _PACKED_TYPES[weight.weight_type]
        self._bias = None if bias is None else dense(bias)
        data = raw_bytes(weight)
        if not data.is_contiguous():
            raise ValueError(f"linear: the rows of {weight.name} are not contiguous")
        size = kernels.packed_bytes(self._type, self._num_outputs, self._num_inputs)
        self._packed = kernels.Buffer(size + _PREFETCH_BYTES)
        kernels.pack(self._type, data.data_ptr(), self._num_outputs, self._num_inputs, self._packed.address, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [n, in] on the CPU, contiguous, to float32 [n, out]."""
        _check("linear", "x", x, torch.float32, (None, self._num_inputs))
        n = len(x)
        codes = torch.empty(n, self._num_inputs, dtype=torch.int8)
        scales = torch.empty(n, self._num_inputs // self._block_size)
        sums = torch.empty(n, self._num_inputs // _SMALLEST_SUM, dtype=torch.int16)
        y = torch.empty(n, self._num_outputs)
        self._kernels.linear(
            self._isa,
            self._type,
            self._packed.address,
            self._num_outputs,
            self._num_inputs,
            x.data_ptr(),
            n,
            codes.data_ptr(),
            scales.data_ptr(),
            sums.data_ptr(),
            y.data_ptr(),
            self._threads,
        )
        return y if self._bias is None else y + self._bias


def _check(operation: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """`ValueError` unless the kernel can read the tensor as it lies; None in `shape` is any size."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} must be contiguous {dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
        )
    found = tensor.shape
    if len(found) != len(shape) or any(size is not None and size != found[i] for i, size in enumerate(shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{operation}: {name} must be [{wanted}], got {list(found)}")
