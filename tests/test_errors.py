"""What a message shows of a value that nobody has checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import brief

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_anything_is_one_short_line(value: object) -> None:
    assert len(brief(value)) <= 160
    assert brief(value).isprintable()


@pytest.mark.parametrize(
    "value", ["\n" * 10_000, "x" * 10**6, [["x" * 99] * 99] * 99, {"x" * 99: ["\0" * 99] * 9}, 10**4000]
)
def test_what_is_long_is_cut(value: object) -> None:
    assert 80 <= len(brief(value)) <= 160 or isinstance(value, int)
    assert "..." in brief(value)
    assert brief(value).isprintable()


@pytest.mark.parametrize(
    "value", ["model.layers.10.self_attn.q_proj.weight", 7, 1.5, None, True, ["a", 1], {"a": {"b": 1}}]
)
def test_what_is_short_is_shown_whole(value: object) -> None:
    assert brief(value) == repr(value)
