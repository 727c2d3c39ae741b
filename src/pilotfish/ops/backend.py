"""What runs a model's matrix products: the reference operations, or the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pilotfish.types import RawTensor

LinearLayer = Callable[[Tensor], Tensor]
"""x · weightᵀ + bias: float32 [n, in] to [n, out], each row independent of those beside it."""


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def make_linear(self, weight: RawTensor, bias: RawTensor | None) -> LinearLayer:
        """A dense layer, prepared once; `weight` is [out, in], `bias` [out]."""
