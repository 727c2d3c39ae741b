"""Weights of every file type as float32, in plain torch: block formats as described in ggml's `ggml-common.h`, and the
affine one of MLX's `mx.quantize`.

Each function takes uint8 [n, block_bytes] and returns float32 [n, block_size]; the products and sums are rounded in
the order ggml's own `dequantize_row_*` rounds them, and `mx.dequantize` on scales and biases widened to float32, so the
values are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pilotfish.types import WeightType


def dequantize(data: Tensor, weight_type: WeightType) -> Tensor:
    """Rows of weights: uint8 [num_rows, row_bytes] to float32 [num_rows, num_columns]."""
    num_rows = data.shape[0]
    blocks = data.reshape(-1, weight_type.block_bytes)
    return _BLOCKS[weight_type](blocks).reshape(num_rows, -1)


def _scalar(blocks: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """The number at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + dtype.itemsize].contiguous().view(dtype).float()


def _half(blocks: Tensor, start: int) -> Tensor:
    return _scalar(blocks, start, torch.float16)


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., m] to uint8 [..., 2 m]: all low halves, then all high halves."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """uint8 [n, m] to [n, m, 8]: the bits of each byte, the lowest first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1


def _f32(blocks: Tensor) -> Tensor:
    # clone: a row of the memory map may be unaligned for float32, and must not be handed on as writable memory
    return blocks.clone().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    """scale f16, 32 signed codes: w = scale · code."""
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    """scale f16, 32 codes of 4 bits: w = scale · (code - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(blocks: Tensor) -> Tensor:
    """scale f16, minimum f16, 32 codes of 4 bits: w = scale · code + minimum."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    """scale f16, 32 fifth bits, 32 codes of 4 bits: w = scale · (code - 16)."""
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]).flatten(1) << 4)
    return _half(blocks, 0) * (codes.to(torch.int8) - 16).float()


def _q5_1(blocks: Tensor) -> Tensor:
    """scale f16, minimum f16, 32 fifth bits, 32 codes of 4 bits: w = scale · code + minimum."""
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]).flatten(1) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    """256 weights in 8 groups of 32: w = (d · scale) · code - (dmin · minimum); scales and minima have 6 bits."""
    return _with_scales_and_minima(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with codes of 5 bits: bit j of byte i, of 32 bytes before the low ones, belongs to code i of group j."""
    fifth = _bits(blocks[:, 16:48]).transpose(1, 2)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_scales_and_minima(blocks, low | (fifth << 4))


def _with_scales_and_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """The weights of Q4_K and Q5_K: codes uint8 [n, 8, 32] to float32 [n, 256]."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1)
    scale = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima.float()).unsqueeze(-1)
    return (scale * codes.float() - minimum).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """256 weights in 16 groups of 16: w = (d · scale) · (code - 32); 4 low and 2 high bits, signed 8-bit scales."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    codes = ((low | (high << 4)).to(torch.int8) - 32).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scale.unsqueeze(-1) * codes.float()).flatten(1)


def _mlx(weight_type: WeightType) -> Callable[[Tensor], Tensor]:
    """scale, bias, then codes in order, of 4 bits the first in the low half of a byte: w = scale · code + bias."""
    name, _, scales = weight_type.name.split("_")
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[scales]

    def values(blocks: Tensor) -> Tensor:
        codes = blocks[:, 2 * dtype.itemsize :]
        if name == "MLX4":
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        return _scalar(blocks, 0, dtype) * codes.float() + _scalar(blocks, dtype.itemsize, dtype)

    return values


_BLOCKS = {
    WeightType.F32: _f32,
    WeightType.F16: _f16,
    WeightType.BF16: _bf16,
    WeightType.Q8_0: _q8_0,
    WeightType.Q4_0: _q4_0,
    WeightType.Q4_1: _q4_1,
    WeightType.Q5_0: _q5_0,
    WeightType.Q5_1: _q5_1,
    WeightType.Q4_K: _q4_k,
    WeightType.Q5_K: _q5_k,
    WeightType.Q6_K: _q6_k,
} | {weight_type: _mlx(weight_type) for weight_type in WeightType if weight_type.name.startswith("MLX")}
