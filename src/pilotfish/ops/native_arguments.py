"""What a kernel may be given: device, dtype, shape and contiguity are checked before a pointer goes to C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish.ops.reference import raw_bytes
from pilotfish.types import RawTensor, WeightType

# The number each type has in csrc/kernels.h, which names them in the same order.
TYPE_NUMBERS = {weight_type: number for number, weight_type in enumerate(WeightType)}


def file_rows(operation: str, weight: RawTensor) -> Tensor:
    """A matrix's bytes, uint8 [num_rows, row_bytes], as the kernels read them."""
    data = raw_bytes(weight)
    num_rows, num_columns = weight.shape
    if num_columns % weight.weight_type.block_size:
        raise ValueError(
            f"{operation}: rows of {num_columns} weights are no whole blocks of {weight.weight_type.block_size}"
        )
    check(operation, weight.name, data, torch.uint8, (num_rows, weight.weight_type.row_bytes(num_columns)))
    return data


def empty(*shape: int) -> Tensor:
    """Memory for a kernel to fill, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def check(operation: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """`ValueError` unless the kernel can read the tensor as it lies; None in `shape` is any size."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{operation}: {name} must be contiguous {dtype} on the CPU, got {tensor.dtype} on {tensor.device}"
        )
    found = tensor.shape
    if len(found) != len(shape) or not all(size in (None, found[i]) for i, size in enumerate(shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{operation}: {name} must be [{wanted}], got {list(found)}")


def check_rows(operation: str, name: str, tensor: Tensor, size: int) -> int:
    """The number of rows of float32 [n, size], checked as `check` does, but quickly: it runs for every product."""
    shape = tensor.shape
    fits = len(shape) == 2 and shape[1] == size
    if not (fits and tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.is_cpu):
        check(operation, name, tensor, torch.float32, (None, size))
    return shape[0]
