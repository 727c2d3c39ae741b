"""What a Hugging Face config says about rotary positions, wherever in it that stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from pilotfish.errors import FormatError, UnsupportedModelError, brief
from pilotfish.formats.config_values import ConfigValues

_DEFAULT_THETA = 10000.0
_OBJECTS = ("rope_parameters", "rope_scaling")
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def read_rope(path: Path, config: Mapping[str, object], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """`rope_theta` and `rope_factors` of a `ModelConfig`.

    The values stand in `rope_parameters` (transformers 5), in `rope_scaling` or at the top level; where two places say
    different things there is no telling which counts, and that is a `FormatError`, as is any impossible value. A rope
    type other than default and llama3 is an `UnsupportedModelError`.
    """
    values = ConfigValues(f"{path}: the rope parameter", _gathered(path, config))
    rope_type = values.get("rope_type", "default")
    if values.get("rope_type") is None and values.get("factor") is not None:
        raise values.fail("rope_type", "there beside 'factor', or there is no telling how it scales")
    if rope_type not in ("default", "llama3"):
        raise UnsupportedModelError(f"{path} has the rope type {brief(rope_type)}; supported are default and llama3")
    if values.get("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModelError(f"{path}: 'partial_rotary_factor' is not 1: a part of each head is not rotated")
    theta = values.positive("rope_theta", _DEFAULT_THETA)
    if theta < 1:
        raise values.fail("rope_theta", "at least 1")
    return theta, _llama3_factors(values, theta, head_dim) if rope_type == "llama3" else None


def _gathered(path: Path, config: Mapping[str, object]) -> dict[str, object]:
    """The parameters from every place, `type` under its newer name `rope_type`."""
    places = {"the top level": {key: config[key] for key in _TOP_LEVEL if key in config}}
    for name in _OBJECTS:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise FormatError(f"{path}: {name!r} must be an object, got {brief(value)}")
        places[name] = {key: value[key] for key in value if key != "type"}
        if "type" in value:
            places[f"{name} (type)"] = {"rope_type": value["type"]}
    found: dict[str, object] = {}
    origin: dict[str, str] = {}
    for place, parameters in places.items():
        for key, value in parameters.items():
            if value is None:
                continue
            if isinstance(value, dict | list):  # for each layer type, or for each frequency
                raise UnsupportedModelError(f"{path}: the rope parameter {brief(key)} is {brief(value)}, not one value")
            if found.setdefault(key, value) != value:
                raise FormatError(
                    f"{path}: {brief(key)} is {brief(found[key])} at {origin[key]}, but {brief(value)} at {place}; "
                    "make them agree"
                )
            origin.setdefault(key, place)
    return found


def _llama3_factors(values: ConfigValues, theta: float, head_dim: int) -> tuple[float, ...]:
    """What divides each rotary frequency: 1 for short wavelengths, `factor` for long ones, and between the two a ramp.

    Source: `apply_scaling` of Meta's Llama 3.1 reference code, and `_compute_llama3_parameters` in transformers.
    """
    factor = values.positive("factor")
    low, high = values.positive("low_freq_factor"), values.positive("high_freq_factor")
    context = values.count("original_max_position_embeddings")
    if factor < 1:
        raise values.fail("factor", "at least 1")
    if low >= high:
        raise values.fail("low_freq_factor", "less than 'high_freq_factor'")
    factors = []
    for index in range(head_dim // 2):
        turns = context * theta ** (-2 * index / head_dim) / (2 * math.pi)  # within the original context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)
