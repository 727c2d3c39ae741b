"""MLX-quantised weights: what a folder's config says about them, and each matrix brought together from three tensors.

Source: `mlx.core.quantize` (mode affine) and `mlx.nn.quantize` in MLX, `load_model` in mlx-lm. A matrix `X.weight` of
[out, in] has its codes, `bits` each, packed into uint32 words [out, in * bits / 32]; `X.scales` and `X.biases`, [out,
in / group_size], hold for `group_size` weights of a row: w = scale * code + bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.safetensors import StoredTensor
from pilotfish.types import RawTensor, WeightType

_BITS, _GROUP_SIZES = (4, 8), (32, 64, 128)
_SCALE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_OPTIONS = ("bits", "group_size", "mode")


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Quantization:
    """How a folder's matrices are quantised: those with scales by `scheme`, unless `overrides` has their module."""

    scheme: Scheme
    overrides: Mapping[str, Scheme | None]
    """By module, such as `model.layers.0.mlp.up_proj`; None for one that is not quantised."""

    def of(self, module: str) -> Scheme | None:
        return self.overrides.get(module, self.scheme)


def read_quantization(path: Path, config: Mapping[str, object]) -> Quantization | None:
    """What `quantization` or `quantization_config` of a config.json at `path` says; None where there is neither.

    Raises `UnsupportedModelError` for another method, mode, number of bits or group size, and `FormatError` for
    impossible values and for two places that disagree.
    """
    found = [
        _quantization(path, name, config[name])
        for name in ("quantization", "quantization_config")
        if config.get(name) is not None
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise FormatError(f"{path}: 'quantization' and 'quantization_config' disagree; make them agree")
    return found[0] if found else None


def _quantization(path: Path, name: str, values: object) -> Quantization:
    if not isinstance(values, dict):
        raise FormatError(f"{path}: {name!r} must be an object, got {brief(values)}")
    if "quant_method" in values:
        raise UnsupportedModelError(
            f"{path}: the weights are quantised by the method {brief(values['quant_method'])}; supported is MLX's "
            "affine quantisation"
        )
    scheme = _scheme(path, name, values)
    overrides: dict[str, Scheme | None] = {}
    for module, choice in values.items():
        if module in _OPTIONS:
            continue
        where = f"{name}.{module[:100]}"
        if isinstance(choice, bool):
            overrides[module] = scheme if choice else None
        elif isinstance(choice, dict):
            overrides[module] = _scheme(path, where, choice)
        else:
            raise UnsupportedModelError(f"{path}: {brief(where)} is {brief(choice)}, an option that is not supported")
    return Quantization(scheme, overrides)


def _scheme(path: Path, where: str, values: Mapping[str, object]) -> Scheme:
    mode = values.get("mode", "affine")
    if mode != "affine":
        raise UnsupportedModelError(f"{path}: the mode of {brief(where)} is {brief(mode)}; supported is affine")
    numbers = []
    for key, supported in (("bits", _BITS), ("group_size", _GROUP_SIZES)):
        value = values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FormatError(f"{path}: {key!r} of {brief(where)} must be a positive integer, got {brief(value)}")
        if value not in supported:
            raise UnsupportedModelError(
                f"{path}: {key!r} of {brief(where)} is {brief(value)}; supported are {', '.join(map(str, supported))}"
            )
        numbers.append(value)
    return Scheme(*numbers)


def join_quantized(stored: Mapping[str, StoredTensor], quantization: Quantization | None) -> dict[str, RawTensor]:
    """The tensors by name, each quantised matrix as one under the name of its codes.

    Raises `FormatError` where a matrix is not as `quantization` and the other two of its tensors demand.
    """
    if quantization is None:
        return {name: tensor.raw() for name, tensor in stored.items()}
    found = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            if f"{module}.weight" not in stored:
                raise FormatError(
                    f"{tensor.path} holds the tensor {brief(name)}, but there is no {brief(f'{module}.weight')}"
                )
            continue
        if part == "weight" and _is_quantized(module, tensor, stored, quantization):
            found[name] = _join(module, stored, quantization)
        else:
            found[name] = tensor.raw()
    return found


def _is_quantized(
    module: str, weight: StoredTensor, stored: Mapping[str, StoredTensor], quantization: Quantization
) -> bool:
    """Whether the tensors of a module are those of a quantised one; they and the config must agree on it."""
    quantized = weight.dtype == "U32"
    for part in ("scales", "biases"):
        if (f"{module}.{part}" in stored) != quantized:
            other = brief(f"{module}.{part}")
            what = f"has no {other}" if quantized else f"is not quantised, but there is {other}"
            raise FormatError(f"{weight.path}: tensor {brief(weight.name)} of the dtype {weight.dtype} {what}")
    expected = quantization.overrides.get(module, quantized) not in (None, False)
    if quantized != expected:
        are = "are" if expected else "are not"
        raise FormatError(
            f"{weight.path}: the config says that the weights of {brief(module)} {are} quantised, but the dtype of "
            f"{brief(weight.name)} is {weight.dtype}"
        )
    return quantized


def _join(module: str, stored: Mapping[str, StoredTensor], quantization: Quantization) -> RawTensor:
    weight, scales, biases = (stored[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    scheme = quantization.of(module)
    assert scheme is not None
    if scales.dtype not in _SCALE_BYTES or biases.dtype != scales.dtype:
        raise UnsupportedModelError(
            f"{weight.path}: the tensors {brief(scales.name)} and {brief(biases.name)} have the dtypes {scales.dtype} "
            f"and {biases.dtype}; supported are {', '.join(_SCALE_BYTES)}, the same for both"
        )
    bits, group_size = scheme.bits, scheme.group_size
    if len(weight.shape) != 2:
        raise FormatError(
            f"{weight.path}: tensor {brief(weight.name)} has the shape {brief(weight.shape)}, which is no matrix"
        )
    rows, columns = weight.shape[0], weight.shape[1] * 32 // bits
    for tensor in (scales, biases):
        if columns % group_size or tensor.shape != (rows, columns // group_size):
            raise FormatError(
                f"{weight.path}: tensor {brief(tensor.name)} has the shape {brief(tensor.shape)}, which does not fit "
                f"{weight.shape} words of {brief(weight.name)} with {bits} bits and groups of {group_size}"
            )
    weight_type = WeightType[f"MLX{bits}_{group_size}_{scales.dtype}"]

    def evict() -> None:
        for tensor in (weight, scales, biases):
            tensor.evict()

    read = _interleaved(weight_type, weight, scales, biases)
    return RawTensor(weight.name, weight_type, (rows, columns), read, evict)


def _interleaved(
    weight_type: WeightType, weight: StoredTensor, scales: StoredTensor, biases: StoredTensor
) -> Callable[[], np.ndarray[Any, Any]]:
    """Reads the three as uint8 [rows, row_bytes]: for each group its scale, its bias, and its codes."""
    scale_bytes = _SCALE_BYTES[scales.dtype]
    block = np.dtype(
        [
            ("scale", f"V{scale_bytes}"),
            ("bias", f"V{scale_bytes}"),
            ("codes", f"V{weight_type.block_bytes - 2 * scale_bytes}"),
        ]
    )

    def read() -> np.ndarray[Any, Any]:
        blocks = np.empty(scales.shape, block)
        for part, tensor in (("scale", scales), ("bias", biases), ("codes", weight)):
            blocks[part] = tensor.read().view(block[part]).reshape(scales.shape)
        return blocks.view(np.uint8)

    return read
