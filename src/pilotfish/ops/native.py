"""The C++ kernels: checks device, dtype, shape and contiguity, then passes pointers and sizes.

Only this module imports the extension `pilotfish._kernels`. So far it holds the matrix product with quantised weights,
which is nearly all of a forward; the other operations are those of `reference`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from pilotfish.errors import OptionError
from pilotfish.ops.backend import Backend, LinearLayer
from pilotfish.ops.reference import ReferenceBackend, dense, raw_bytes
from pilotfish.types import RawTensor, WeightType

# The number each type has in csrc/kernels.h, and how many activations go into each sum that its offset needs.
_PACKED_TYPES = {
    WeightType.Q8_0: (0, 32),
    WeightType.Q4_1: (1, 32),
    WeightType.Q5_0: (2, 32),
    WeightType.Q4_K: (3, 32),
    WeightType.Q6_K: (4, 16),
}
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
    """Quantised matrices are repacked once for the kernels of one instruction set; others stay float32."""

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
        self._type, self._sum_size = _PACKED_TYPES[weight.weight_type]
        self._bias = None if bias is None else dense(bias)
        data = raw_bytes(weight)
        if not data.is_contiguous():
            raise ValueError(f"linear: the rows of {weight.name} are not contiguous")
        size = kernels.packed_bytes(self._type, self._num_outputs, self._num_inputs)
        self._packed = kernels.Buffer(size + _PREFETCH_BYTES)
        kernels.pack(self._type, data.data_ptr(), self._num_outputs, self._num_inputs, self._packed.address, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [n, in] on the CPU, contiguous, to float32 [n, out]."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"linear: x must be contiguous float32 on the CPU, got {x.dtype} on {x.device}")
        if x.dim() != 2 or x.shape[1] != self._num_inputs:
            raise ValueError(f"linear: x must be [n, {self._num_inputs}], got {list(x.shape)}")
        n = len(x)
        codes = torch.empty(n, self._num_inputs, dtype=torch.int8)
        scales = torch.empty(n, self._num_inputs // self._block_size)
        sums = torch.empty(n, self._num_inputs // self._sum_size, dtype=torch.int16)
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
