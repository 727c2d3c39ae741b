"""Which of a repository's or folder's files make a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.catalog.layout import (
    choose_gguf,
    find_on_disk,
    folder_files,
    is_plain,
    model_files,
)
from pilotfish.errors import ModelNotFoundError, UnsupportedModelError
from pilotfish.formats.safetensors_index import INDEX_FILE

SMALL = ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
STRAY = [
    *("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "README.md", "special.jinja"),
    *("model.safetensors.bak", "onnx/model.onnx", "adapter_model.safetensors", "vocab.json", "merges.txt"),
]
QUANTISED = ["toy-Q4_K.gguf", "toy-Q4_K_M.gguf", "toy-Q4_K_S.gguf", "toy-Q8_0.gguf", "toy-UD-Q4_K_XL.gguf"]


@pytest.fixture
def index(tmp_path: Path) -> Callable[..., Callable[[], Path]]:
    """Finds an index that names some files."""

    def write(*names: object) -> Callable[[], Path]:
        content = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(content))
        return lambda: tmp_path / INDEX_FILE

    return write


def no_index() -> Path:
    raise AssertionError("nobody needs it")


# GGUF files


@pytest.mark.parametrize(
    ("names", "selector", "chosen"),
    [
        (["toy-F16.gguf", "README.md", "config.json"], None, "toy-F16.gguf"),
        (QUANTISED, None, "toy-Q4_K_M.gguf"),
        (QUANTISED, "Q4_K", "toy-Q4_K.gguf"),
        (QUANTISED, "q8_0", "toy-Q8_0.gguf"),
        (QUANTISED, "Q4_K_XL", "toy-UD-Q4_K_XL.gguf"),
        (QUANTISED, "ud-q4_k_xl", "toy-UD-Q4_K_XL.gguf"),
        (QUANTISED, "toy-Q4_K_S.gguf", "toy-Q4_K_S.gguf"),
        (QUANTISED, "toy-Q8_0", "toy-Q8_0.gguf"),
        (["toy.Q4_K_M.gguf", "toy.Q8_0.gguf"], "Q8_0", "toy.Q8_0.gguf"),
        (["toy_q4_k_m.gguf", "toy_q8_0.gguf"], "Q8_0", "toy_q8_0.gguf"),
        (["toy-q4_k_m-imat.gguf", "toy-q8_0.gguf"], "Q4_K_M", "toy-q4_k_m-imat.gguf"),
        (["Q8_0/toy-Q8_0.gguf", "Q4_0/toy-Q4_0.gguf"], "Q8_0", "Q8_0/toy-Q8_0.gguf"),
        (["toy-BF16-00001-of-00002.gguf", "toy-BF16-00002-of-00002.gguf", "toy-Q4_K_M.gguf"], None, "toy-Q4_K_M.gguf"),
    ],
)
def test_the_gguf_file_that_is_meant(names: list[str], selector: str | None, chosen: str) -> None:
    assert choose_gguf(names, selector, "here") == chosen


@pytest.mark.parametrize(
    ("names", "selector", "line"),
    [
        (QUANTISED, "Q9", f"here: 'Q9' fits none of its GGUF files; name one of {', '.join(QUANTISED)}"),
        (QUANTISED, "../toy-Q8_0.gguf", "here: '../toy-Q8_0.gguf' fits none of its GGUF files; name one of toy-Q4_K."),
        (QUANTISED, "toy", f"here: 'toy' fits several of its GGUF files; name one of {', '.join(QUANTISED)}"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf", "c.gguf"], "Q8_0", "fits several of its GGUF files; name one of a-Q8_0.gguf"),
        (["a.gguf", "b.gguf"], None, "here: it has several GGUF files; name one of a.gguf, b.gguf"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "c.gguf"], None, "name one of a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
        ([f"{i:03}.gguf" for i in range(100)], None, "038.gguf, 039.gguf and 60 more"),
        (["README.md"], None, "here holds neither a GGUF file nor config.json with model.safetensors"),
        (["README.md"], "Q8_0", "here holds neither a GGUF file"),
        (["config.json", "model.safetensors"], "Q8_0", "here holds no GGUF file: leave out ':Q8_0' for its folder"),
    ],
)  # fmt: skip
def test_none_or_several_gguf_files_are_listed(names: list[str], selector: str | None, line: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        choose_gguf(names, selector, "here")
    assert line in str(caught.value)


@pytest.mark.parametrize("selector", [None, "BF16", "toy-BF16-00001-of-00002.gguf"])
def test_split_gguf_files_are_refused(selector: str | None) -> None:
    names = ["toy-BF16-00001-of-00002.gguf", "toy-BF16-00002-of-00002.gguf"]
    with pytest.raises(UnsupportedModelError if selector else ModelNotFoundError, match=r"00001-of-00002\.gguf"):
        choose_gguf(names, selector, "here")
    with pytest.raises(UnsupportedModelError, match="split GGUF files cannot be opened"):
        choose_gguf(names[:1], selector, "here")


WORDS = ["Q4_K_M", "q4_k_m", "Q4_K", "Q8_0", "F16"]
PARTS = st.tuples(
    st.sampled_from(["a-", "b.", "a_b_", "x/", "a"]), st.sampled_from(WORDS), st.sampled_from(["", "-imat", "x", "_S"]),
    st.sampled_from([".gguf", ".GGUF", ".safetensors", "-00001-of-00002.gguf"]),
)  # fmt: skip


@given(st.lists(PARTS, unique=True), st.none() | st.sampled_from(WORDS))
def test_a_quantisation_is_a_whole_word_of_exactly_one_name(
    parts: list[tuple[str, str, str, str]], selector: str | None
) -> None:
    names = ["".join(part) for part in parts]
    files = [name for name in names if name.lower().endswith(".gguf")]
    fitting = [
        "".join((start, word, end, extension))
        for start, word, end, extension in parts
        if word.lower() == (selector or "Q4_K_M").lower()
        and start != "a"
        and end in ("", "-imat")
        and extension.lower().endswith(".gguf")
    ]
    if selector is None and len(files) == 1:
        fitting = files
    whole = [name for name in fitting if "-of-" not in name]
    if len(whole) == 1:
        assert choose_gguf(names, selector, "here") == whole[0]
    else:
        with pytest.raises(UnsupportedModelError if fitting and not whole else ModelNotFoundError):
            choose_gguf(names, selector, "here")


@pytest.mark.parametrize("selector", ["*", ".*", "(", "[", "Q8.0", "Q8_0|Q4_K_M", "\\", "(?i)q8_0", "\x00"])
def test_a_selector_is_no_pattern(selector: str) -> None:
    with pytest.raises(ModelNotFoundError):
        choose_gguf(QUANTISED, selector, "here")


@given(st.text(st.sampled_from("a./\\:\n "), max_size=8))
def test_a_plain_name_stays_in_its_folder(name: str) -> None:
    if is_plain(name):
        assert Path("/x", name).resolve().is_relative_to("/x/")
        assert Path("/x", name).resolve() != Path("/x")
        windows = PureWindowsPath(name)
        assert not windows.drive
        assert not windows.root
        assert ".." not in windows.parts


# Folders of safetensors


def test_the_files_of_a_folder_and_no_stray_ones(index: Callable[..., Callable[[], Path]]) -> None:
    names = [*SMALL, *STRAY, "model.safetensors"]
    assert folder_files(names, no_index) == ([*SMALL, "model.safetensors"], [])
    names = [*SMALL, *STRAY, *SHARDS, INDEX_FILE, "model-00003-of-00003.safetensors"]
    assert folder_files(names, index(*SHARDS, SHARDS[0])) == ([*SMALL, INDEX_FILE, *SHARDS], [])


def test_a_single_file_comes_before_an_index(index: Callable[..., Callable[[], Path]]) -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors", INDEX_FILE, *SHARDS]
    assert folder_files(names, index(*SHARDS))[0][2:] == ["model.safetensors"]


def test_what_a_folder_lacks_is_named(index: Callable[..., Callable[[], Path]]) -> None:
    assert folder_files(["config.json"], no_index)[1] == ["tokenizer.json", "model.safetensors"]
    assert folder_files([INDEX_FILE, SHARDS[0]], index(*SHARDS))[1] == ["config.json", "tokenizer.json", SHARDS[1]]


# On this machine


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_path_is_a_file_a_folder_of_safetensors_or_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    one = write(tmp_path / "one", "toy-F16.gguf", "README.md", "config.json")
    assert find_on_disk(one) == one / "toy-F16.gguf"
    assert find_on_disk(one / "README.md") == one / "README.md"  # whatever it is, its reader says
    folder = write(tmp_path / "folder", "config.json", "model.safetensors", "toy.gguf")
    assert find_on_disk(folder) == folder
    sharded = write(tmp_path / "sharded", "config.json", INDEX_FILE)
    assert find_on_disk(sharded) == sharded


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["a-Q4_K_M.gguf", "b.gguf"], "holds several GGUF files: give the path of one of a-Q4_K_M.gguf, b.gguf"),
        (["deeper/a.gguf"], "holds neither a GGUF file nor config.json with model.safetensors"),
        (["config.json"], "holds neither a GGUF file nor config.json with model.safetensors"),
        (["model.safetensors"], "holds neither a GGUF file nor config.json with model.safetensors"),
    ],
)
def test_a_folder_with_no_model_or_several(tmp_path: Path, names: list[str], line: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_on_disk(write(tmp_path, *names))
    assert line in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_files_a_model_is_read_from(tmp_path: Path, index: Callable[..., Callable[[], Path]]) -> None:
    write(tmp_path, *SMALL, *STRAY, *SHARDS)
    index(*SHARDS)
    assert [path.name for path in model_files(tmp_path)] == sorted([*SMALL, *SHARDS, INDEX_FILE])
    assert model_files(tmp_path / "config.json") == [tmp_path / "config.json"]
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ModelNotFoundError, match=f"lacks {SHARDS[1]}"):
        model_files(tmp_path)
