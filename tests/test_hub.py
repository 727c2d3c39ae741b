"""Models of the hub: what a user may type, what is fetched and checked, and what the library's cache is good for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import FakeHub, lay_out_cache
from huggingface_hub import constants

from pilotfish import catalog, find_model
from pilotfish.catalog import HubSource, PullEvent, is_name, locate, pull
from pilotfish.errors import DiskFullError, FetchError, FormatError, ModelNotFoundError, UnsupportedModelError
from pilotfish.formats.safetensors_index import INDEX_FILE

TOY = "someone/toy"
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: os.urandom(1001), LAST: os.urandom(1002)}
SMALL = {
    name: name.encode() * 5
    for name in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json",
                 "chat_template.jinja")
}  # fmt: skip
SHARDED = SMALL | SHARDS | {INDEX_FILE: json.dumps({"weight_map": {"a": FIRST, "b": LAST}}).encode()}
SINGLE = SMALL | {"model.safetensors": b"weights"}
STRAY = dict.fromkeys(
    ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "README.md", ".gitattributes",
     "model-00003-of-00003.safetensors", "extra/config.json"),
    b"stray",
)  # fmt: skip
QUANTISED = {f"toy-{kind}.gguf": kind.encode() * 100 for kind in ("Q4_0", "Q4_K_M", "Q8_0")}


def files_in(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()  # the setting is read when a session starts
    yield
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def wheels_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


# What a user may type


@pytest.mark.parametrize(
    ("files", "selector", "chosen"),
    [
        (QUANTISED, ":toy-Q8_0.gguf", "toy-Q8_0.gguf"),
        (QUANTISED, ":q8_0", "toy-Q8_0.gguf"),
        (QUANTISED, "", "toy-Q4_K_M.gguf"),
        ({"toy-F16.gguf": b"alone", "config.json": b"{}"}, "", "toy-F16.gguf"),
        ({"Q8_0/toy-Q8_0.gguf": b"deeper"}, ":Q8_0", "Q8_0/toy-Q8_0.gguf"),
        (SINGLE | QUANTISED, ":Q8_0", "toy-Q8_0.gguf"),
    ],
)
def test_a_gguf_file_of_a_repository(hub: FakeHub, files: dict[str, bytes], selector: str, chosen: str) -> None:
    hub.files = files | STRAY
    path = find_model(TOY + selector)
    assert path.as_posix().endswith(f"/{chosen}")
    assert path.read_bytes() == files[chosen]
    assert hub.fetched == [chosen]
    hub.num_requests = 0
    assert pull(f"{TOY}:{chosen}") == path
    assert hub.num_requests == 0


@pytest.mark.parametrize("files", [SHARDED, SINGLE, SINGLE | QUANTISED], ids=["sharded", "single", "beside GGUF files"])
def test_a_folder_of_safetensors_of_a_repository_without_its_stray_files(
    hub: FakeHub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    hub.files = files | STRAY
    folder = find_model(TOY)
    wanted = {name: content for name, content in files.items() if name not in QUANTISED}
    assert files_in(folder) == wanted
    assert Counter(hub.fetched) == Counter(wanted.keys())
    hub.num_requests = 0
    assert find_model(TOY) == folder
    assert hub.num_requests == 0
    assert capfd.readouterr() == ("", "")


def test_optional_files_may_be_absent(hub: FakeHub) -> None:
    hub.files = {name: SINGLE[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert files_in(pull(TOY)) == hub.files


def test_a_catalog_name_or_variant_means_its_repository(hub: FakeHub) -> None:
    hub.repository, hub.files = "mlx-community/Qwen3-4B-4bit", SINGLE
    assert files_in(find_model("qwen3-4b:mlx-4bit")) == SINGLE
    hub.repository, hub.files = "Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": b"4b", "Qwen3-4B-Q8_0.gguf": b"8b"}
    assert find_model("qwen3-4b").read_bytes() == b"4b"
    present = [name for name, entry in catalog.entries().items() if locate(entry) is not None]
    assert present == ["qwen3-4b", "qwen3-4b:mlx-4bit"]


@pytest.mark.parametrize(
    ("files", "name", "error", "line"),
    [
        (QUANTISED, f"{TOY}:Q9", ModelNotFoundError, "'Q9' fits none of its GGUF files; name one of toy-Q4_0.gguf"),
        (QUANTISED, f"{TOY}:toy", ModelNotFoundError, "'toy' fits several of its GGUF files; name one of toy-Q4_0"),
        (QUANTISED, f"{TOY}:../../x.gguf", ModelNotFoundError, "'../../x.gguf' fits none of its GGUF files"),
        ({"a.gguf": b"", "b.gguf": b""}, TOY, ModelNotFoundError, "has several GGUF files; name one of a.gguf, b.gguf"),
        ({"a-00001-of-00002.gguf": b""}, TOY, UnsupportedModelError, "split GGUF files cannot be opened"),
        (STRAY, TOY, ModelNotFoundError, "holds neither a GGUF file nor config.json with model.safetensors"),
        (SINGLE, f"{TOY}:Q8_0", ModelNotFoundError, "holds no GGUF file: leave out ':Q8_0'"),
        ({"../x.gguf": b"", "/x.gguf": b""}, TOY, ModelNotFoundError, "holds neither a GGUF file"),
    ],
)  # fmt: skip
def test_what_a_repository_does_not_have(
    hub: FakeHub, files: dict[str, bytes], name: str, error: type[Exception], line: str
) -> None:
    hub.files = files
    with pytest.raises(error) as caught:
        find_model(name)
    assert str(caught.value).startswith(f"hub repository {TOY}")
    assert line in str(caught.value)
    assert hub.fetched == []


@pytest.mark.parametrize(
    "model",
    [
        *("gpt", "gpt:Q8_0", f"{TOY}/deeper", f"{TOY}:", "org/x.gguf", "org/x.git", "/a/b", "./a/b", "../a", "~/b"),
        *("a/", "", "a..b/c", "a/b--c", "a/-b", "a/b.", f"a/{'b' * 97}", "a b/c", "a/b\n", "é/b"),
    ],
)
def test_what_is_no_name_is_looked_for_on_disk(hub: FakeHub, model: str) -> None:  # fmt: skip
    assert not is_name(model)
    with pytest.raises(ModelNotFoundError, match=r"(?s)no such model: .* no file or folder, no name in the catalog"):
        find_model(model)
    with pytest.raises(ModelNotFoundError, match=r"(?s)no model .* in the catalog; it has .*ORG/NAME"):
        pull(model)
    assert hub.num_requests == 0


def test_a_path_that_exists_comes_before_a_repository(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = QUANTISED
    monkeypatch.chdir(tmp_path)
    assert is_name(TOY)
    folder = Path(TOY)
    with pytest.raises(ModelNotFoundError, match="no such model: someone/toy"):
        find_model(folder)  # a Path is never a name
    folder.mkdir(parents=True)
    assert not is_name(TOY)
    with pytest.raises(ModelNotFoundError, match="the folder someone/toy holds neither"):
        find_model(TOY)
    (folder / "mine.gguf").write_bytes(b"mine")
    assert find_model(TOY) == folder / "mine.gguf"
    Path(f"{TOY}:Q8_0").write_bytes(b"also mine")
    assert find_model(f"{TOY}:Q8_0") == Path(f"{TOY}:Q8_0")
    Path("qwen3-4b").mkdir()
    assert is_name("qwen3-4b")
    assert hub.num_requests == 0
    assert pull(TOY).read_bytes() == QUANTISED["toy-Q4_K_M.gguf"]  # what is pulled is never a path


# Fetching


def test_progress_counts_all_files_together(hub: FakeHub) -> None:
    hub.files = SHARDED | STRAY
    events: list[PullEvent] = []
    pull(TOY, events.append)
    total = sum(map(len, SHARDED.values()))
    assert events[0] == PullEvent(0, 0, f"asking hub repository {TOY}")
    of_all = [event for event in events if event.bytes_total == total]
    done = [event.bytes_done for event in of_all if event.status != "verifying"]
    assert done == sorted(done)
    assert max(done) == total
    fetched = {f"file {place} of 8" for place in (1, 2, 3, 4, 5, 7, 8)}  # the index, the sixth, came before all
    assert {event.status for event in of_all} == fetched | {"verifying"}
    assert events[-1] == PullEvent(total, total, "verifying")


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, LAST])
def test_a_file_that_is_not_the_stated_one_is_not_kept(hub: FakeHub, name: str) -> None:
    hub.files = SHARDED
    hub.stated[name] = bytes(len(SHARDED[name]))
    kind = "sha256" if name in SHARDS else "sha1"
    with pytest.raises(FetchError, match=rf"{name} came with {kind} .*, and the hub states .*: try again"):
        pull(TOY)
    assert SHARDED[name] not in files_in(Path(constants.HF_HUB_CACHE)).values()
    hub.stated.clear()
    assert files_in(pull(TOY)) == SHARDED


@pytest.mark.parametrize("lacking", ["tokenizer.json", FIRST])
def test_a_repository_that_lacks_a_file_is_refused_before_its_weights_are_fetched(hub: FakeHub, lacking: str) -> None:
    hub.files = {name: content for name, content in SHARDED.items() if name != lacking}
    with pytest.raises(FetchError, match=f"hub repository {TOY}: has no {lacking}"):
        pull(TOY)
    assert not SHARDS.keys() & {*hub.fetched}


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "x.bin"])
def test_a_hostile_index_fetches_nothing(hub: FakeHub, name: str) -> None:
    hub.files = SHARDED | {INDEX_FILE: json.dumps({"weight_map": {"a": name}}).encode(), name: b"outside"}
    with pytest.raises(FormatError, match="must be the plain name of a safetensors file"):
        pull(TOY)
    assert hub.fetched == [INDEX_FILE]


def test_files_of_two_commits_are_no_model(hub: FakeHub) -> None:
    hub.files = SINGLE

    def change(event: PullEvent) -> None:
        if event.status == "file 2 of 6":
            hub.commit = "d" * 40

    with pytest.raises(FetchError, match="changed while it was fetched: try again"):
        pull(TOY, change)
    hub.fetched.clear()
    assert files_in(pull(TOY)) == SINGLE
    assert hub.fetched == []


def test_an_interrupted_fetch_goes_on_with_what_is_missing(hub: FakeHub) -> None:
    hub.files = SHARDED

    def interrupt(event: PullEvent) -> None:
        if event.status == "file 8 of 8":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(TOY, interrupt)
    assert LAST in hub.fetched
    hub.fetched.clear()
    assert files_in(pull(TOY)) == SHARDED
    assert hub.fetched == [LAST]


def test_room_is_needed_for_all_that_is_missing(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.files = SINGLE
    total = sum(map(len, SINGLE.values()))
    here = {"tokenizer.json": SINGLE["tokenizer.json"]}
    lay_out_cache(tmp_path / "hub", TOY, here)
    missing = total - len(SINGLE["tokenizer.json"])
    usage = namedtuple("usage", "total used free")
    free = {"bytes": missing - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free["bytes"]))
    with pytest.raises(DiskFullError, match=r"not enough room in .*; make room, or set HF_HUB_CACHE"):
        pull(TOY)
    assert hub.fetched == []
    free["bytes"] = missing
    assert files_in(pull(TOY)) == SINGLE


@pytest.mark.parametrize(
    "state",
    [
        {"rfilename": "toy.gguf", "size": 5, "blobId": None},
        {"rfilename": "toy.gguf", "size": None, "blobId": "a" * 40},
        {"rfilename": "toy.gguf", "size": -1, "blobId": "a" * 40},
        {"rfilename": "toy.gguf", "size": 5, "lfs": {"size": 5, "sha256": "a" * 40, "pointerSize": 1}},
    ],
)
def test_a_file_that_cannot_be_checked_is_not_used(hub: FakeHub, state: dict[str, Any]) -> None:
    hub.files = {"toy.gguf": b"12345"}
    hub.listing = {"id": TOY, "sha": "c" * 40, "siblings": [state]}
    with pytest.raises(FetchError, match=r"states no size or no checksum to check toy\.gguf against"):
        pull(TOY)
    assert hub.fetched == []


# A hub that gives nothing


@pytest.mark.parametrize(
    ("name", "listing_error", "file_error", "line"),
    [
        (TOY, None, (403, "GatedRepo"), "is gated: accept its terms on the hub, and a token is needed (set HF_TOKEN"),
        (TOY, (401, "GatedRepo"), None, "is gated: accept its terms on the hub, and a token is needed (set HF_TOKEN"),
        (TOY, (401, ""), None, "refuses access (status 401): check its name; if it is private or gated, a token is"),
        (TOY, (403, ""), None, "refuses access (status 403)"),
        ("someone/else", None, None, "does not exist, or is private: then a token is needed (set HF_TOKEN, or run"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line(
    hub: FakeHub, name: str, listing_error: Any, file_error: Any, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.files = SINGLE
    hub.listing_error, hub.file_error = listing_error, file_error
    with pytest.raises(FetchError) as caught:
        find_model(name)
    assert str(caught.value).startswith(f"cannot fetch {name} (hub repository {name}: {line}")
    assert "or give the path to a GGUF file or to a folder of safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "listing", [[], {}, {"id": TOY}, {"siblings": [{}]}, {"id": TOY, "siblings": 3}, "a portal's page"]
)
def test_an_answer_that_is_not_the_hubs_is_one_line(hub: FakeHub, listing: Any) -> None:  # fmt: skip
    hub.listing = listing
    with pytest.raises((FetchError, ModelNotFoundError)) as caught:
        pull(TOY)
    assert "\n" not in str(caught.value)


# The cache


@pytest.mark.parametrize(
    ("files", "name", "chosen"),
    [
        (SHARDED, TOY, ""),
        (SINGLE, TOY, ""),
        (SINGLE | STRAY | QUANTISED, TOY, ""),
        (QUANTISED, f"{TOY}:Q8_0", "toy-Q8_0.gguf"),
        (QUANTISED, f"{TOY}:toy-Q4_0.gguf", "toy-Q4_0.gguf"),
        (QUANTISED, TOY, "toy-Q4_K_M.gguf"),
    ],
)
def test_what_is_complete_in_the_cache_is_used_without_a_network_call(
    hub: FakeHub, tmp_path: Path, files: dict[str, bytes], name: str, chosen: str
) -> None:
    snapshot = lay_out_cache(tmp_path / "hub", TOY, files)
    events: list[PullEvent] = []
    assert find_model(name, events.append) == snapshot / chosen
    assert (hub.num_requests, events) == (0, [])


@pytest.mark.parametrize(
    ("lacking", "name", "line"),
    [
        ([LAST], TOY, LAST),
        (["tokenizer.json"], TOY, "tokenizer.json"),
        (["config.json", "tokenizer.json"], TOY, "config.json, tokenizer.json"),
        ([*SHARDED], TOY, "all of it"),
        ([*SHARDED], f"{TOY}:Q8_0", "Q8_0"),
        ([*SHARDED], f"{TOY}:toy-Q8_0.gguf", "toy-Q8_0.gguf"),
    ],
)
def test_offline_what_the_cache_lacks_is_named(
    hub: FakeHub, offline: None, tmp_path: Path, lacking: list[str], name: str, line: str
) -> None:
    snapshot = lay_out_cache(tmp_path / "hub", TOY, SHARDED)
    for file_name in lacking:
        (snapshot / file_name).resolve().unlink()  # a broken link, as of a blob that was cleaned away
    with pytest.raises(FetchError) as caught:
        find_model(name)
    assert str(caught.value) == (
        f"cannot fetch {name} (hub repository {TOY}: offline mode is on (HF_HUB_OFFLINE); its cache lacks {line}); "
        "check the name and the connection, or give the path to a GGUF file or to a folder of safetensors"
    )
    assert hub.num_requests == 0


def test_a_damaged_index_in_the_cache_is_named_offline(offline: None, hub: FakeHub, tmp_path: Path) -> None:
    lay_out_cache(tmp_path / "hub", TOY, SHARDED | {INDEX_FILE: b"{"})
    with pytest.raises(FetchError, match=f"its cache lacks a sound {INDEX_FILE}"):
        find_model(TOY)


def test_a_bare_name_means_the_same_whatever_the_cache_holds_unless_the_hub_is_silent(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.files = QUANTISED
    snapshot = lay_out_cache(tmp_path / "hub", TOY, {"toy-Q8_0.gguf": QUANTISED["toy-Q8_0.gguf"]})
    hub.listing_error = (503, "")
    assert pull(TOY) == snapshot / "toy-Q8_0.gguf"
    hub.listing_error = None
    assert pull(TOY).name == "toy-Q4_K_M.gguf"


def test_a_lone_file_in_the_cache_is_used_offline(offline: None, hub: FakeHub, tmp_path: Path) -> None:
    snapshot = lay_out_cache(tmp_path / "hub", TOY, {"toy-F16.gguf": b"alone"})
    assert pull(TOY) == snapshot / "toy-F16.gguf"


def test_the_hub_librarys_own_variables_are_respected(tmp_path: Path) -> None:
    snapshot = lay_out_cache(tmp_path / "elsewhere", TOY, SINGLE)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "elsewhere"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from pilotfish.cli.main import main; main()", "pull"]
    run = {"env": environment, "capture_output": True, "text": True}
    found = subprocess.run([*command, TOY], **run)  # type: ignore[call-overload]
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{snapshot}\n", "")
    failed = subprocess.run([*command, "qwen3-4b"], **run)  # type: ignore[call-overload]
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1
    assert "offline mode is on (HF_HUB_OFFLINE); its cache lacks Qwen3-4B-Q4_K_M.gguf" in failed.stderr


def test_two_processes_at_once_give_one_whole_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = SHARDED
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": hub.endpoint}
    command = [sys.executable, "-c", "import sys; from pilotfish.catalog import pull; print(pull(sys.argv[1]))", TOY]
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as second,
    ):
        outputs = {process.communicate(timeout=60)[0] for process in (first, second)}
    assert first.returncode == second.returncode == 0
    assert len(outputs) == 1
    assert files_in(Path(outputs.pop().strip())) == SHARDED


def test_a_catalog_source_without_selector_is_its_folder(hub: FakeHub, tmp_path: Path) -> None:
    assert catalog.entries()["qwen3-4b:bf16"].sources == (HubSource("Qwen/Qwen3-4B"),)
    snapshot = lay_out_cache(tmp_path / "hub", "Qwen/Qwen3-4B", SHARDED)
    assert locate(catalog.entries()["qwen3-4b:bf16"]) == snapshot
