"""The options of a request: how its tokens are chosen and when its text ends, each checked once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from pilotfish.errors import OptionError, brief

AcceptanceRule = Literal["rejection", "matching"]

MAX_SEED = (1 << 64) - 1
MAX_TOKEN_ID = (1 << 31) - 1
MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_STOP_CHARACTERS = 10_000


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; what each option does to the logits is in `ops.sampling`.

    Raises `OptionError` for a value that is not in an option's range.
    """

    temperature: float = 0.0
    """0 (greedy: the likeliest token) to 100."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share of the probability; above 0, 1: all."""
    min_p: float = 0.0
    """Only tokens at least this likely beside the likeliest; 0 to 1, 0: all."""
    repetition_penalty: float = 1.0
    """0.01 to 100; above 1 makes what prompt and output hold less likely."""
    presence_penalty: float = 0.0
    """-2 to 2: taken off the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """-2 to 2: likewise for each time the token is there."""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    """Token ids with what is added to their logits, -100 to 100; kept as pairs in the order of ids."""
    seed: int | None = None
    """0 to 2^64 - 1: the same seed gives the same text, whatever is drafted, unless `acceptance` is "rejection": then
    only with the same drafts. None: each run another."""
    max_tokens: int | None = None
    """Most output tokens, EOS included; None leaves it to EOS and the context length."""
    min_tokens: int = 0
    """No end token comes before so many output tokens."""
    stop: Sequence[str] = ()
    """The text ends before any of these, 10,000 characters in all; kept as a tuple, and a single string is one."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text as EOS does; kept as a tuple."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """For each token its log-probability and those of the so many likeliest, 0 to 20; None: neither."""
    n: int = 1
    """Answers to each prompt, 1 to 128."""
    acceptance: Literal["auto", "rejection", "matching"] = "auto"
    """How drafts are accepted when sampling; see `acceptance_rule`."""

    def __post_init__(self) -> None:
        check = self._check
        check("temperature", _number(0, 100), "a number from 0 to 100")
        check("top_k", _integer(0, MAX_TOKEN_ID), f"an integer from 0 (off) to {MAX_TOKEN_ID}")
        check("top_p", lambda value: _number(0, 1)(value) and value > 0, "a number above 0 and at most 1")
        check("min_p", _number(0, 1), "a number from 0 to 1")
        check("repetition_penalty", _number(0.01, 100), "a number from 0.01 to 100")
        check("presence_penalty", _number(-2, 2), "a number from -2 to 2")
        check("frequency_penalty", _number(-2, 2), "a number from -2 to 2")
        check("seed", _or_none(_integer(0, MAX_SEED)), "an integer from 0 to 2^64 - 1, or None")
        check("max_tokens", _or_none(_integer(0)), "a non-negative integer, or None")
        check("min_tokens", _integer(0), "a non-negative integer")
        check("ignore_eos", lambda value: isinstance(value, bool), "True or False")
        check("logprobs", _or_none(_integer(0, MAX_LOGPROBS)), f"an integer from 0 to {MAX_LOGPROBS}, or None")
        check("n", _integer(1, MAX_ANSWERS), f"an integer from 1 to {MAX_ANSWERS}")
        rules = ("auto", "rejection", "matching")
        check("acceptance", lambda value: isinstance(value, str) and value in rules, f"one of {', '.join(rules)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                f"min_tokens must be at most max_tokens, {brief(self.max_tokens)}, got {brief(self.min_tokens)}"
            )
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._check_each("stop", _is_text, "strings that are not empty, without lone surrogates")
        size = sum(map(len, self.stop))
        if size > MAX_STOP_CHARACTERS:
            raise OptionError(f"stop must be at most {MAX_STOP_CHARACTERS} characters in all, got {size}")
        is_token_id = _integer(0, MAX_TOKEN_ID)
        self._check_each("stop_token_ids", is_token_id, f"integers from 0 to {MAX_TOKEN_ID}")
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))

        def is_bias(pair: Any) -> bool:
            return isinstance(pair, tuple) and len(pair) == 2 and is_token_id(pair[0]) and _number(-100, 100)(pair[1])

        pairs = sorted(self._check_each("logit_bias", is_bias, "token ids with a number from -100 to 100 each"))
        for (token_id, _), (next_id, _) in pairwise(pairs):
            if token_id == next_id:
                raise OptionError(f"logit_bias must name each token id once, got {token_id} twice")
        object.__setattr__(self, "logit_bias", tuple(pairs))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken: the one test of this that there is."""
        return self.temperature == 0

    @property
    def acceptance_rule(self) -> AcceptanceRule:
        """`acceptance`, where `auto` is matching with a seed and rejection without."""
        if self.acceptance == "auto":
            return "rejection" if self.seed is None else "matching"
        return self.acceptance

    @cached_property
    def bias_arrays(self) -> tuple[array[int], array[float]]:
        """`logit_bias` as int32 ids, ascending, and float32 values: each row of logits needs them, so made once."""
        pairs = dict(self.logit_bias)
        return array("i", pairs.keys()), array("f", pairs.values())

    def _check(self, name: str, fits: Callable[[Any], bool], what: str) -> None:
        value = getattr(self, name)
        if not fits(value):
            raise OptionError(f"{name} must be {what}, got {brief(value)}")

    def _check_each(self, name: str, fits: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
        """Makes a field a tuple, all of whose items fit; of a long list an error shows the first that does not."""
        value = getattr(self, name)
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        items = tuple(value) if is_list else ()
        misfits = (item for item in items if not fits(item)) if is_list else iter([value])
        for misfit in misfits:
            raise OptionError(f"{name} must be {what}, got {brief(misfit)}")
        object.__setattr__(self, name, items)
        return items


def _integer(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    """`True` is no integer."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float) -> Callable[[Any], bool]:
    """NaN is in no range."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: Any) -> bool:
    """A lone surrogate, such as stands for a byte of a command line that is not UTF-8, is in no text of a model."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= character <= "\udfff" for character in value)


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)
