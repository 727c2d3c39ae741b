"""The options of a request on the command line: one for each field of `SamplingParams`, which checks the ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from pilotfish.cli.options import WholeNumber
from pilotfish.sampling_params import MAX_ANSWERS, MAX_LOGPROBS, MAX_SEED, MAX_TOKEN_ID
from pilotfish.types import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])


def read_bias(text: str) -> tuple[int, float]:
    """`ID=VALUE`."""
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not ID=VALUE, a token id and a number, as in 13=-5") from None


_OPTIONS = (
    click.option(
        "--max-tokens",
        type=WholeNumber(min=0),
        metavar="N",
        default=512,
        help="Most tokens in the answer. Default: 512.",
    ),
    click.option(
        "--temperature",
        type=float,
        metavar="T",
        default=0.0,
        help="0 to 100. 0, the default: always the likeliest token. Above: a draw, the flatter the higher.",
    ),
    click.option(
        "--top-k",
        type=WholeNumber(min=0, max=MAX_TOKEN_ID),
        metavar="N",
        default=0,
        help="Draw from the N likeliest tokens only. Default: 0, all.",
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        help="Draw from the likeliest tokens that together have this share of the probability. Above 0, to 1. "
        "Default: 1, all.",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        help="Draw from tokens that are at least P times as likely as the likeliest. 0 to 1. Default: 0, all.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        default=1.0,
        help="0.01 to 100; above 1 makes tokens of prompt and answer less likely. Default: 1.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        metavar="X",
        default=0.0,
        help="-2 to 2; taken off the logit of each token that is in the answer. Default: 0.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        default=0.0,
        help="-2 to 2; likewise for each time that it is there. Default: 0.",
    ),
    click.option(
        "--logit-bias",
        type=read_bias,
        multiple=True,
        metavar="ID=VALUE",
        help="Add VALUE, -100 to 100, to the logit of the token ID. Can be given for several tokens.",
    ),
    click.option(
        "--seed",
        type=WholeNumber(min=0, max=MAX_SEED),
        metavar="N",
        help="The same seed gives the same answer, with and without a draft model (but see --acceptance). Default: "
        "each run another.",
    ),
    click.option(
        "--min-tokens",
        type=WholeNumber(min=0),
        metavar="N",
        default=0,
        help="No token ends the answer before it has so many. Default: 0.",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Can be given several times."
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=WholeNumber(min=0, max=MAX_TOKEN_ID),
        multiple=True,
        metavar="ID",
        help="End the answer at this token, as at the model's own end. Can be given several times.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on where the model would end the answer."),
    click.option(
        "--logprobs",
        type=WholeNumber(min=0, max=MAX_LOGPROBS),
        metavar="N",
        help=f"With --json: each token's log-probability, and those of the N likeliest, 0 to {MAX_LOGPROBS}.",
    ),
    click.option(
        "--n",
        type=WholeNumber(min=1, max=MAX_ANSWERS),
        metavar="N",
        default=1,
        help=f"So many answers, one after the other, 1 to {MAX_ANSWERS}. Default: 1.",
    ),
    click.option(
        "--acceptance",
        type=click.Choice(["auto", "rejection", "matching"]),
        default="auto",
        help="How drafts are accepted when tokens are drawn: matching gives a seed's answer token for token, rejection "
        "accepts more. Default: auto, matching with --seed and rejection without.",
    ),
)


def sampling_options(command: F) -> F:
    """Adds an option for each field of `SamplingParams` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_sampling(given: dict[str, Any]) -> SamplingParams:
    """Takes those options out of what a command was given. Raises `OptionError`."""
    return SamplingParams(**{field.name: given.pop(field.name) for field in fields(SamplingParams)})
