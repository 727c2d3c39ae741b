"""`pilotfish bench roofline`: what it measures, its arithmetic, and what it prints. No test looks at a real clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome
from doubles import FakeClock, TimedModel
from tiny_models import tiny_config, tiny_metadata, write_tiny_model
from torch import Tensor

import pilotfish
from pilotfish import _kernels
from pilotfish.bench import roofline
from pilotfish.bench.roofline import AllowedSpeedup, Measurements, allowed_speedup, measure, run_roofline, step_cost
from pilotfish.errors import OptionError, PairMismatchError
from pilotfish.model.calibrate import ForwardWork, MachineLimits
from pilotfish.ops.reference import argmax

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)


# The arithmetic


@pytest.mark.parametrize(
    ("acceptance", "length", "speedup"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_speedups_are_those_of_leviathan_et_al(acceptance: float, length: int, speedup: float) -> None:
    """Table 1 of the paper: guesses and the rows that verify them cost nothing."""
    found = allowed_speedup(acceptance, {1: 3.0, length + 1: 3.0}, 0.0)
    assert found.proposal_length == length
    assert round(found.speedup, 2) == speedup


def test_draft_steps_and_rows_are_paid_for() -> None:
    found = allowed_speedup(0.5, {1: 4.0, 2: 4.5, 3: 8.0}, 0.5)
    assert found == AllowedSpeedup(
        token_acceptance=0.5,
        proposal_length=1,
        acceptance_rate=0.5,
        tokens_per_step=1.5,
        step_seconds=5.0,
        speedup=1.5 * 4 / 5,
    )
    two = allowed_speedup(0.5, {1: 4.0, 3: 4.0}, 0.25)
    assert (two.tokens_per_step, two.step_seconds, two.acceptance_rate) == (1.75, 4.5, 0.375)


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    found = allowed_speedup(0.5, {1: 4.0, 2: 5.0, 3: 5.5}, 2.0)
    assert (found.proposal_length, found.tokens_per_step, found.speedup, found.acceptance_rate) == (0, 1, 1, 0)
    assert allowed_speedup(0.5, {1: 4.0, 2: 6.0}, 0.0).proposal_length == 0, "of equal ones the shortest"


def test_a_step_is_held_against_reading_or_arithmetic_whichever_takes_longer() -> None:
    work = ForwardWork(num_bytes=1000, macs_per_row=60)
    limits = [MachineLimits(100.0, 20.0)] * 3
    one = step_cost(work, 1, [20.0, 40.0, 16.0], limits)
    assert (one.seconds, one.floor_seconds, one.floor_share, one.bound_by) == (20, 10, 0.5, "memory")
    assert (one.num_bytes, one.num_macs) == (1000, 60)
    assert (one.samples, one.floor_samples) == ([20, 40, 16], [10, 10, 10])
    assert one.spread == (30 - 18) / 20
    many = step_cost(work, 10, [40.0] * 3, limits)
    assert (many.num_macs, many.floor_seconds, many.floor_share, many.bound_by) == (600, 30, 0.75, "arithmetic")
    assert many.spread == step_cost(work, 1, [7.0], limits[:1]).spread == 0


# The measurement


class WeighedModel(TimedModel):
    num_weight_bytes = 6000


class CountingProbe:
    """Reads 1200 bytes and multiplies 600 times a second, times what `slowness` says."""

    def __init__(self, clock: FakeClock, slowness: Callable[[], float] = lambda: 1.0) -> None:
        self.clock = clock
        self.slowness = slowness
        self.reads = 0

    def read(self) -> int:
        self.reads += 1
        self.clock.now += self.slowness()
        return 1200

    def multiply(self, iterations: int) -> int:
        self.clock.now += self.slowness()
        return 600


def measured(
    target: TimedModel,
    draft: TimedModel | None,
    probe: CountingProbe,
    choose: Callable[[Tensor], list[int]] = argmax,
    **options: Any,
) -> Measurements:
    return measure(target, draft, probe, 30, 3, choose=choose, clock=probe.clock, **options)


def test_every_step_is_measured_beside_the_machines_limits() -> None:
    clock = FakeClock()
    target, draft, probe = WeighedModel(clock), WeighedModel(clock), CountingProbe(clock)
    chosen_from = []

    def choose(logits: Tensor) -> list[int]:
        chosen_from.append(len(logits))
        clock.now += 0.5
        return argmax(logits)

    found = measured(target, draft, probe, choose)
    assert [(step.num_rows, step.seconds) for step in found.target_steps] == [(rows, 10 + rows) for rows in ROWS]
    assert found.draft_step is not None
    assert (found.draft_step.seconds, found.draft_step.num_rows) == (11.5, 1)
    assert chosen_from == [1] * 4
    for limits, value in ((found.bytes_per_second, 1200), (found.macs_per_second, 600)):
        assert (limits.lowest, limits.median, limits.highest) == (value, value, value)
    macs = target.config.macs_per_row
    for step in (*found.target_steps, found.draft_step):
        assert (step.num_bytes, step.num_macs, len(step.samples)) == (6000, step.num_rows * macs, 3)
        assert step.floor_seconds == max(5.0, step.num_rows * macs / 600)
        assert step.floor_share == pytest.approx(step.floor_seconds / step.seconds)
    assert found.is_steady
    one_round, passes = [*ROWS], 3
    assert target.rows_per_call == [30, *one_round, *one_round, *reversed(one_round), *one_round]
    assert draft.rows_per_call == [30, 1, 1, 1, 1]
    assert probe.reads == passes * 4 * (len(ROWS) + 1)


def test_a_slow_warm_up_counts_nowhere() -> None:
    clock = FakeClock()
    target = WeighedModel(clock, slowness=lambda calls: 9.0 if calls < 1 + len(ROWS) else 1.0)
    probe = CountingProbe(clock, slowness=lambda: 9.0 if len(target.calls) < 1 + len(ROWS) else 1.0)
    found = measured(target, None, probe)
    assert [step.seconds for step in found.target_steps] == [10 + rows for rows in ROWS]
    assert found.bytes_per_second.lowest == 1200
    assert found.draft_step is None


def test_a_machine_that_slows_down_keeps_its_share_of_the_floor() -> None:
    clock = FakeClock()
    target = WeighedModel(clock, slowness=lambda calls: 2.0 ** (calls / 8))
    probe = CountingProbe(clock, slowness=lambda: 2.0 ** (len(target.calls) / 8))
    found = measured(target, None, probe)
    macs = target.config.macs_per_row
    for step in found.target_steps:
        assert step.floor_share == pytest.approx(max(5.0, step.num_rows * macs / 600) / (10 + step.num_rows))
    assert not found.is_steady


def test_progress_says_what_is_measured_and_how_much_is_done() -> None:
    clock = FakeClock()
    said: list[str] = []
    measured(WeighedModel(clock), WeighedModel(clock), CountingProbe(clock), progress=said.append)
    assert len(said) == 4 * (len(ROWS) + 1)
    assert said[0] == "measuring, 0% done: T(1)"
    assert said[24] == "measuring, 50% done: a draft step"


def test_contexts_must_hold_the_measurement() -> None:
    clock = FakeClock()
    probe = CountingProbe(clock)
    enough, short = WeighedModel(clock, context_length=62), WeighedModel(clock, context_length=61)
    measured(enough, WeighedModel(clock, context_length=31), probe)
    with pytest.raises(OptionError, match="target has a context of 61 tokens, and the measurement needs 62"):
        measured(short, None, probe)
    with pytest.raises(OptionError, match="draft model has a context of 30"):
        measured(enough, WeighedModel(clock, context_length=30), probe)


# The command


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Tiny models, a fake clock and a fake probe: all else is what a user runs."""
    monkeypatch.setenv("PILOTFISH_THREADS", "1")
    clock = FakeClock(tick=1e-3)
    monkeypatch.setattr(roofline, "measure", partial(measure, clock=clock))
    monkeypatch.setattr(roofline, "machine_probe", lambda backend: CountingProbe(FakeClock()))
    target = write_tiny_model(tmp_path / "target.gguf")
    draft = write_tiny_model(tmp_path / "draft.gguf", noise=0.1)
    return ("--model", str(target), "--draft-model", str(draft), "--rounds", "2")


def test_one_json_object_holds_everything(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    outcome = cli("bench", "roofline", *pair, "--threads", "1", "--context-length", "7", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found = outcome.object
    assert (found["model"], found["draft_model"]) == (pair[1], pair[3])
    assert (found["rounds"], found["context_length"], found["version"]) == (2, 7, pilotfish.__version__)
    assert found["backend"] == f"native ({_kernels.instruction_sets()[0]}, 1 threads)"
    steps = found["measurements"]["target_steps"]
    assert [step["num_rows"] for step in steps] == list(ROWS)
    assert all(len(step["samples"]) == len(step["floor_samples"]) == 2 for step in steps)
    assert found["is_steady"] is True
    assert all(step["num_bytes"] > 0 for step in (*steps, found["measurements"]["draft_step"]))
    assert [speedup["token_acceptance"] for speedup in found["speedups"]] == [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    # All forwards take one tick here: 31 guesses cost 32 forwards, so only few pay.
    assert found["speedups"][0]["speedup"] == pytest.approx(1)


def test_tables_show_each_step_and_what_the_curve_allows(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    outcome = cli("bench", "roofline", *pair)
    assert (outcome.status, outcome.err) == (0, "")
    first_words = [line.split()[0] for line in outcome.out.splitlines() if line.strip()]
    for word in ("memory", "arithmetic", "target", "draft", *(f"T({rows})" for rows in ROWS), "50%", "95%"):
        assert word in first_words
    assert all(len(line) <= 100 or pair[1] in line or pair[3] in line for line in outcome.out.splitlines())
    assert "not a measured speedup" in " ".join(outcome.out.split())
    assert "\x1b" not in outcome.out


def test_a_target_alone_has_no_draft_step_and_guesses_for_nothing(
    cli: Callable[..., Outcome], pair: tuple[str, ...]
) -> None:
    found = cli("bench", "roofline", *pair[:2], "--json").object
    assert (found["draft_model"], found["measurements"]["draft_step"]) == (None, None)
    # Every T(M) is one tick.
    best = found["speedups"][0]
    assert (best["proposal_length"], best["speedup"]) == (31, pytest.approx(2, abs=1e-6))
    shown = " ".join(cli("bench", "roofline", *pair[:2]).out.split())
    assert "guesses that cost nothing (no draft model was named)" in shown


def test_an_unsteady_machine_is_said(
    cli: Callable[..., Outcome], pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Not steady" not in cli("bench", "roofline", *pair).out
    monkeypatch.setattr(roofline, "STEADY_SPREAD", -1.0)
    assert "Not steady" in cli("bench", "roofline", *pair).out


def test_progress_is_for_terminals(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    outcome = cli("bench", "roofline", *pair, terminal="err")
    for what in ("loading", "measuring, 0% done: T(1)", "measuring, 50% done: T(7)"):
        assert what in outcome.err
    assert outcome.err.count("\x1b[?25l") == outcome.err.count("\x1b[?25h") > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", "0"), "--rounds"),
        (("--threads", "0"), "--threads"),
        (("--context-length", "-1"), "--context-length"),
        (("--context-length", "490"), "the target has a context of 512 tokens, and the measurement needs 522"),
        (("--model", ""), "--model is empty"),
        (("--draft-model", "missing.gguf"), "no such model: missing.gguf"),
        (("--colour",), "--colour"),
    ],
)
def test_bad_options_are_one_line(
    cli: Callable[..., Outcome], pair: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    assert message in cli("bench", "roofline", *pair, *arguments).error


def test_a_pair_must_fit(pair: tuple[str, ...], tmp_path: Path) -> None:
    tokens = list(tiny_metadata(tiny_config())["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[5], tokens[6] = tokens[6], tokens[5]
    other = write_tiny_model(tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    with pytest.raises(PairMismatchError):
        run_roofline(pair[1], other, threads=1)


def test_help_names_the_options(cli: Callable[..., Outcome]) -> None:
    assert "roofline" in cli("bench", "--help").out
    help_text = cli("bench", "roofline", "--help").out
    for option in ("--model", "--draft-model", "--threads", "--context-length", "--rounds", "--json"):
        assert option in help_text
