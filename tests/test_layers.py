"""Each layer imports only what stands above it in docs/design.md, and the public API is what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pilotfish

PACKAGE = Path(pilotfish.__file__).parent
FACES = {"bench": 6, "server": 7, "cli": 8}
LAYERS = {
    "errors": 0, "config": 0, "sampling_params": 0, "token_history": 0, "types": 0, "files": 0, "json_files": 0,
    "formats": 1, "tokenizer": 1, "ops": 1,
    "kvcache": 2, "model": 2,
    "drafters": 3, "verify": 3, "loading": 3, "catalog": 3,
    "decode": 4, "engine": 5, **FACES,
}  # fmt: skip
# Beyond "anything below": inside layers 0 to 2 only these may be imported, and faces see the public API alone,
# and single modules named in full.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "sampling_params": {"errors"},
    "token_history": set(),
    "types": {"errors", "config", "sampling_params", "token_history"},
    "files": {"errors"},
    "json_files": {"errors", "files"},
    "formats": {"errors", "config", "types", "files", "json_files"},
    "tokenizer": {"errors", "config", "types", "files", "json_files"},
    "ops": {"errors", "config", "sampling_params", "token_history", "types"},
    "kvcache": {"errors", "config", "types", "ops"},
    "model": {"errors", "config", "types", "ops", "kvcache"},
    "verify": {"errors", "config", "types", "ops"},
    "catalog": {"errors", "config", "types", "formats.safetensors_index"},
    "bench": {"", "catalog", "config", "errors", "types", "model.calibrate"},
    "server": {"", "catalog", "config", "errors", "types"},
    "cli": {"", "catalog", "config", "errors", "sampling_params", "types", "bench", "server"},
}
WITHOUT_TORCH = (
    "errors", "config", "sampling_params", "token_history", "types", "files", "json_files", "formats", "tokenizer",
    "catalog", "cli",
)  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path, at_run_time_only: bool = False) -> set[str]:
    """The modules a file imports, by their full name; at run time, those under TYPE_CHECKING do not count."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if at_run_time_only and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(inner for child in node.body for inner in ast.walk(child))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            module = node.module or ""
            found.update(f"pilotfish.{alias.name}" if module == "pilotfish" else module for alias in node.names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_layers_above_it(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in LAYERS, f"{part} has no layer: add it here and in docs/design.md"
    for name in imports(path):
        if name != "pilotfish" and not name.startswith("pilotfish."):
            continue
        module = name.partition(".")[2]
        imported = module.partition(".")[0]
        if imported in pilotfish.__all__ or imported.startswith("__"):
            module = imported = ""
        if imported in (part, "_kernels"):  # the extension has a test of its own, below
            continue
        if part in ALLOWED:
            assert {imported, module} & ALLOWED[part], f"{part} must not import {name}"
        else:
            assert LAYERS[imported] <= LAYERS[part], f"{part} (layer {LAYERS[part]}) must not import {name}"


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_part_needs_no_torch(part: str) -> None:
    for path in MODULES:
        if part_of(path) == part:
            names = imports(path, at_run_time_only=True)
            assert not any(name.split(".")[0] == "torch" for name in names), f"{path} imports torch"


def test_only_native_imports_the_extension() -> None:
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix() != "ops/native.py":
            assert "pilotfish._kernels" not in imports(path), f"{path} imports the extension"


def test_command_line_starts_without_torch() -> None:
    code = "import sys, pilotfish.cli.main; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_all_there() -> None:
    for name in pilotfish.__all__:
        assert getattr(pilotfish, name) is not None
    assert sorted(pilotfish._HOME_OF) == sorted(pilotfish.__all__)
    assert set(pilotfish.__all__) <= set(dir(pilotfish))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = pilotfish.absent
