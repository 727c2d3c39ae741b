"""The meaning of what sampling does with one row of logits, in numpy: the kernels give the same bits.

Weights are float64. A sum of weights runs over 16 lanes (id i belongs to lane i mod 16) in the order of ids, and one
fixed tree folds the lanes; running sums go in the order of likelihood: the larger logit first, of equal ones the lower
id. Nothing is fused, and exponential and logarithm are polynomials of our own; so every machine gives the same bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.ops.reference import argmax as argmax
from pilotfish.ops.reference import log_sum_exp as log_sum_exp
from pilotfish.types import Distribution

Floats: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[np.uint64]
Word = TypeVar("Word", int, Words)

_LANES = 16
_SMALLEST_EXPONENT = -650.0
_SMALLEST_TEMPERATURE = 1e-300
_SHIFT = 1.5 * 2.0**52  # added to a float64 it leaves an integer in its lower bits
_WORD = (1 << 64) - 1


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Distribution | None:
    """What may be drawn from one row of logits, float32 [vocab_size]; None where it holds NaN, +infinity, or nothing
    above -infinity.

    A weight is exp((logit - largest) / temperature), temperature > 0. Of all ids `top_k` keeps the likeliest (0: all);
    of these top_p (Holtzman et al. 2020, arXiv 1904.09751) the shortest run in the order of likelihood whose weights
    reach that share of what top_k left (1: all); of these min_p (Nguyen et al. 2024, arXiv 2407.01082) those at least
    so heavy beside the heaviest (0: all). Ids whose weight is 0 go in any case, the likeliest stays in any case.
    """
    x = logits.numpy()
    largest = x.max()
    if not np.isfinite(largest):
        return None
    with np.errstate(over="ignore"):
        exponents = (x.astype(np.float64) - float(largest)) * (1.0 / max(temperature, _SMALLEST_TEMPERATURE))
    weights = exponential_or_zero(exponents)
    likeliest = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        likeliest = likeliest[:top_k]
    if top_p < 1:
        ids = np.sort(likeliest)
        reached = np.cumsum(weights[likeliest]) >= top_p * mass(ids, weights[ids])
        likeliest = likeliest[: int(np.argmax(reached)) + 1] if reached.any() else likeliest
    ids = np.sort(likeliest)
    ids = ids[(weights[ids] > 0) & (weights[ids] >= min_p)]
    return _normalised(ids.astype(np.int32), weights[ids])


def residual(p: Distribution, q: Distribution) -> Distribution | None:
    """max(p - q, 0), made to add up to 1; None where nothing is above 0, or something is not finite."""
    left = p.probs.copy()
    places = np.minimum(np.searchsorted(p.token_ids, q.token_ids), len(left) - 1)
    in_both = p.token_ids[places] == q.token_ids
    left[places[in_both]] -= q.probs[in_both]
    kept = np.flatnonzero(left > 0)
    return _normalised(p.token_ids[kept], left[kept]) if len(kept) and np.isfinite(left).all() else None


def largest(logits: Tensor, count: int) -> NDArray[np.int32] | None:
    """The first `count` ids, at least 1, in the order of likelihood, or all there are; None as `distribution` says."""
    x = logits.numpy()
    return np.argsort(-x, kind="stable")[:count].astype(np.int32) if np.isfinite(x.max()) else None


def gumbel_argmax(distribution: Distribution, stream: int) -> int:
    """The id with the largest log p - log(-log u), of equal ones the lowest; u is `uniform(stream, ids)`."""
    noise = -logarithm(-logarithm(uniform(stream, distribution.token_ids.astype(np.uint64))))
    return int(distribution.token_ids[np.argmax(logarithm(distribution.probs) + noise)])


def uniform(stream: int, indices: Words) -> Floats:
    """(h + 1/2) · 2^-52, h the upper 52 bits of `hash_word`: exact, above 0 and below 1.

    With 53 bits h + 1/2 would be no float64 for half of all h, and for the last one u would be 1.
    """
    return ((hash_word(stream, indices) >> 12).astype(np.float64) + 0.5) * 2.0**-52


def hash_word(state: int, index: Word) -> Word:
    """Output number `index` of the generator SplitMix64 that starts at `state`, 64 bits; ints, or uint64 arrays.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; the constants are Stafford's mix 13.
    """
    z: Any = (state + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    mixed: Word = z ^ (z >> 31)
    return mixed


def mass(ids: NDArray[Any], weights: Floats) -> float:
    """The sum of the weights of some ids, which ascend."""
    lanes = np.zeros(_LANES)
    np.add.at(lanes, ids % _LANES, weights)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def _normalised(ids: NDArray[np.int32], weights: Floats) -> Distribution:
    return Distribution(ids, weights * (1.0 / mass(ids, weights)))


def exponential_or_zero(y: Floats) -> Floats:
    """e^y for y <= 0, within 4 units in the last place; 0 for y <= -650, a magnitude that no sum here could feel."""
    kept = np.maximum(y, _SMALLEST_EXPONENT)
    shifted = kept * 1.4426950408889634 + _SHIFT
    n = shifted - _SHIFT  # the integer next to kept / ln 2
    r = (kept - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10  # ln 2 in two parts
    # Taylor's series to r^12, in groups that do not wait for each other.
    square = r * r
    fourth = square * square
    low = (1.0 + r) + square * (0.5 + r * (1.0 / 6))
    middle = (1.0 / 24 + r * (1.0 / 120)) + square * (1.0 / 720 + r * (1.0 / 5040))
    high = (1.0 / 40320 + r * (1.0 / 362880)) + square * (1.0 / 3628800 + r * (1.0 / 39916800))
    p = low + fourth * (middle + fourth * (high + fourth * (1.0 / 479001600)))
    scaled = (p.view(np.int64) + (shifted.view(np.int64) << 52)).view(np.float64)  # p · 2^n
    return np.where(kept > _SMALLEST_EXPONENT, scaled, 0.0)


def logarithm(x: Floats) -> Floats:
    """ln x for normal x > 0, within some units in the last place: 2 atanh((m - 1) / (m + 1)) + n ln 2, x = m 2^n."""
    bits = x.view(np.int64)
    n = (bits >> 52) - 1023
    m = (bits & ((1 << 52) - 1) | 1023 << 52).view(np.float64)
    above = m > 1.4142135623730951
    m, n = np.where(above, m * 0.5, m), n + above
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    series = np.zeros_like(z)
    for i in range(21, 0, -2):
        series = series * square + 1.0 / i
    return n * 0.69314718055994531 + 2.0 * z * series
