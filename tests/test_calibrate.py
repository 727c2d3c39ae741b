"""What is measured, in which order and from which state; no test here waits for a real clock."""

from __future__ import annotations

import sys
from math import prod

import pytest
from doubles import FakeClock, TimedModel
from tiny_models import ARCHITECTURES, WIDE, tiny_config, write_tiny_model

import pilotfish
from pilotfish import _kernels
from pilotfish.errors import NonFiniteLogitsError, OptionError
from pilotfish.model.calibrate import (
    ForwardTimes,
    ForwardWork,
    MachineLimits,
    Stopwatch,
    WithLimits,
    floor_ratio,
    forward_work,
    interleaved,
    measure_draft_step,
    measure_forward,
    measure_limits,
    native_backend,
)
from pilotfish.ops.native import MachineProbe, NativeBackend
from pilotfish.ops.reference import ReferenceBackend

ISAS = _kernels.instruction_sets()


def test_forward_times_are_those_of_the_forwards_alone() -> None:
    clock = FakeClock()
    model = TimedModel(clock)
    times = measure_forward(model, (1, 2, 5, 64), 30, rounds=3, clock=clock)
    assert times == ForwardTimes(30, {1: 11, 2: 12, 5: 15, 64: 74})
    assert times.ratios == {1: 1, 2: 12 / 11, 5: 15 / 11, 64: 74 / 11}


def test_every_forward_continues_the_same_context_with_logits_for_each_row() -> None:
    clock = FakeClock()
    model = TimedModel(clock)
    measure_forward(model, (1, 5, 3), 30, rounds=3, clock=clock)
    assert model.rows_per_call == [30, *(1, 5, 3), *(1, 5, 3), *(3, 5, 1), *(1, 5, 3)]
    for call in model.calls[1:]:
        num_rows = len(call.input_ids)
        assert call.positions.tolist() == list(range(30, 30 + num_rows))
        assert call.logits_indices.tolist() == list(range(num_rows))


def test_a_slow_start_and_a_slow_moment_do_not_count() -> None:
    clock = FakeClock()
    model = TimedModel(clock, slowness=lambda calls: 9.0 if calls < 4 or calls == 7 else 1.0)
    assert measure_forward(model, (1, 2), 30, rounds=5, clock=clock).seconds == {1: 11, 2: 12}


def test_a_machine_that_slows_down_steadily_gives_equal_work_equal_times() -> None:
    clock = FakeClock()
    model = TimedModel(clock, slowness=lambda calls: 1 + 0.25 * calls)
    stopwatch = Stopwatch(model, 8, clock=clock)
    seconds = interleaved({name: lambda: stopwatch.forward(1) for name in "abc"}, 2)
    assert sum(seconds["a"]) == sum(seconds["b"]) == sum(seconds["c"])


def test_a_draft_step_is_one_row_and_a_choice() -> None:
    clock = FakeClock()
    model = TimedModel(clock)
    assert measure_draft_step(model, 30, rounds=3, clock=clock) == 11
    assert model.rows_per_call == [30, 1, 1, 1, 1]
    with pytest.raises(NonFiniteLogitsError):
        Stopwatch(TimedModel(clock, nan_at=1), 30, clock=clock).draft_step()


def test_prefill_runs_in_chunks_in_a_cache_of_its_own_with_the_last_rows_logits() -> None:
    clock = FakeClock()
    model = TimedModel(clock)
    stopwatch = Stopwatch(model, 0, max_num_batched_tokens=40, clock=clock)
    assert [stopwatch.prefill(100) for _ in range(2)] == [130, 130]
    assert model.rows_per_call == [40, 40, 20] * 2
    assert [call.logits_indices.tolist() for call in model.calls] == [[], [], [19]] * 2
    assert stopwatch.forward(2) == 12
    assert model.calls[-1].positions.tolist() == [0, 1]


class FakeProbe:
    """Reads 600 bytes and multiplies 50 times an iteration, ever quicker until the third pass, then slower."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.seconds = iter((3.0, 2.0, 1.0, 4.0) * 2)

    def read(self) -> int:
        self.clock.now += next(self.seconds)
        return 600

    def multiply(self, iterations: int) -> int:
        self.clock.now += next(self.seconds) * iterations
        return 50 * iterations


def test_limits_are_the_best_pass() -> None:
    clock = FakeClock()
    limits = measure_limits(FakeProbe(clock), 4, clock)
    assert (limits.bytes_per_second, limits.macs_per_second) == (600, 50)


def test_the_floor_is_reading_or_arithmetic_whichever_takes_longer() -> None:
    work = ForwardWork(num_bytes=1000, macs_per_row=60)
    assert [work.floor_seconds(num_rows, 100.0, 20.0) for num_rows in (1, 3, 4, 64)] == [10, 10, 12, 192]


def test_limits_are_taken_before_each_measurement() -> None:
    clock = FakeClock()
    measured = []

    def measure() -> float:
        measured.append(clock.now)
        return 7.0

    measurement = WithLimits(measure, FakeProbe(clock), clock)
    assert [measurement()] == [7.0]
    assert len(measurement.limits) == len(measured) == 1
    assert measured[0] == clock.now > 0
    assert measurement.limits[0].bytes_per_second == 600


def test_a_floor_ratio_goes_by_the_limits_of_each_moment() -> None:
    """A machine that slows down to a half and a quarter changes nothing, since its limits do likewise."""
    work = ForwardWork(num_bytes=1000, macs_per_row=60)
    limits = [MachineLimits(1000 / slowness, 60 / slowness) for slowness in (1, 2, 4)]
    assert floor_ratio(work, 1, [1.5, 3, 6], limits) == 1.5
    assert floor_ratio(work, 4, [6, 12, 24], limits) == 1.5
    assert floor_ratio(work, 1, [2, 2, 16], limits) == 2, "the median of ratios, not the ratio of medians"
    with pytest.raises(ValueError, match="longer"):
        floor_ratio(work, 1, [1, 2], limits)


def test_without_kernels_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    assert native_backend(3).threads == 3
    monkeypatch.setitem(sys.modules, "pilotfish._kernels", None)
    monkeypatch.delattr(pilotfish, "_kernels", raising=False)
    with pytest.raises(OptionError, match="kernels are missing"):
        native_backend()
    assert not recwarn, "the error says it"


class RecordingBackend(NativeBackend):
    def __init__(self) -> None:
        super().__init__(_kernels, ISAS[0], 1)
        self.weights = []

    def make_linear(self, projections, norm=None, gated=False):
        self.weights += [projection.weight for projection in projections]
        return super().make_linear(projections, norm, gated)

    def make_layers(self, layers):
        for layer in layers:
            projections = (*layer.qkv, layer.attention_output, layer.gate, layer.up, layer.down)
            self.weights += [projection.weight for projection in projections]
        return super().make_layers(layers)


@pytest.mark.parametrize("output", ["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_work_of_a_forward_is_that_of_all_its_matrices(tmp_path, architecture: str, output: str) -> None:
    """Rows are multiples of 16, so that panels have no padding, and Q8_0, Q5_0 and F32 keep their files' widths."""
    types = {"attn_q.weight": "Q5_0", "ffn_down.weight": "F32"}
    config = tiny_config(architecture, **WIDE)
    path = write_tiny_model(
        tmp_path / "tiny.gguf", config=config, weight_type="Q8_0", tensor_types=types, output=output
    )
    backend = RecordingBackend()
    model, _ = pilotfish.load(path, backend=backend)
    macs = sum(prod(weight.shape) for weight in backend.weights)
    assert forward_work(model) == ForwardWork(sum(weight.read().nbytes for weight in backend.weights), macs)
    reference, _ = pilotfish.load(path, backend=ReferenceBackend())
    assert forward_work(reference) == ForwardWork(4 * macs, macs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_machines_probe_counts_what_it_did(isa: str, threads: int) -> None:
    probe = MachineProbe(NativeBackend(_kernels, isa, threads), 5 * 4096 + 100)
    assert probe.read() == 5 * 4096
    one_thread = MachineProbe(NativeBackend(_kernels, isa, 1), 4096).multiply(1)
    assert one_thread > 0
    assert one_thread % 64 == 0, "a dot product is four multiply-accumulates in each of sixteen lanes"
    assert [probe.multiply(count) for count in (0, 1, 7)] == [0, threads * one_thread, 7 * threads * one_thread]
