"""From a catalog name or a path to a model and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pilotfish import catalog
from pilotfish.errors import ModelNotFoundError, OptionError, TokenizerError, UnsupportedModelError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
from pilotfish.formats.hf_model import read_folder
from pilotfish.model import Transformer
from pilotfish.ops.backend import Backend
from pilotfish.ops.native import choose_backend
from pilotfish.tokenizer import Tokenizer


def load(
    model: str | Path,
    progress: catalog.Progress | None = None,
    *,
    threads: int | None = None,
    backend: Backend | None = None,
) -> tuple[Transformer, Tokenizer]:
    """Opens what `find_model` finds: a GGUF file, or a folder of safetensors, MLX-quantised ones too.

    `progress` is told how a fetch goes. The native kernels do the arithmetic with `threads` threads, by default
    `PILOTFISH_THREADS` or one for each physical core; or `backend` does it, which has its own threads. Raises
    `ModelNotFoundError`, `FetchError`, `FormatError`, `TokenizerError`, `UnsupportedModelError`, and `OptionError` for
    an option or environment variable that cannot be honoured.
    """
    if backend is not None and threads is not None:
        raise OptionError("threads and backend cannot be combined: a backend has threads of its own")
    backend = backend or choose_backend(threads)
    path = find_model(model, progress)
    if path.is_dir():
        config, tensors = read_folder(path)
        tokenizer = _made_from(path, lambda: Tokenizer.from_folder(path))
    else:
        file = GGUFFile.open(path)
        config, tensors = read_model(file)
        tokenizer = _made_from(path, lambda: Tokenizer.from_gguf_metadata(file.metadata))
    if tokenizer.vocab_size > config.vocab_size:
        raise UnsupportedModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only {config.vocab_size} rows"
        )
    return Transformer(config, tensors, tokenizer.vocab_size, tokenizer.padding_token_ids, backend), tokenizer


def _made_from(path: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer; where it cannot be made, the error says of which model: there are two in a pair."""
    try:
        return make()
    except (TokenizerError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from None


def find_model(model: str | Path, progress: catalog.Progress | None = None) -> Path:
    """The GGUF file, or the folder of safetensors, that `model` means; fetched where it is not on this machine.

    `model` is a name of the catalog; a path to a GGUF file, to a folder of safetensors, or to a folder with one GGUF
    file; or a repository on the hub, `ORG/NAME`, `ORG/NAME:FILE.gguf` or `ORG/NAME:QUANTISATION`. A path that exists
    comes before a repository of its spelling, a name of the catalog before both. Raises `ModelNotFoundError`,
    `UnsupportedModelError`, `FormatError` and `FetchError`; see `catalog.pull`.
    """
    if isinstance(model, str) and catalog.is_name(model):
        return catalog.pull(model, progress)
    if not os.path.exists(model):
        names = ", ".join(name for name in catalog.entries() if ":" not in name)
        raise ModelNotFoundError(
            f"no such model: {model} is no file or folder, no name in the catalog ({names}), and no hub repository "
            "ORG/NAME"
        )
    return catalog.find_on_disk(Path(model))
