"""Stop strings: where a text ends does not depend on how it falls into tokens; nothing of a stop string is shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from doubles import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.decode.output_text import OutputText


class Pieces:
    """A detokenizer whose tokens are any texts."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def step(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def cut(text: str, stop: Sequence[str]) -> tuple[str, int]:
    """By definition: character by character, until the text ends with a stop string; also how many were read."""
    for end in range(1, len(text) + 1):
        matches = [len(each) for each in stop if text[:end].endswith(each)]
        if matches:
            return text[: end - max(matches)], end
    return text, len(text)


TEXTS = st.text("ab", max_size=4)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(TEXTS, max_size=12), rest=TEXTS, stop=STOPS)
def test_text_ends_before_the_stop_string_that_is_complete_first(pieces: list[str], rest: str, stop: list[str]) -> None:
    text = OutputText(Pieces(pieces, rest), stop)
    whole = "".join(pieces) + rest
    expected, num_read = cut(whole, stop)
    shown, read = "", 0
    for token_id, piece in enumerate(pieces):
        shown += text.append(token_id)
        read += len(piece)
        assert expected.startswith(shown)
        assert text.is_stopped == (cut("".join(pieces)[:read], stop)[0] != "".join(pieces)[:read])
        if text.is_stopped:
            assert num_read <= read
            break
        ends = [whole[start:read] for start in range(read + 1)]  # the longest that may become a stop string is held
        assert whole[len(shown) : read] == next(end for end in ends if any(e.startswith(end) for e in ["", *stop]))
    shown += text.finish()
    assert shown == expected
    if text.is_stopped:
        assert text.finish() == ""


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["é"], "caf"),
        (["é!"], "caf"),
        (["\N{PILE OF POO}"], "café! "),
        (["x"], "café! \N{PILE OF POO}"),
        (["\ufffd"], "café! \N{PILE OF POO}"),
    ],
)
def test_characters_of_several_tokens(stop: list[str], expected: str) -> None:
    text = OutputText(byte_tokenizer().detokenizer(), stop)
    shown = ""
    for byte in "café! \N{PILE OF POO}".encode():
        if not text.is_stopped:
            shown += text.append(byte)
    assert shown + text.finish() == expected


def test_thousands_of_long_stop_strings_over_a_text_that_almost_matches_them() -> None:
    stop = [f"{'a' * 1000}{number}" for number in range(3000)]
    text = OutputText(Pieces(["a" * 999, "a", "b", "a" * 2000, "29", "99"]), stop)
    assert [text.append(0), text.append(1), text.append(2)] == ["", "", "a" * 1000 + "b"]
    assert (text.append(3), text.append(4), text.is_stopped) == ("a" * 1000, "", True)


def test_a_character_that_is_never_complete_is_no_way_past_a_stop_string() -> None:
    text = OutputText(byte_tokenizer().detokenizer(), ["\ufffd"])
    assert text.append(ord("a")) + text.append(0xC3) + text.finish() == "a"
    assert text.is_stopped
