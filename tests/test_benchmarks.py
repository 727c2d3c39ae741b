"""What the scripts in benchmarks/ compute and refuse; the figures themselves need a machine and real models."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import WIDE, tiny_config, write_tiny_model
from torch import Tensor

from pilotfish.errors import NonFiniteLogitsError


def load_benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accuracy = load_benchmark("accuracy")

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
