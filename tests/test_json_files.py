"""JSON that nobody has checked: what is refused, and with which line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import json_files
from pilotfish.errors import FormatError, ModelNotFoundError
from pilotfish.formats.mapped_file import map_file
from pilotfish.json_files import parse_object, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES))
def test_an_object_comes_back(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=True).encode(), "x.json") == value


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not sound JSON"),
        (b"{", "not sound JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
        (b'{"a": 1, "b": {"a": 1, "a": 2}}', "'a' is there twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": "\xff"}', "not UTF-8 text (byte 7)"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not sound JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_object_is_refused_in_one_line(content: bytes, what: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_object(content, "x.json")
    assert str(caught.value).startswith("x.json ")
    assert what in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [b"[]", b'{"":0}', b"7", b"[[", b"{{"])
def test_values_are_bounded(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_VALUES", 100)
    with pytest.raises(FormatError, match="more than 100 values"):
        parse_object(b'{"a": [' + b", ".join([value] * 101) + b"]}", "x.json")
    assert parse_object(b'{"a": [' + b", ".join([b"7"] * 98) + b"]}", "x.json") == {"a": [7] * 98}


def test_a_repeated_key_is_shown_in_short() -> None:
    key = json.dumps("\x7f\u2028" * 10_000)
    with pytest.raises(FormatError, match="is there twice") as caught:
        parse_object(f"{{{key}: 1, {key}: 2}}".encode(), "x.json")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_files_are_found_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_object(path)
    with pytest.raises(ModelNotFoundError, match="it is not a file"):
        read_object(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for read in (read_object, map_file):
        with pytest.raises(ModelNotFoundError, match="it is not a file"):
            read(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("x.json")
    with pytest.raises(ModelNotFoundError, match="leads nowhere"):
        read_object(tmp_path / "link")
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    with pytest.raises(FormatError, match="more than 7 bytes"):
        read_object(path, 7)
