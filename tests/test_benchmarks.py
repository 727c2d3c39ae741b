"""What the scripts in benchmarks/ compute and refuse; the figures themselves need a machine and real models."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import FakeClock
from tiny_models import WIDE, tiny_config, write_tiny_model
from torch import Tensor

import pilotfish
from pilotfish.errors import NonFiniteLogitsError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
from pilotfish.model.calibrate import ForwardWork, MachineLimits, WithLimits
from pilotfish.ops.reference import dense
from pilotfish.types import WeightType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    path = BENCHMARKS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))
    spec.loader.exec_module(module)
    sys.path.remove(str(BENCHMARKS))  # or transformers would take kernels.py for a package that it knows by that name
    return module


accuracy = load_benchmark("accuracy")
kernels = load_benchmark("kernels")
random_models = load_benchmark("random_models")
sampling = load_benchmark("sampling")

REFERENCE = [[0.5, 0.25, 0.25], [0.75, 0.125, 0.125], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
OTHER = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
DIVERGENCES = [0.25 * math.log(2), 0.75 * math.log(1.5) - 0.25 * math.log(2), 0.0, 0.0]


def logits(probabilities: list[list[float]], shift: float = 0.0) -> Tensor:
    return torch.tensor(probabilities).log() + shift


def test_accuracy_compares_by_kl_divergence_from_the_reference_and_by_the_likeliest_token() -> None:
    found = accuracy.compare(logits(REFERENCE), logits(OTHER, shift=7.0))
    assert found.divergences.dtype == torch.float64
    assert found.divergences.tolist() == pytest.approx(DIVERGENCES, abs=1e-6)
    assert found.agrees.tolist() == [False, True, True, True]

    mean = sum(DIVERGENCES) / 4
    deviation = math.sqrt(sum((value - mean) ** 2 for value in DIVERGENCES) / 4)
    assert found.kl == pytest.approx((mean, deviation / 2), rel=1e-5)
    assert found.largest == pytest.approx(DIVERGENCES[0], rel=1e-5)
    assert found.kl_of_the_others.value == pytest.approx(DIVERGENCES[1] / 3, rel=1e-5)
    assert found.top1 == pytest.approx((0.75, math.sqrt(0.75 * 0.25 / 4)))


def test_accuracy_gives_equal_likeliest_tokens_to_the_lowest_id() -> None:
    assert accuracy.compare(logits([[0.2, 0.4, 0.4]]), logits([[0.3, 0.4, 0.3]])).agrees.all()
    assert not accuracy.compare(logits([[0.2, 0.4, 0.4]]), logits([[0.3, 0.3, 0.4]])).agrees.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_accuracy_lets_nothing_pass_that_is_not_finite(value: float) -> None:
    sound, broken = logits(REFERENCE), logits(REFERENCE)
    broken[2, 1] = value
    for pair in ((sound, broken), (broken, sound)):
        with pytest.raises(NonFiniteLogitsError, match="row 2"):
            accuracy.compare(*pair)


def test_accuracy_reports_both_and_their_ratio() -> None:
    ours, theirs = (
        accuracy.compare(logits(REFERENCE), logits(OTHER)),
        accuracy.compare(logits(OTHER), logits(REFERENCE)),
    )
    found = accuracy.figures(ours, theirs)
    assert found == {
        "kl_pilotfish": ours.kl.value,
        "kl_llamacpp": theirs.kl.value,
        "kl_ratio": ours.kl.value / theirs.kl.value,
        "top1_pilotfish": 0.75,
        "top1_llamacpp": 0.75,
        "top1_standard_error": theirs.top1.error,
    }


def test_accuracy_says_whether_the_promise_holds() -> None:
    """KL divergence at most 1.1 times llama.cpp's, agreement at most one of its standard errors less."""

    def verdicts(kl: float, num_agreeing: int) -> list[bool]:
        agrees = torch.arange(100) < num_agreeing
        ours = accuracy.Comparison(torch.full((100,), kl, dtype=torch.float64), agrees)
        return [": holds" in line for line in accuracy.table(ours, theirs).splitlines()[-2:]]

    theirs = accuracy.Comparison(torch.ones(100, dtype=torch.float64), torch.arange(100) < 90)  # 90 % ± 3 %
    assert verdicts(1.09, 88) == [True, True]
    assert verdicts(1.11, 88) == [False, True]
    assert verdicts(1.09, 86) == [True, False]
    assert verdicts(0.5, 100) == [True, True]
    assert verdicts(math.nan, 100) == [False, True]


@pytest.mark.parametrize("weight_type", ["F32", "Q4_K"])
def test_accuracy_ends_with_one_json_object_and_needs_no_llama_cpp(
    weight_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # importing it now fails
    model = str(write_tiny_model(tmp_path / "model.gguf", config=tiny_config(**WIDE), weight_type=weight_type))
    accuracy.main(["--model", model, "--tokens", "150"])
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert (found["tokens"], found["model"]) == (150, model)
    assert [name for name, value in found.items() if value is None] == [
        "kl_llamacpp", "kl_ratio", "top1_llamacpp", "top1_standard_error"
    ]  # fmt: skip
    assert "llama-cpp-python is not installed" in captured.err
    if weight_type == "F32":
        assert 0 <= found["kl_pilotfish"] < 1e-5  # keys and values are float16
        assert found["top1_pilotfish"] == 1
    else:
        assert 1e-7 < found["kl_pilotfish"] < 0.1
        assert found["top1_pilotfish"] > 0.8

    accuracy.main(["--model", model, "--tokens", "150", "--json"])
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "many"], "--tokens"),
        (["--tokens", "1"], "--tokens must be at least 2"),
        (["--tokens", "513"], "beyond the model's context of 512"),
        (["--tokens", "100000"], "fewer than --tokens 100000"),
        (["--text", "missing.txt"], "cannot read missing.txt"),
        (["--model", "missing.gguf"], "no such model: missing.gguf"),
        (["--colour"], "--colour"),
    ],
)
def test_accuracy_refuses_bad_arguments_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_model(tmp_path / "model.gguf"))
    with pytest.raises(SystemExit) as stop:
        accuracy.main(["--model", model, *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.err.endswith(lines[0] + "\n")


# kernels.py: a forward of M rows takes 10 + M seconds, reading the weights 5, a multiply-accumulate 1/100

WORK = ForwardWork(num_bytes=1000, macs_per_row=60)
OWN_RATE = 64 * 60 / 74
RATES = {"speculative": 30.0, "target_only": 20.0, "llamacpp": 25.0}


def kernel_samples() -> dict[tuple[object, ...], list[float]]:
    """Three rounds, of which the second is slow; llama.cpp is quicker with one row repacked, with five plain."""
    seconds: dict[tuple[object, ...], float] = {("pilotfish", "draft"): 3.0, ("pilotfish", "prefill"): 80.0}
    for length, row_counts in kernels.ROW_COUNTS.items():
        for rows in row_counts:
            seconds["pilotfish", length, rows] = 10.0 + rows
            seconds["repacked", length, rows] = 16.5 * rows
            seconds["plain", length, rows] = 27.0 + rows
    seconds |= {("repacked", "prefill"): 60.0, ("plain", "prefill"): 40.0}
    return {what: [took, 50 * took, took] for what, took in seconds.items()}


def kernel_limits() -> dict[tuple[int, int], list[MachineLimits]]:
    keys = [(length, rows) for length, row_counts in kernels.ROW_COUNTS.items() for rows in row_counts]
    return {key: [MachineLimits(200.0, 100.0), MachineLimits(4.0, 2.0), MachineLimits(200.0, 100.0)] for key in keys}


def test_kernels_summary_holds_forwards_against_the_floor_and_against_the_better_llama_cpp() -> None:
    report = kernels.summarise(WORK, kernel_limits(), kernel_samples(), RATES, ["repacked", "plain"])
    for rows in kernels.ROW_COUNTS[64]:
        assert report["floor_ratio"][rows] == pytest.approx((10 + rows) / max(5, rows * 60 / OWN_RATE))
        assert report["t_ratio"][rows] == (10 + rows) / 11
    assert report["floor_ratio"][64] == pytest.approx(1), "the arithmetic of the floor is our own with 64 rows"
    assert report["peak_share_64"] == pytest.approx(OWN_RATE / 100)
    assert report["decode_vs_llamacpp"] == 16.5 / 11
    assert report["verify5_vs_llamacpp"] == 32 / 15
    assert report["prefill_vs_llamacpp"] == 40 / 80
    assert report["speculative_vs_llamacpp"] == 30 / 25
    assert (report["bandwidth_bytes_per_second"], report["integer_peak_macs_per_second"]) == (200, 100)
    assert (report["weight_bytes"], report["macs_per_row"]) == (1000, 60)
    assert (report["draft_step_ms"], report["prefill_ms"]) == (3000, 80000)
    assert report["t_ms"][2048] == {1: 11000, 5: 15000}
    assert report["llamacpp_t_ms"]["plain"][64][5] == 32000


def test_kernels_floor_goes_by_the_bandwidth_of_the_moment() -> None:
    samples, limits = kernel_samples(), kernel_limits()
    samples["pilotfish", 64, 1] = [10.0, 10.0, 80.0]
    limits[64, 1] = [MachineLimits(1000 / floor, 100.0) for floor in (5, 10, 20)]
    assert kernels.summarise(WORK, limits, samples, RATES, [])["floor_ratio"][1] == 2


def test_kernels_summary_compares_with_nobody_where_llama_cpp_is_missing() -> None:
    report = kernels.summarise(WORK, kernel_limits(), kernel_samples(), RATES, [])
    assert [name for name, value in report.items() if value is None] == [
        "decode_vs_llamacpp", "verify5_vs_llamacpp", "prefill_vs_llamacpp", "speculative_vs_llamacpp"
    ]  # fmt: skip
    assert "T/floor" in kernels.table({"backend": "native", "rounds": 3} | report)


def test_kernels_measures_all_forwards_beside_the_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(tick=1.0)
    monkeypatch.setattr(kernels, "WithLimits", partial(WithLimits, clock=clock))
    monkeypatch.setattr(kernels, "Turns", partial(kernels.Turns, sleep=lambda seconds: None))
    stopwatch = SimpleNamespace(forward=lambda rows: 10.0 + rows, prefill=lambda tokens: 80.0, draft_step=lambda: 3.0)
    pair = SimpleNamespace(
        model=SimpleNamespace(num_weight_bytes=1000, config=SimpleNamespace(macs_per_row=60)),
        stopwatches=dict.fromkeys(kernels.ROW_COUNTS, stopwatch),
        draft_stopwatch=stopwatch,
        decode_rate=lambda proposal_length: 30.0 if proposal_length else 20.0,
        peer_decode_rate=lambda peer: peer.rate,
    )
    peers = {
        "repacked": SimpleNamespace(call=lambda method, rows, length=0: 16.0, rate=1.0),
        "plain": SimpleNamespace(call=lambda method, rows, length=0: 12.0 + rows, rate=25.0),
    }
    probe = SimpleNamespace(read=lambda: 200, multiply=lambda iterations: 100)
    report = kernels.measure_interleaved(pair, probe, peers, 2)
    samples = {what: [took] for what, (took, *_) in kernel_samples().items()}
    alone = kernels.summarise(WORK, {key: taken[:1] for key, taken in kernel_limits().items()}, samples, RATES, [])
    assert {name: report[name] for name in ("floor_ratio", "t_ms", "draft_step_ms", "prefill_ms", "peak_share_64")} == {
        name: alone[name] for name in ("floor_ratio", "t_ms", "draft_step_ms", "prefill_ms", "peak_share_64")
    }
    assert report["decode_tokens_per_second"] == RATES, "llama.cpp's with what is quicker with one row"
    assert report["decode_vs_llamacpp"] == 13 / 11
    assert report["prefill_vs_llamacpp"] == 16 / 80


def test_kernels_lets_threads_sleep_and_wakes_others_only_when_the_party_changes() -> None:
    events: list[object] = []
    turns = kernels.Turns(sleep=lambda seconds: events.append("sleep"))

    def take(party: str) -> None:
        took = turns.take(party, lambda: events.append(f"wake {party}"), lambda: events.append(party) or 7.0)
        assert took == 7.0

    for party in ("ours", "ours", "theirs", "theirs", "ours"):
        take(party)
    changed = [["sleep", f"wake {party}", party] for party in ("ours", "theirs", "ours")]
    assert events == [*changed[0], "ours", *changed[1], "theirs", *changed[2]]


TINY = random_models.Shape(num_layers=9, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2)


def test_random_models_have_a_real_ones_parts_and_finite_logits(tmp_path: Path) -> None:
    tokenizer = GGUFFile.open(write_tiny_model(tmp_path / "tiny.gguf", "qwen3"))
    random_models.write_random_model(tmp_path / "random.gguf", TINY, tokenizer, seed=0)
    config, tensors = read_model(GGUFFile.open(tmp_path / "random.gguf"))
    assert (config.architecture, config.num_layers, config.head_dim, config.num_kv_heads) == ("qwen3", 9, 128, 2)
    assert tensors["output.weight"] is tensors["token_embd.weight"]
    six_bits = [index for index in range(9) if tensors[f"blk.{index}.ffn_down.weight"].weight_type is WeightType.Q6_K]
    assert six_bits == [0, 3, 6, 7, 8]  # the first eighth, the last, and every third between
    for name in ("token_embd.weight", "blk.3.attn_q.weight", "blk.0.ffn_down.weight"):
        weights = dense(tensors[name])
        assert abs(weights.mean()) < 0.2 * weights.std()
        assert weights.std().item() == pytest.approx(weights.shape[1] ** -0.5, rel=0.3)
    model, _ = pilotfish.load(tmp_path / "random.gguf")
    logits = pilotfish.next_token_logits(model, [1, 2, 3])
    assert logits.isfinite().sum() > 200
    assert 0.1 < logits[logits.isfinite()].std() < 100


def test_kernels_measures_a_pair_with_random_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "qwen3")
    monkeypatch.setattr(kernels, "find_model", lambda name: path)
    monkeypatch.setattr(kernels, "in_fresh_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setitem(random_models.PAIRS, "tiny", (TINY, TINY))
    monkeypatch.setattr(kernels, "random_models", random_models)
    report = kernels.measure_shape("tiny", 1)
    assert report["t_ratio"][1] == 1
    assert report["allowed_speedup"].keys() == report["allowed_at_proposal_length"].keys() == {0.6, 0.75, 0.9}
    for acceptance, speedup in report["allowed_speedup"].items():
        length = report["allowed_at_proposal_length"][acceptance]
        tokens = (1 - acceptance ** (length + 1)) / (1 - acceptance)
        step = length * report["draft_step_ms"] + report["t_ms"][length + 1]
        assert speedup == pytest.approx(tokens * report["t_ms"][1] / step)
    assert report["load_seconds"] > 0
    json.dumps(report)


def test_sampling_holds_each_cost_against_the_forwards_of_a_step(tmp_path: Path) -> None:
    model, tokenizer = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf"))
    clock = FakeClock()

    def second() -> float:
        clock.now += 1
        return clock.now

    report = sampling.measure(model, model, tokenizer, "Some text, " * 9, 3, clock=second)
    greedy = {"matching", "drafting"}
    assert {name: set(costs) for name, costs in report["cost_ms"].items()} == {
        name: greedy if options.is_greedy else {*sampling.PARTS} for name, options in sampling.OPTIONS.items()
    }
    # Each measurement looks at the clock twice, a second apart.
    costs = [cost for each in report["cost_ms"].values() for cost in each.values()]
    assert {*costs, *(report[f"{name}_ms"] for name in ("forward", "draft_step", "argmax", "logprobs"))} == {1000.0}
    assert (set(report["step_share"].values()), set(report["draft_share"].values())) == ({1.0}, {0.25})
    assert report["ids_left"]["top_k 50"] == 50
    json.dumps(report)
    lines = sampling.table(report).splitlines()
    assert [name for name in report["cost_ms"] if not any(line.startswith(name) for line in lines)] == []


class FakeExtension:
    """A function of 30 seconds, and a class whose objects have a method of 20."""

    def __init__(self, clock: FakeClock) -> None:
        class Layer:
            num_bytes = 5

            def __init__(self, size: int) -> None:
                self.size = size

            def run(self, rows: int) -> int:
                clock.now += 20
                return self.size * rows

        self.Layer = Layer
        self._clock = clock

    def embedding(self, layer: Any) -> Any:
        self._clock.now += 30
        return layer


def test_kernels_adds_up_the_time_within_the_extension() -> None:
    clock = FakeClock()
    extension = FakeExtension(clock)
    timed = kernels.TimedKernels(extension, clock)
    layer = timed.Layer(3)
    assert (layer.num_bytes, layer.run(2)) == (5, 6)
    clock.now += 1000
    assert isinstance(timed.embedding(layer), extension.Layer), "the extension sees its own objects"
    assert (timed.seconds, timed.calls) == (50, 3)
    timed.reset()
    assert (timed.seconds, timed.calls) == (0, 0)
    layer.run(1)
    assert (timed.seconds, timed.calls) == (20, 1)


def test_kernels_share_outside_is_the_median_step_less_what_timing_costs() -> None:
    """Each look at the clock takes a second: timing adds one to what a call is said to take, and two in all."""
    clock = FakeClock(tick=1.0)
    assert kernels.timing_costs(clock) == pytest.approx((1, 2), abs=1e-3)
    timed = kernels.TimedKernels(FakeExtension(clock), clock)
    steps = iter(range(1000))

    def step() -> float:
        start = clock()
        for _ in range(4):
            timed.embedding(None)
        clock.now += 5000 if next(steps) == 3 else 39
        return clock() - start  # which takes one more outside

    assert kernels.outside_share(timed, step) == pytest.approx(40 / 160, abs=1e-4)
