"""The options of a request: ranges, and what becomes of lists and mappings."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from pilotfish import SamplingParams
from pilotfish.errors import OptionError

IN_RANGE = [
    ("temperature", (0, 1e-300, 5e-324, 0.7, 100)),
    ("top_k", (0, 1, 2**31 - 1)),
    ("top_p", (5e-324, 0.5, 1)),
    ("min_p", (0, 0.5, 1)),
    ("repetition_penalty", (0.01, 1, 100)),
    ("presence_penalty", (-2, 0, 2.0)),
    ("frequency_penalty", (-2, 0, 2.0)),
    ("logit_bias", ({}, {0: -100, 7: 100.0}, [(3, 1)], ((2**31 - 1, 0.5),))),
    ("seed", (None, 0, 2**64 - 1)),
    ("max_tokens", (None, 0, 10**9)),
    ("min_tokens", (0, 10**9)),
    ("stop", ((), "end", ["a", "b"], ["a" * 5000, "b" * 5000])),
    ("stop_token_ids", ((), [0, 5])),
    ("ignore_eos", (True, False)),
    ("logprobs", (None, 0, 20)),
    ("n", (1, 128)),
    ("acceptance", ("auto", "rejection", "matching")),
]
NO_NUMBERS = (True, False, "1", None, math.nan, [1], 1j)
OUT_OF_RANGE = [
    ("temperature", (-1e-9, 100.1, math.inf, -math.inf, *NO_NUMBERS)),
    ("top_k", (-1, 2**31, 1.0, *NO_NUMBERS)),
    ("top_p", (0, -0.1, 1.01, *NO_NUMBERS)),
    ("min_p", (-0.1, 1.01, *NO_NUMBERS)),
    ("repetition_penalty", (0, -1, 0.009, 100.1, math.inf, *NO_NUMBERS)),
    ("presence_penalty", (-2.1, 2.1, *NO_NUMBERS)),
    ("frequency_penalty", (-2.1, 2.1, *NO_NUMBERS)),
    ("logit_bias", ({-1: 0}, {0: 101}, {0: -101}, {0: math.nan}, {True: 1}, {2**31: 1}, {0.5: 1}, {"7": 1})),
    ("logit_bias", ([(1, 1), (1, 2)], [(1,)], [[1, 1]], [1], 7, None, "12")),
    ("seed", (-1, 2**64, 1.5, True, "1")),
    ("max_tokens", (-1, 1.0, True, "1")),
    ("min_tokens", (-1, *NO_NUMBERS)),
    ("stop", ("", ["a", ""], [1], None, 7, "\udcff", ["a", "b\ud800"], ["a" * 5000, "b" * 5001])),
    ("stop_token_ids", ([-1], [True], [1.0], 3, None, "7")),
    ("ignore_eos", (0, 1, None, "yes")),
    ("logprobs", (-1, 21, 1.0, True, "1")),
    ("n", (0, 129, *NO_NUMBERS)),
    ("acceptance", ("Auto", None, True, ["auto"])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), IN_RANGE)
def test_values_in_range_are_kept(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        made = SamplingParams(**{name: value})
        hash(made)
        if not isinstance(value, dict | list | str):
            assert getattr(made, name) == value


@pytest.mark.parametrize(("name", "values"), OUT_OF_RANGE)
def test_values_out_of_range_are_errors_that_name_field_value_and_range(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(OptionError, match=rf"^{name} must (be|name) ") as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)
        if value != "" and not isinstance(value, dict | list):
            assert str(caught.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 10**5000},
        {"max_tokens": -(10**5000)},
        {"temperature": 10**5000},
        {"stop_token_ids": [10**5000]},
        {"logit_bias": {10**5000: 1.0}},
        {"max_tokens": 1, "min_tokens": 10**5000},
        {"stop": ["a" * 100_000 + "\udcff"]},
        {"acceptance": "a" * 100_000},
    ],
)
def test_values_of_any_size_give_one_short_line(options: dict[str, object]) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"stop_token_ids": [*range(10_000), -1, -2]}, "got -1"),
        ({"stop": ["a"] * 10_000 + [7]}, "got 7"),
        ({"logit_bias": dict.fromkeys(range(10_000), 0.0) | {9: 101}}, r"got \(9, 101\)"),
        ({"logit_bias": [(token_id, 0.0) for token_id in (*range(10_000), 42)]}, "got 42 twice"),
    ],
)
def test_an_error_about_a_long_list_names_the_item(options: dict[str, object], got: str) -> None:
    with pytest.raises(OptionError, match=got + "$") as caught:
        SamplingParams(**options)
    assert len(str(caught.value)) < 200


def test_biases_as_arrays_are_made_once() -> None:
    made = SamplingParams(logit_bias={9: 0.1, 2: -1.0})
    assert made.bias_arrays is made.bias_arrays
    token_ids, biases = made.bias_arrays
    assert (token_ids.typecode, token_ids.tolist()) == ("i", [2, 9])
    assert (biases.typecode, biases.tolist()) == ("f", [-1.0, pytest.approx(0.1)])
    assert made == SamplingParams(logit_bias={9: 0.1, 2: -1.0})


def test_every_field_has_its_range_tested() -> None:
    names = [field.name for field in fields(SamplingParams)]
    assert [name for name, _ in IN_RANGE] == list(dict(OUT_OF_RANGE)) == names


def test_more_tokens_at_least_than_at_most_are_an_error() -> None:
    with pytest.raises(OptionError, match=r"min_tokens must be at most max_tokens, 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    SamplingParams(min_tokens=3, max_tokens=3)


def test_lists_and_mappings_are_kept_as_tuples() -> None:
    biases = {9: 1.0, 2: -1.0}
    made = SamplingParams(stop=["a"], stop_token_ids=[4, 3], logit_bias=biases)
    biases[5] = 0.0
    assert (made.stop, made.stop_token_ids, made.logit_bias) == (("a",), (4, 3), ((2, -1.0), (9, 1.0)))
    assert SamplingParams(stop="end").stop == ("end",)
    assert made == SamplingParams(stop=("a",), stop_token_ids=(4, 3), logit_bias=((9, 1.0), (2, -1.0)))
    with pytest.raises(FrozenInstanceError):
        made.temperature = 1.0


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_only_temperature_zero_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=5e-324).is_greedy


def test_a_seed_asks_for_matching() -> None:
    assert SamplingParams().acceptance_rule == "rejection"
    assert SamplingParams(seed=0).acceptance_rule == "matching"
    assert SamplingParams(seed=0, acceptance="rejection").acceptance_rule == "rejection"
    assert SamplingParams(acceptance="matching").acceptance_rule == "matching"


def test_the_documentation_lists_every_field() -> None:
    table = Path(__file__).parents[1].joinpath("docs/sampling.md").read_text("utf-8").split("## ")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [field.name for field in fields(SamplingParams)]
