"""Fixtures that many tests share: where model files are, and what is loaded once for the whole run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from pilotfish import catalog

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
