"""The noise of seeded sampling, against its law, and the functions that it is made of.

Keys are fixed, so nothing here fails by chance; each statistical test states how often noise that is truly random would
fail it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pilotfish.ops import sampling_reference
from pilotfish.ops.sampling import (
    Distribution,
    NoisePurpose,
    draft_key,
    gumbel_argmax,
    noise_key,
    purpose_key,
    uniform,
)

FALSE_ALARM = 1e-6
NUM_DRAWS = 100_000


def test_exponential_and_logarithm_are_close_to_numpys() -> None:
    y = -np.concatenate([np.linspace(0, 649.9, 100_001), np.geomspace(1e-300, 600, 10_001)])
    np.testing.assert_array_max_ulp(sampling_reference.exponential_or_zero(y), np.exp(y), 5)
    ends = sampling_reference.exponential_or_zero(np.array([0.0, -0.0, -650.0, -1e308, -np.inf]))
    assert ends.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    x = np.concatenate([np.geomspace(1e-300, 1e300, 100_001), 1 - np.geomspace(2.0**-53, 0.5, 10_001)])
    np.testing.assert_allclose(sampling_reference.logarithm(x), np.log(x), rtol=2e-15)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs from 1234567, as published with the generator's reference code.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [sampling_reference.hash_word(1234567, i) for i in range(5)] == expected
    assert sampling_reference.hash_word(1234567, np.arange(5, dtype=np.uint64)).tolist() == expected


def test_a_seed_means_the_same_for_ever() -> None:
    """Another value here is another text for everybody's seed."""
    assert [noise_key(7), noise_key(7, 1), noise_key(2**64 - 1, 127)] == [
        16886114407743784434,
        7276452696135751452,
        1355684918954531865,
    ]
    assert [purpose_key(noise_key(7), purpose) for purpose in NoisePurpose] == [
        10221096115935525395,
        4978547874147398127,
        7926027899746711020,
    ]
    assert draft_key(noise_key(7), 12) == 16056114296382572681
    assert uniform(noise_key(7), 1000) == float.fromhex("0x1.61bad2e257090p-5")
    even = Distribution(np.arange(1000, dtype=np.int32) * 100, np.full(1000, 1e-3))
    draws = [gumbel_argmax(even, noise_key(7, answer), position) for answer in (0, 1) for position in (0, 1, 1000)]
    assert draws == [68900, 7600, 21500, 8600, 29000, 35400]


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-53), ((1 << 64) - 1, 1 - 2.0**-53), (1 << 63, 0.5 + 2.0**-53)])
def test_noise_stays_between_0_and_1(monkeypatch: pytest.MonkeyPatch, word: int, u: float) -> None:
    monkeypatch.setattr(sampling_reference, "hash_word", lambda state, index: np.full_like(index, word))
    assert sampling_reference.uniform(0, np.arange(3, dtype=np.uint64)).tolist() == [u] * 3


def uniforms(keys: range, positions: range, num_ids: int) -> np.ndarray:
    """[keys, positions, ids], as draws see them."""
    ids = np.arange(num_ids, dtype=np.uint64)
    hash_word, uniform = sampling_reference.hash_word, sampling_reference.uniform
    return np.array([[uniform(hash_word(noise_key(key), position), ids) for position in positions] for key in keys])


def test_noise_is_uniform_and_neighbours_are_independent() -> None:
    """Ten looks, each at a false-alarm rate of 1e-6: at keys, positions and ids that follow each other."""
    u = uniforms(range(20), range(50), 1000)
    assert stats.kstest(u.ravel(), "uniform").pvalue > FALSE_ALARM
    assert stats.chisquare(np.bincount((u.ravel() * 1024).astype(int), minlength=1024)).pvalue > FALSE_ALARM
    lower = (u.ravel() * 2.0**40) % 1  # the bits behind the first forty
    assert stats.chisquare(np.bincount((lower * 256).astype(int), minlength=256)).pvalue > FALSE_ALARM
    cells = (u * 16).astype(int)
    for axis in range(3):
        for distance in (1, 2):
            one = np.take(cells, range(cells.shape[axis] - distance), axis)
            other = np.take(cells, range(distance, cells.shape[axis]), axis)
            pairs = np.bincount((16 * one + other).ravel(), minlength=256)
            assert stats.chisquare(pairs).pvalue > FALSE_ALARM
    answers = uniforms(range(1), range(1), 100_000).ravel()
    other = sampling_reference.uniform(
        sampling_reference.hash_word(noise_key(0, 1), 0), np.arange(100_000, dtype=np.uint64)
    )
    pairs = np.bincount((16 * (16 * answers).astype(int) + (16 * other).astype(int)), minlength=256)
    assert stats.chisquare(pairs).pvalue > FALSE_ALARM


TABLES = [(0.5, 0.3, 0.15, 0.04, 0.009, 0.001), (0.25, 0.25, 0.25, 0.25), (1.0,), (1e-12, 1 - 1e-12)]


def table(probs: tuple[float, ...]) -> Distribution:
    """With ids that are far apart."""
    return Distribution(np.arange(len(probs), dtype=np.int32) * 1000 + 7, np.array(probs))


def drawn(distribution: Distribution, position: int = 5) -> np.ndarray:
    """Places in the distribution, one for each key."""
    ids = [gumbel_argmax(distribution, noise_key(key), position) for key in range(NUM_DRAWS)]
    return np.searchsorted(distribution.token_ids, ids)


@pytest.mark.parametrize("probs", TABLES)
def test_draws_over_keys_follow_the_distribution(probs: tuple[float, ...]) -> None:
    """False-alarm rate 1e-6; cells that expect under 5 draws of 1e5 are put together with the last."""
    counts = np.bincount(drawn(table(probs)), minlength=len(probs)).astype(float)
    expected = NUM_DRAWS * np.array(probs)
    large = expected >= 5
    if large.sum() > 1:
        assert stats.chisquare(counts[large], expected[large] * counts[large].sum() / expected[large].sum()).pvalue > (
            FALSE_ALARM
        )
    assert counts[~large].sum() <= 1


def test_draws_over_positions_follow_the_distribution_too() -> None:
    probs = TABLES[0]
    ids = [gumbel_argmax(table(probs), noise_key(1), position) for position in range(NUM_DRAWS)]
    counts = np.bincount(np.searchsorted(table(probs).token_ids, ids))
    assert stats.chisquare(counts, NUM_DRAWS * np.array(probs)).pvalue > FALSE_ALARM


def test_two_distributions_agree_as_often_as_the_paper_says() -> None:
    """At least (1 - TV) / (1 + TV), less five standard errors."""
    one, other = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    tv = 0.5 * sum(abs(a - b) for a, b in zip(one, other, strict=True))
    rate = float(np.mean(drawn(table(one)) == drawn(table(other))))
    assert rate > (1 - tv) / (1 + tv) - 5 * math.sqrt(0.25 / NUM_DRAWS)


def test_equal_scores_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_reference, "uniform", lambda stream, ids: np.full(len(ids), 0.5))
    assert sampling_reference.gumbel_argmax(table((0.25, 0.25, 0.25, 0.25)), 0) == 7
    assert sampling_reference.gumbel_argmax(table((0.2, 0.4, 0.4)), 0) == 1007


def test_each_purpose_and_each_step_has_noise_of_its_own() -> None:
    """What rejection sampling stands on: the draws for acceptance, recovery and drafts are independent, and a position
    that is drafted for in two steps gets fresh noise. Ten looks, each at a false-alarm rate of 1e-6."""
    key = noise_key(3)
    keys = [purpose_key(key, purpose) for purpose in NoisePurpose] + [draft_key(key, 5), draft_key(key, 6)]
    assert len({key, *keys}) == 6
    cells = [[int(16 * uniform(each, position)) for position in range(20_000)] for each in keys]
    for place, one in enumerate(cells):
        for other in cells[:place]:
            pairs = np.bincount([16 * a + b for a, b in zip(one, other, strict=True)], minlength=256)
            assert stats.chisquare(pairs).pvalue > FALSE_ALARM
