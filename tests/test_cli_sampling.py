"""The options of a request on the command line: each reaches the request, and shows in what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from command_line import Outcome
from tiny_models import write_tiny_model

import pilotfish
from pilotfish.cli import main
from pilotfish.types import SamplingParams

PROMPT = "the and the"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("models")
    target, draft = write_tiny_model(folder / "target.gguf"), write_tiny_model(folder / "draft.gguf", noise=0.1)
    return ("--model", str(target), "--draft-model", str(draft), "--max-tokens", "20")


@pytest.fixture
def sampling_of(cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SamplingParams]:
    """What a command line asks for."""

    def read(*arguments: str) -> SamplingParams:
        seen: list[SamplingParams] = []
        monkeypatch.setattr(main, "run_generate", lambda options: seen.append(options.sampling) or True)
        assert cli("generate", *arguments, "x").status == 0
        return seen[0]

    return read


GIVEN: dict[str, tuple[tuple[str, ...], object]] = {
    "temperature": (("--temperature", "0.7"), 0.7),
    "top_k": (("--top-k", "40"), 40),
    "top_p": (("--top-p", "0.9"), 0.9),
    "min_p": (("--min-p", "0.05"), 0.05),
    "repetition_penalty": (("--repetition-penalty", "1.1"), 1.1),
    "presence_penalty": (("--presence-penalty", "-0.5"), -0.5),
    "frequency_penalty": (("--frequency-penalty", "0.5"), 0.5),
    "logit_bias": (("--logit-bias", "13=-5", "--logit-bias", "7=2.5"), ((7, 2.5), (13, -5.0))),
    "seed": (("--seed", str(2**64 - 1)), 2**64 - 1),
    "max_tokens": (("--max-tokens", "9"), 9),
    "min_tokens": (("--min-tokens", "3"), 3),
    "stop": (("--stop", "a", "--stop", "\n\n"), ("a", "\n\n")),
    "stop_token_ids": (("--stop-token-id", "5", "--stop-token-id", "6"), (5, 6)),
    "ignore_eos": (("--ignore-eos",), True),
    "logprobs": (("--logprobs", "5"), 5),
    "n": (("--n", "3"), 3),
    "acceptance": (("--acceptance", "matching"), "matching"),
}


def test_every_field_has_an_option() -> None:
    assert [field.name for field in fields(SamplingParams)] == list(GIVEN)


@pytest.mark.parametrize("name", GIVEN)
def test_options_reach_the_request(sampling_of: Callable[..., SamplingParams], name: str) -> None:
    arguments, value = GIVEN[name]
    options: dict[str, Any] = {"max_tokens": 512, name: value}
    assert sampling_of(*arguments) == SamplingParams(**options)


def test_without_options_everything_is_as_in_python(sampling_of: Callable[..., SamplingParams]) -> None:
    assert sampling_of() == SamplingParams(max_tokens=512)


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("--top-k", "-1"), "'--top-k': -1 is not in the range"),
        (("--top-p", "0"), "top_p must be a number above 0 and at most 1, got 0.0"),
        (("--min-p", "1.5"), "min_p must be a number from 0 to 1, got 1.5"),
        (("--repetition-penalty", "0"), "repetition_penalty must be a number from 0.01 to 100, got 0.0"),
        (("--presence-penalty", "3"), "presence_penalty must be a number from -2 to 2, got 3.0"),
        (("--frequency-penalty", "nan"), "frequency_penalty must be a number from -2 to 2, got nan"),
        (("--logit-bias", "13"), "'13' is not ID=VALUE"),
        (("--logit-bias", "a=1"), "'a=1' is not ID=VALUE"),
        (("--logit-bias", "1=101"), "logit_bias must be token ids with a number from -100 to 100 each"),
        (("--logit-bias", "1=1", "--logit-bias", "1=2"), "logit_bias must name each token id once"),
        (("--seed", "-1"), "'--seed': -1 is not in the range"),
        (("--seed", str(2**64)), "is not in the range"),
        (("--min-tokens", "600"), "min_tokens must be at most max_tokens, 512, got 600"),
        (("--stop", ""), "stop must be strings that are not empty"),
        (("--stop-token-id", "x"), "'x' is not a valid whole number"),
        (("--logprobs", "21", "--json"), "'--logprobs': 21 is not in the range"),
        (("--logprobs", "2"), "--logprobs needs --json"),
        (("--n", "0"), "'--n': 0 is not in the range 1<=x<=128"),
        (("--acceptance", "greedy"), "'greedy' is not one of"),
    ],
)
def test_a_wrong_value_is_one_line(cli: Callable[..., Outcome], arguments: tuple[str, ...], telling: str) -> None:
    assert telling in cli("generate", *arguments, "x").error


def test_ids_beyond_the_vocabulary_are_an_error(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    assert (
        "logit_bias must name token ids of this model"
        in cli("generate", *pair, "--logit-bias", "99999=1", PROMPT).error
    )


def test_a_seed_gives_the_same_answer_with_and_without_a_draft_model(
    cli: Callable[..., Outcome], pair: tuple[str, ...]
) -> None:
    drawn = ("--temperature", "1.2", "--top-p", "0.9", "--seed", "3", "--json", PROMPT)
    both = cli("generate", *pair, *drawn).object
    alone = cli("generate", *pair, "--proposal-length", "0", *drawn).object
    assert both["token_ids"] == alone["token_ids"]
    assert both["stats"]["num_draft_tokens"] > alone["stats"]["num_draft_tokens"] == 0
    unseeded = [cli("generate", *pair, "--temperature", "1.2", "--json", PROMPT).object["token_ids"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_several_answers(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    drawn = (*pair, "--temperature", "1", "--seed", "3", "--n", "3")
    outcome = cli("generate", *drawn, "--json", PROMPT)
    answers = json.loads(outcome.out)
    assert isinstance(answers, list)
    assert len({answer["text"] for answer in answers}) == len(answers) == 3
    assert outcome.err.count("20 tokens (length)") == 3
    printed = cli("generate", *drawn, PROMPT)
    expected = [f"--- answer {i + 1} of 3 ---\n{answer['text']}" for i, answer in enumerate(answers)]
    assert printed.out == "\n".join(expected) + "\n"
    first = cli("generate", *pair, "--temperature", "1", "--seed", "3", "--json", PROMPT).object
    assert first["text"] == answers[0]["text"]


def test_logprobs_are_in_the_object(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    answer = cli("generate", *pair, "--logprobs", "2", "--json", PROMPT).object
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    for entry in answer["logprobs"]:
        likeliest, second = entry["top"]
        assert likeliest == {"token_id": entry["token_id"], "logprob": entry["logprob"]}  # greedy
        assert second["logprob"] <= likeliest["logprob"] < 0
    assert "logprobs" not in cli("generate", *pair, "--json", PROMPT).object


def test_a_stop_string_ends_the_answer(cli: Callable[..., Outcome], pair: tuple[str, ...]) -> None:
    whole = cli("generate", *pair, "--json", PROMPT).object["text"]
    stop = whole[10:13]
    answer = cli("generate", *pair, "--stop", stop, "--json", PROMPT).object
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert answer["stats"]["num_tokens"] == len(answer["token_ids"]) < 20
    assert cli("generate", *pair, "--stop", stop, PROMPT).out == answer["text"] + "\n"


def test_ctrl_c_keeps_the_answers_there_are(
    cli: Callable[..., Outcome], pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = pilotfish.stream, iter(range(10))

    def stream(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(pilotfish, "stream", stream)
    outcome = cli("generate", *pair, "--n", "3", "--temperature", "1", "--ignore-eos", "--json", PROMPT)
    assert outcome.status == 130
    assert [answer["finish_reason"] for answer in json.loads(outcome.out)] == ["length"]
