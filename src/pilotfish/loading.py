"""From a catalog name or a path to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from pilotfish import catalog
from pilotfish.errors import ModelNotFoundError, OptionError, UnsupportedModelError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.formats.gguf_model import read_model
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
    """Opens a GGUF file, or a model of the catalog, which is fetched first where it is not on this machine.

    `progress` is told how a fetch goes. The native kernels do the arithmetic with `threads` threads, by default
    `PILOTFISH_THREADS` or one for each physical core; or `backend` does it, which has its own threads. Raises
    `ModelNotFoundError`, `FetchError`, `FormatError`, `TokenizerError`, `UnsupportedModelError`, and `OptionError` for
    an option or environment variable that cannot be honoured.
    """
    if backend is not None and threads is not None:
        raise OptionError("threads and backend cannot be combined: a backend has threads of its own")
    backend = backend or choose_backend(threads)
    file = GGUFFile.open(find_file(model, progress))
    config, tensors = read_model(file)
    tokenizer = Tokenizer.from_gguf_metadata(file.metadata)
    if tokenizer.vocab_size > config.vocab_size:
        raise UnsupportedModelError(
            f"{file.path}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only {config.vocab_size} rows"
        )
    return Transformer(config, tensors, tokenizer.vocab_size, tokenizer.padding_token_ids, backend), tokenizer


def find_file(model: str | Path, progress: catalog.Progress | None = None) -> Path:
    """The file behind a catalog name or a path. Raises `ModelNotFoundError` and `FetchError`."""
    if isinstance(model, str) and model in catalog.entries():
        return catalog.pull(model, progress)
    path = Path(model)
    if path.is_dir():
        raise UnsupportedModelError(f"{path} is a folder; give the path of a GGUF file in it")
    if not path.exists():
        names = ", ".join(catalog.entries())
        raise ModelNotFoundError(f"no such model: {model} is neither a file nor a name in the catalog ({names})")
    return path
