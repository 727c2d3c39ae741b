"""Blocks of MLX's affine quantisation as the `mlx` package understands them: the oracle for our types of that name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import torch
from tiny_models import scale_dtype

from pilotfish.types import WeightType

MLX_TYPES = [weight_type for weight_type in WeightType if weight_type.name.startswith("MLX")]


def mlx_values(data: np.ndarray[Any, Any], weight_type: WeightType) -> np.ndarray[Any, Any]:
    """float32 [num_rows, num_columns]: `mx.dequantize` on scales and biases widened to float32."""
    scales, biases, codes = parts(data, weight_type)
    bits, group_size = int(weight_type.name[3]), weight_type.block_size
    return np.array(mx.dequantize(*map(mx.array, (codes, scales, biases)), group_size=group_size, bits=bits))


def mlx_quantized(weights: np.ndarray[Any, Any], weight_type: WeightType) -> np.ndarray[Any, Any]:
    """Rows of blocks with what `mx.quantize` makes of float32 [num_rows, num_columns]."""
    dtype = {torch.float32: mx.float32, torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}[
        scale_dtype(weight_type)
    ]
    bits, group_size = int(weight_type.name[3]), weight_type.block_size
    codes, scales, biases = mx.quantize(mx.array(weights).astype(dtype), group_size=group_size, bits=bits)
    num_blocks = scales.size
    as_bytes = (np.array(each.view(mx.uint8)).reshape(num_blocks, -1) for each in (scales, biases, codes))
    return np.concatenate(list(as_bytes), axis=1).reshape(len(weights), -1)


def parts(
    data: np.ndarray[Any, Any], weight_type: WeightType
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scales and biases float32 [num_rows, num_blocks], codes uint32 [num_rows, words]."""
    dtype = scale_dtype(weight_type)
    blocks = torch.from_numpy(data.reshape(len(data), -1, weight_type.block_bytes))
    ends = (dtype.itemsize, 2 * dtype.itemsize)
    scales = blocks[..., : ends[0]].clone(memory_format=torch.contiguous_format).view(dtype)
    biases = blocks[..., ends[0] : ends[1]].clone(memory_format=torch.contiguous_format).view(dtype)
    codes = np.ascontiguousarray(blocks[..., ends[1] :].numpy()).view(np.uint32)
    return scales.float().flatten(1).numpy(), biases.float().flatten(1).numpy(), codes.reshape(len(data), -1)
