"""Fixtures that many tests share: where model files are, and what is loaded once for the whole run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_line import Outcome, Stream
from fake_hub import FakeHub
from huggingface_hub import constants
from hypothesis import settings

from pilotfish import catalog
from pilotfish.cli.main import main
from pilotfish.formats.gguf import GGUFFile
from pilotfish.tokenizer import Tokenizer

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long grids (marked `full`)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="a long grid: run `make test-full`"))


def unmet(reason: str) -> NoReturn:
    """Skips the test for want of something on this machine; under CI=true fails it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """The file of a catalog model; without it the test is `unmet`."""

    def find(name: str) -> Path:
        path = catalog.locate(catalog.entries()[name])
        if path is None:
            unmet(f"the model {name} is not on this machine: run `pilotfish pull {name}`")
        return path

    return find


@pytest.fixture(scope="session")
def real_metadata(model_path: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """The metadata of a catalog model's GGUF file."""
    return cache(lambda name: GGUFFile.open(model_path(name)).metadata)


@pytest.fixture(scope="session")
def real_tokenizer(real_metadata: Callable[[str], dict[str, Any]]) -> Callable[[str], Tokenizer]:
    return cache(lambda name: Tokenizer.from_gguf_metadata(real_metadata(name)))


@pytest.fixture(scope="session")
def qwen(real_tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
    return real_tokenizer("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def smollm(real_tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
    return real_tokenizer("smollm2-135m")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub on this machine that the hub library asks, and an empty cache of that library's."""
    hub = FakeHub()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + template[template.index("/{") :])
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No colours asked for, and no model, network or cache of this machine."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8"):  # a person has none of these
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def cli(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs `pilotfish` with some arguments in this process."""

    def call(*arguments: str, stdin: bytes = b"", terminal: str = "", encoding: str = "utf-8") -> Outcome:
        out, err = Stream("out" in terminal, encoding), Stream("err" in terminal)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["pilotfish", *arguments])
            patch.setattr(sys, "stdin", Stream(content=stdin))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as caught:
                main()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, out.text(), err.text())

    return call
