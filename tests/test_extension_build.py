"""What the compiler makes of each variant of the kernels: its symbols, its instructions, and where it may run.

Each variant is compiled once more with the flags of the extension's own build, but without inlining: so no result
depends on which calls the optimiser happens to inline today.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import unmet

from pilotfish import _kernels

ROOT = Path(__file__).parent.parent
X86 = platform.machine() in ("x86_64", "AMD64")
# The first byte of an instruction tells its encoding: VEX is AVX's, EVEX is AVX-512's.
ENCODINGS = {"c4": "VEX", "c5": "VEX", "62": "EVEX"}
# What each variant's instructions and its dot products may be.
ALLOWED = {
    "portable": (set(), set()),
    "avx2": ({"VEX"}, set()),
    "avxvnni": ({"VEX"}, {("VEX", "ymm")}),
    "avx512vl": ({"VEX", "EVEX"}, {("EVEX", "ymm")}),
    "avx512": ({"VEX", "EVEX"}, {("EVEX", "zmm")}),
}
# The CPU's own words for what each variant needs, in the order in which one is chosen.
NEEDED = {
    "avx512": {"fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "avx512vl": {"avx2", "fma", "f16c", "avx512vl", "avx512_vnni"},
    "portable": set(),
}


def output_of(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        unmet(f"{program} is not on this machine")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The object file of each variant by its name."""
    folder = tmp_path_factory.mktemp("objects")
    builds = list(ROOT.glob(f"build/cp{sys.version_info.major}{sys.version_info.minor}-*/compile_commands.json"))
    if not builds:
        unmet("the extension was not built in this folder: run `make venv`")
    found = {}
    for entry in json.loads(builds[0].read_text()):
        source = Path(entry["file"])
        if source.name.startswith("variant_"):
            name = source.stem.removeprefix("variant_")
            found[name] = folder / f"{name}.o"
            command = [*shlex.split(entry["command"]), "-O1", "-fno-inline", "-o", str(found[name])]
            subprocess.run(command, cwd=entry["directory"], check=True, capture_output=True)
    return found


def test_variants_show_the_linker_nothing_but_their_table(objects: dict[str, Path]) -> None:
    # Of two weak symbols of one name the linker keeps either: AVX-512 code could end up on the portable path.
    symbols = {
        name: [line.split()[-1] for line in output_of("nm", "--extern-only", "--defined-only", str(path)).splitlines()]
        for name, path in objects.items()
    }
    assert set(symbols) == (set(ALLOWED) if X86 else {"portable"})
    assert {name: found for name, found in symbols.items() if not re.fullmatch(r"k\w+", " ".join(found))} == {}


@pytest.mark.skipif(not X86, reason="instructions of x86")
@pytest.mark.parametrize("name", ALLOWED)
def test_variants_hold_only_their_own_instructions(objects: dict[str, Path], name: str) -> None:
    encodings, dot_products = set(), set()
    for line in output_of("objdump", "--disassemble", "--wide", str(objects[name])).splitlines():
        _, code, text, *_ = *line.split("\t"), "", ""
        encoding = ENCODINGS.get(code[:2])
        if encoding:
            encodings.add(encoding)
        if "vpdpbusd" in text or "vpdpwssd" in text:
            dot_products.add((encoding, *set(re.findall("[xyz]mm", text))))
    assert (encodings, dot_products) == ALLOWED[name]


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="flags of x86 as Linux gives them")
def test_a_variant_is_offered_where_the_cpu_has_what_it_needs() -> None:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags
    assert _kernels.instruction_sets() == [name for name in NEEDED if NEEDED[name] <= set(flags[1].split())]
