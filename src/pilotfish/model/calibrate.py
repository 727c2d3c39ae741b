"""What a step costs on this machine, and the limits of the machine itself that it is held against.

Measurements that will be compared are taken in rounds, one of each per round and every second round in reverse: then a
machine that changes its speed meanwhile changes all of them alike. What counts is the median.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol, TypeVar

from torch import Tensor

from pilotfish.config import ModelConfig
from pilotfish.errors import OptionError
from pilotfish.kvcache import DenseCache
from pilotfish.model.batch import ForwardInput, ForwardModel, prefill, run_forward
from pilotfish.ops.cores import num_usable_cores as num_usable_cores
from pilotfish.ops.native import MachineProbe, NativeBackend, argmax, choose_backend

Clock = Callable[[], float]
"""Seconds since some fixed moment."""
Key = TypeVar("Key", bound=Hashable)

_PROBE_BYTES = 1 << 29
_PROBE_PASSES = 3
_PROBE_ITERATIONS = 1 << 21


class Probe(Protocol):
    """Work that only the machine limits, as `pilotfish.ops.native.MachineProbe` gives it."""

    def read(self) -> int:
        """Reads memory, far more than the caches hold; returns the bytes read."""

    def multiply(self, iterations: int) -> int:
        """Integer dot products on registers; returns the multiply-accumulates done."""


@dataclass(frozen=True)
class MachineLimits:
    """What the machine can do at most, all threads together."""

    bytes_per_second: float
    """Read from memory."""
    macs_per_second: float
    """Integer multiply-accumulates on registers."""


@dataclass(frozen=True)
class ForwardWork:
    """What a forward must do at least: read all weights once, whatever its rows, and multiply for each row."""

    num_bytes: int
    macs_per_row: int

    def floor_seconds(self, num_rows: int, bytes_per_second: float, macs_per_second: float) -> float:
        """The least time that a forward could take where reading and arithmetic overlap."""
        return max(self.num_bytes / bytes_per_second, num_rows * self.macs_per_row / macs_per_second)


@dataclass(frozen=True)
class ForwardTimes:
    """Median seconds of a forward with logits for every row, by its number of rows, behind `context_length` tokens."""

    context_length: int
    seconds: Mapping[int, float]

    @property
    def ratios(self) -> dict[int, float]:
        """Each time over that of one row."""
        return {num_rows: seconds / self.seconds[1] for num_rows, seconds in self.seconds.items()}


class WeighedModel(ForwardModel, Protocol):
    """A model that knows how many bytes of weights a forward reads."""

    @property
    def num_weight_bytes(self) -> int: ...


def forward_work(model: WeighedModel) -> ForwardWork:
    return ForwardWork(model.num_weight_bytes, model.config.macs_per_row)


def native_backend(threads: int | None = None) -> NativeBackend:
    """The kernels as `load` chooses them. Raises `OptionError` where they are missing, and as `choose_backend` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the error says it
        backend = choose_backend(threads)
    if not isinstance(backend, NativeBackend):
        raise OptionError(
            "the native kernels are missing, so there is nothing to measure: reinstall pilotfish with a C++ compiler "
            "at hand"
        )
    return backend


def machine_probe(backend: NativeBackend) -> MachineProbe:
    """A probe whose memory no cache holds."""
    return MachineProbe(backend, _PROBE_BYTES)


class Stopwatch:
    """Takes the time of one model's forwards. Each starts from the same cache, which forgets its rows afterwards."""

    def __init__(
        self,
        model: ForwardModel,
        context_length: int,
        *,
        max_num_batched_tokens: int = 128,
        choose: Callable[[Tensor], list[int]] = argmax,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Reads `context_length` tokens, whichever, in chunks of at most `max_num_batched_tokens` rows.

        `choose` is how a draft step finds its token.
        """
        self._model = model
        self._choose = choose
        self._chunk = max_num_batched_tokens
        self._clock = clock
        self._cache = self._prefilled(context_length)

    def forward(self, num_rows: int) -> float:
        """Seconds of a forward of `num_rows` rows, with logits for each."""
        return self._forward(num_rows, chooses=False)

    def draft_step(self) -> float:
        """Seconds of a forward of one row and of choosing its token: what a draft model takes for a guess."""
        return self._forward(1, chooses=True)

    def prefill(self, num_tokens: int) -> float:
        """Seconds of reading a prompt of `num_tokens` tokens into a cache of its own, logits for the last one."""
        start = self._clock()
        self._prefilled(num_tokens)
        return self._clock() - start

    def _forward(self, num_rows: int, chooses: bool) -> float:
        self._cache.reserve(num_rows)
        feed = ForwardInput(self._cache, _token_ids(self._model.config, num_rows), num_rows)
        start = self._clock()
        (logits,) = run_forward(self._model, [feed])
        if chooses:
            self._choose(logits)
        seconds = self._clock() - start
        self._cache.rewind(num_rows)
        return seconds

    def _prefilled(self, num_tokens: int) -> DenseCache:
        cache = DenseCache(self._model.config)
        if num_tokens:
            prefill(self._model, cache, _token_ids(self._model.config, num_tokens), self._chunk)
        return cache


class WithLimits:
    """A measurement just before which the machine's limits are taken, each time, since they change within seconds."""

    def __init__(self, measure: Callable[[], float], probe: Probe, clock: Clock = time.perf_counter) -> None:
        self.limits: list[MachineLimits] = []
        self._measure = measure
        self._probe = probe
        self._clock = clock

    def __call__(self) -> float:
        self.limits.append(measure_limits(self._probe, _PROBE_PASSES, self._clock))
        return self._measure()


def interleaved(measurements: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """The results of each measurement, one per round; every second round runs in reverse."""
    results: dict[Key, list[float]] = {key: [] for key in measurements}
    order = list(measurements)
    for _ in range(rounds):
        for key in order:
            results[key].append(measurements[key]())
        order.reverse()
    return results


def measure_forward(
    model: ForwardModel,
    row_counts: Sequence[int],
    context_length: int,
    rounds: int,
    clock: Clock = time.perf_counter,
) -> ForwardTimes:
    """Medians over `rounds` interleaved rounds, after one that is not counted."""
    stopwatch = Stopwatch(model, context_length, clock=clock)
    measurements = {num_rows: partial(stopwatch.forward, num_rows) for num_rows in row_counts}
    interleaved(measurements, 1)
    return ForwardTimes(context_length, medians(interleaved(measurements, rounds)))


def measure_draft_step(
    model: ForwardModel, context_length: int, rounds: int, clock: Clock = time.perf_counter
) -> float:
    """The median seconds of a draft step, after one that is not counted."""
    stopwatch = Stopwatch(model, context_length, clock=clock)
    stopwatch.draft_step()
    return median(stopwatch.draft_step() for _ in range(rounds))


def measure_limits(probe: Probe, passes: int, clock: Clock = time.perf_counter) -> MachineLimits:
    """The best of some passes: whatever else runs can only slow a pass down."""
    return MachineLimits(
        max(read_bandwidth(probe, clock) for _ in range(passes)),
        max(dot_product_rate(probe, clock) for _ in range(passes)),
    )


def read_bandwidth(probe: Probe, clock: Clock = time.perf_counter) -> float:
    """Bytes per second of one pass over the probe's memory."""
    start = clock()
    count = probe.read()
    return count / (clock() - start)


def dot_product_rate(probe: Probe, clock: Clock = time.perf_counter) -> float:
    """Multiply-accumulates per second of one pass."""
    start = clock()
    count = probe.multiply(_PROBE_ITERATIONS)
    return count / (clock() - start)


def floor_ratio(work: ForwardWork, num_rows: int, seconds: Sequence[float], limits: Sequence[MachineLimits]) -> float:
    """The median of what forwards of `num_rows` rows took over their floors, each by the limits of its own moment."""
    return median(
        took / work.floor_seconds(num_rows, limit.bytes_per_second, limit.macs_per_second)
        for took, limit in zip(seconds, limits, strict=True)
    )


def medians(results: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    return {key: median(values) for key, values in results.items()}


def _token_ids(config: ModelConfig, num_tokens: int) -> list[int]:
    return [(31 * place + 17) % config.vocab_size for place in range(num_tokens)]
