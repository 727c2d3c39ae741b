"""What runs a model's arithmetic: the reference operations, or the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pilotfish.types import RawTensor

LinearLayer = Callable[[Tensor], Tensor]
"""x · weightᵀ + bias: float32 [n, in] to [n, out], each row independent of those beside it."""


class Backend(Protocol):
    """The operations that cost time; `reference` says what each means."""

    @property
    def name(self) -> str: ...

    def make_linear(self, weight: RawTensor, bias: RawTensor | None) -> LinearLayer:
        """A dense layer, prepared once; `weight` is [out, in], `bias` [out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

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
    ) -> Tensor: ...

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor
    ) -> Tensor: ...
