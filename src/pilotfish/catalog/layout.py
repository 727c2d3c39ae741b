"""Which files make a model: of a repository on the hub, of the hub library's cache, of a folder on this machine.

A model is one GGUF file, or a folder of safetensors in the layout that the hub's libraries share: `config.json`,
`tokenizer.json`, and the weights in `model.safetensors` or in the shards that `model.safetensors.index.json` names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from pilotfish.errors import ModelNotFoundError, UnsupportedModelError
from pilotfish.formats.safetensors_index import INDEX_FILE, SINGLE_FILE, read_weight_map

DEFAULT_QUANTISATION = "Q4_K_M"

_NEEDED = ("config.json", "tokenizer.json")
_OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)
_MOST_NAMES = 40


def is_plain(name: str) -> bool:
    """Whether `name` is a path that stays inside its folder on every system."""
    return name.isprintable() and not {"\\", ":"} & set(name) and not {"", ".", ".."} & set(name.split("/"))


def is_folder_model(names: Collection[str]) -> bool:
    """Whether these files of a folder are a model of safetensors."""
    return "config.json" in names and (INDEX_FILE in names or SINGLE_FILE in names)


def folder_files(names: Collection[str], find_index: Callable[[], Path]) -> tuple[list[str], list[str]]:
    """The files of the model of safetensors among `names`, and those it lacks; stray files are in neither.

    `model.safetensors` comes before an index, as in `formats.safetensors_folder`. `FormatError` for a bad index.
    """
    is_sharded = INDEX_FILE in names and SINGLE_FILE not in names
    weights = [INDEX_FILE, *sorted(set(read_weight_map(find_index()).values()))] if is_sharded else [SINGLE_FILE]
    files = [name for name in (*_NEEDED, *_OPTIONAL, *weights) if name in names]
    return files, [name for name in (*_NEEDED, *weights) if name not in names]


def choose_gguf(names: Collection[str], selector: str | None, where: str) -> str:
    """The GGUF file among `names` that `selector` means.

    It is a file's name, or the name of a quantisation that stands in exactly one file's name, in any case. Without it:
    the only GGUF file, else the one Q4_K_M. `ModelNotFoundError` lists the files where none or several fit,
    `UnsupportedModelError` where the one that fits is split.
    """
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if selector in files:
        fitting = [selector]
    elif selector is None and len(files) == 1:
        fitting = files
    else:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(selector or DEFAULT_QUANTISATION)}(?![a-z0-9_])", re.IGNORECASE)
        fitting = [name for name in files if word.search(name.rpartition("/")[2].removesuffix(".gguf"))]
    whole = [name for name in fitting if not _SPLIT.search(name)]
    if len(whole) == 1:
        return whole[0]
    if fitting and not whole:
        raise UnsupportedModelError(
            f"{where}: {fitting[0]} is one of several pieces, and split GGUF files cannot be opened; "
            "choose another quantisation, or join the pieces and give the path of the whole file"
        )
    if not files and selector is not None and is_folder_model(names):
        raise ModelNotFoundError(f"{where} holds no GGUF file: leave out ':{selector}' for its folder of safetensors")
    if not files:
        raise ModelNotFoundError(f"{where} holds neither a GGUF file nor config.json with {SINGLE_FILE}")
    several = "several" if whole else "none"
    reason = "it has several GGUF files" if selector is None else f"{selector!r} fits {several} of its GGUF files"
    raise ModelNotFoundError(f"{where}: {reason}; name one of {_listed(whole or files)}")


def find_on_disk(path: Path) -> Path:
    """The model at `path`, which exists: a file itself, a folder of safetensors itself, else a folder's only GGUF file.

    `ModelNotFoundError` where a folder holds no model or several, `UnsupportedModelError` where its only file is split.
    """
    if not path.is_dir():
        return path
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    if is_folder_model(names):
        return path
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if len(files) > 1:
        raise ModelNotFoundError(
            f"the folder {path} holds several GGUF files: give the path of one of {_listed(files)}"
        )
    return path / choose_gguf(files, None, f"the folder {path}")


def model_files(path: Path) -> list[Path]:
    """The files that the model at `path` is read from: itself, or those of a folder of safetensors, sorted by name.

    `FormatError` for a bad index, `ModelNotFoundError` where the folder lacks a file.
    """
    if not path.is_dir():
        return [path]
    names = {entry.name for entry in path.iterdir() if entry.is_file()}
    files, missing = folder_files(names, lambda: path / INDEX_FILE)
    if missing:
        raise ModelNotFoundError(f"the folder {path} lacks {', '.join(missing)}")
    return [path / name for name in sorted(files)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
