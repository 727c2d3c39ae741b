"""What a release must do where nothing but its wheel is installed; `make package-test` runs it there, pytest does not.

Its one argument is the folder with the sdist and with the wheel that is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pilotfish
from pilotfish import _kernels, catalog

ROOT = Path(__file__).parent.parent
ISAS = ("avx512", "avxvnni", "avx2", "avx512vl", "portable")


def check_sdist(path: Path) -> None:
    """The sdist holds whatever a build and the tests need."""
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    patterns = ("csrc/*", "src/**/*.*", "tests/**/*.*", "docs/*", "CMakeLists.txt", "Makefile", "README.md", "LICENSE")
    files = {each for pattern in patterns for each in ROOT.glob(pattern) if each.is_file()}
    wanted = {each.relative_to(ROOT).as_posix() for each in files if "__pycache__" not in each.parts}
    assert "csrc/kernels.h" in wanted
    assert wanted <= found, f"{path.name} lacks {sorted(wanted - found)}"


def check_wheel(path: Path) -> None:
    """The wheel holds the package with its extension, its types and the licence, and nothing beside them."""
    names = zipfile.ZipFile(path).namelist()
    bench_data = (r"bench/prompts\.json", r"bench/report\.html\.j2", r"bench/result\.schema\.json")
    for wanted in (r"py\.typed", r"_kernels\.pyi", r"_kernels\..*so", r"cli/main\.py", *bench_data):
        assert any(re.fullmatch(f"pilotfish/{wanted}", name) for name in names), f"{path.name} lacks {wanted}"
    assert any(re.fullmatch(r"pilotfish-[^/]*\.dist-info/licenses/LICENSE", name) for name in names)
    strangers = [name for name in names if not re.match(r"pilotfish(-[^/]*\.dist-info)?/", name)]
    assert not strangers, f"{path.name} also holds {strangers}"


def generate(model: Path, isa: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("pilotfish")
    options = ("--model", str(model), "--max-tokens", "16", "--json", "Water boils at")
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run(
            [program, "generate", *options],
            cwd=elsewhere,
            env={**os.environ, "PILOTFISH_ISA": isa},
            capture_output=True,
            text=True,
        )


def check_instruction_sets() -> None:
    """The same tokens under every instruction set that this CPU has, one line of error for any other."""
    model = catalog.locate(catalog.entries()["smollm2-135m"])
    assert model is not None, "run `pilotfish pull smollm2-135m`"
    answers = {}
    for isa in _kernels.instruction_sets():
        run = generate(model, isa)
        assert run.returncode == 0, run.stderr
        answers[isa] = json.loads(run.stdout)["token_ids"]
        print(f"{isa}: {answers[isa]}")
    assert all(ids and ids == answers["portable"] for ids in answers.values())
    for isa in ("sse9", *(name for name in ISAS if name not in answers)):
        run = generate(model, isa)
        assert run.returncode == 2, f"PILOTFISH_ISA={isa} gave exit status {run.returncode}"
        assert len(run.stderr.splitlines()) == 1, run.stderr
        assert f"PILOTFISH_ISA is '{isa}'" in run.stderr, run.stderr
        print(run.stderr, end="")


def main() -> None:
    assert "site-packages" in pilotfish.__file__, f"this is not the installed wheel: {pilotfish.__file__}"
    (sdist,), (wheel,) = (list(Path(sys.argv[1]).glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    check_sdist(sdist)
    check_wheel(wheel)
    check_instruction_sets()


if __name__ == "__main__":
    main()
