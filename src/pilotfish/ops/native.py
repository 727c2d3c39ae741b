"""The C++ kernels as a backend, which passes them pointers and sizes of checked arguments.

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

from pilotfish.config import MAX_THREADS
from pilotfish.errors import NonFiniteLogitsError, OptionError
from pilotfish.ops import reference
from pilotfish.ops.backend import (
    AttentionInputs,
    AttentionLayers,
    Backend,
    DecoderLayers,
    LayerWeights,
    LinearLayer,
    Norm,
    Projection,
)
from pilotfish.ops.cores import num_usable_cores
from pilotfish.ops.native_arguments import TYPE_NUMBERS, check, empty, file_rows
from pilotfish.ops.native_layers import NativeAttention, NativeLayers, PackedLinear
from pilotfish.ops.reference import ReferenceBackend
from pilotfish.types import Distribution, RawTensor


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
        data = file_rows("embedding", weight)
        kind, (num_rows, size) = TYPE_NUMBERS[weight.weight_type], weight.shape

        def lookup(token_ids: Tensor) -> Tensor:
            check("embedding", "token_ids", token_ids, torch.int32, (None,))
            y = empty(len(token_ids), size)
            ids = token_ids.data_ptr()
            self._kernels.embedding(kind, data.data_ptr(), num_rows, size, ids, len(token_ids), y.data_ptr())
            return y

        return lookup

    def make_attention(self, inputs: AttentionInputs) -> AttentionLayers:
        return NativeAttention(self._kernels, self._variant, inputs)

    def argmax(self, logits: Tensor) -> list[int]:
        """See `reference.argmax`."""
        check("argmax", "logits", logits, torch.float32, (None, None))
        best: list[int] = self._variant.argmax(logits.data_ptr(), *logits.shape)
        if -1 in best:
            raise NonFiniteLogitsError(best.index(-1))
        return best

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """See `reference.log_sum_exp`."""
        check("log_sum_exp", "logits", logits, torch.float32, (None, None))
        y = empty(len(logits))
        self._variant.log_sum_exp(logits.data_ptr(), *logits.shape, y.data_ptr())
        return y

    def distribution(
        self, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> Distribution | None:
        """See `sampling_reference.distribution`."""
        check("distribution", "logits", logits, torch.float32, (None,))
        size = len(logits)
        if not (size and temperature > 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            options = f"temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}"
            raise ValueError(f"distribution: {size} logits with {options} have none")
        token_ids, probs = np.empty(size, np.int32), np.empty(size, np.float64)
        places = token_ids.ctypes.data, probs.ctypes.data
        count = self._variant.distribution(logits.data_ptr(), size, temperature, top_k, top_p, min_p, *places)
        return None if count < 0 else Distribution(token_ids[:count], probs[:count])

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int32] | None:
        """See `sampling_reference.largest`."""
        check("largest", "logits", logits, torch.float32, (None,))
        if count < 1 or not len(logits):
            raise ValueError(f"largest: there are no {count} of {len(logits)} logits")
        token_ids = np.empty(min(count, len(logits)), np.int32)
        sound = self._variant.largest(logits.data_ptr(), len(logits), len(token_ids), token_ids.ctypes.data) >= 0
        return token_ids if sound else None

    def residual(self, p: Distribution, q: Distribution) -> Distribution | None:
        """See `sampling_reference.residual`."""
        size = len(p.token_ids)
        token_ids, probs = np.empty(size, np.int32), np.empty(size, np.float64)
        arguments = [
            place
            for each in (p, q)
            for place in (each.token_ids.ctypes.data, each.probs.ctypes.data, len(each.token_ids))
        ]
        count = self._variant.residual(*arguments, token_ids.ctypes.data, probs.ctypes.data)
        return Distribution(token_ids[:count], probs[:count]) if count else None

    def gumbel_argmax(self, distribution: Distribution, stream: int) -> int:
        """See `sampling_reference.gumbel_argmax`."""
        token_ids, probs = distribution.token_ids, distribution.probs
        place = self._variant.gumbel_argmax(token_ids.ctypes.data, probs.ctypes.data, len(token_ids), stream)
        return int(token_ids[place])


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
        backend = choose_backend(threads=1)  # none of them runs in more
    return backend if isinstance(backend, NativeBackend) else None


def argmax(logits: Tensor) -> list[int]:
    """`reference.argmax`, by the kernels where they were built: there is just one right answer."""
    backend = default_backend()
    return reference.argmax(logits) if backend is None else backend.argmax(logits.contiguous())
