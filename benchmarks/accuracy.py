"""How far the kernels' rounding moves a model's predictions, beside llama.cpp's on the same file and the same text.

The reference is float32 arithmetic on the dequantised weights. Against its next-token distributions the benchmark
measures, over all positions of one text, the mean Kullback-Leibler divergence and how often the likeliest token is the
same. Nothing is timed. The default model needs about 11 GB of memory.

    pip install --no-binary llama-cpp-python -r requirements-peers.txt
    python benchmarks/accuracy.py

Without llama-cpp-python its column is left out and its values are null. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from pilotfish import DenseCache, PilotfishError, Tokenizer, load
from pilotfish.errors import NonFiniteLogitsError, OptionError
from pilotfish.loading import find_model
from pilotfish.model import ForwardInput, Transformer, run_forward
from pilotfish.ops.native import NativeBackend, choose_backend
from pilotfish.ops.reference import ReferenceBackend

DEFAULT_TEXT = Path(__file__).with_suffix(".txt")
KL_RATIO_LIMIT = 1.1


class Mean(NamedTuple):
    """A mean over positions, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """float64 [n]; for zeros and ones the error is the binomial sqrt(p (1 - p) / n)."""
        return cls(values.mean().item(), values.std(correction=0).item() / math.sqrt(len(values)))


class Comparison(NamedTuple):
    """What some logits predict, against the reference's, position by position."""

    divergences: Tensor
    """float64 [n]: KL(reference || other) in nats"""
    agrees: Tensor
    """bool [n]: whether the likeliest token is the reference's"""

    @property
    def kl(self) -> Mean:
        return Mean.of(self.divergences)

    @property
    def largest(self) -> float:
        return self.divergences.max().item()

    @property
    def kl_of_the_others(self) -> Mean:
        """The mean without the largest: at one position, where a model keeps its largest activations, rounding costs
        so much that it can outweigh all others together."""
        return Mean.of(self.divergences.sort().values[:-1])

    @property
    def top1(self) -> Mean:
        return Mean.of(self.agrees.double())


def compare(reference: Tensor, logits: Tensor) -> Comparison:
    """Both float32 [n, ids], n > 1. Ties for the likeliest token go to the lowest id.

    Raises `NonFiniteLogitsError`: a NaN would slip through every comparison that follows.
    """
    divergences, agrees = [], []
    for position, rows in enumerate(zip(reference, logits, strict=True)):
        if not all(row.isfinite().all() for row in rows):
            raise NonFiniteLogitsError(position)
        expected, found = (row.double().log_softmax(dim=0) for row in rows)
        divergences.append(expected.exp().mul(expected - found).sum())
        agrees.append(expected.argmax() == found.argmax())
    return Comparison(torch.stack(divergences), torch.stack(agrees))


def forward(model: Transformer, token_ids: Sequence[int], dtype: torch.dtype = torch.float16) -> Tensor:
    """Logits of every position, in one pass: float32 [n, vocab_size]."""
    cache = DenseCache(model.config, len(token_ids), dtype)
    cache.reserve(len(token_ids))
    [logits] = run_forward(model, [ForwardInput(cache, token_ids, len(token_ids))])
    return logits


class Peer(NamedTuple):
    """Another engine: its name and version, and its logits, float32 [n, vocab_size]."""

    name: str
    logits: Tensor


def llama_cpp_forward(path: Path, token_ids: Sequence[int], threads: int) -> Peer | None:
    """llama.cpp with the defaults of its Python package; None where that is not installed."""
    try:
        import llama_cpp
    except ModuleNotFoundError:
        return None
    model = llama_cpp.Llama(
        str(path),
        n_ctx=len(token_ids),
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    model.eval(token_ids)
    logits = torch.from_numpy(model.scores[: len(token_ids)])
    model.close()
    return Peer(f"llama-cpp-python {llama_cpp.__version__}, {threads} threads", logits)


def read_token_ids(tokenizer: Tokenizer, text: Path, num_tokens: int) -> list[int]:
    """The first `num_tokens` ids of a file; `OptionError` where it cannot be read or has fewer."""
    try:
        token_ids = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=True)
    except OSError as error:
        raise OptionError(f"cannot read {text}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{text} is not UTF-8 text (byte {error.start})") from None
    if len(token_ids) < num_tokens:
        raise OptionError(f"{text} has {len(token_ids)} tokens, fewer than --tokens {num_tokens}")
    return token_ids[:num_tokens]


def run(model_name: str, text: Path, num_tokens: int, quiet: bool) -> None:
    """Runs all three and prints the table, unless `quiet`, and the JSON line. Progress goes to stderr."""
    path = find_model(model_name)
    backend = choose_backend()
    _progress(f"{path.name} with the kernels")
    model, tokenizer = load(path, backend=backend)
    token_ids = read_token_ids(tokenizer, text, num_tokens)
    if num_tokens > model.config.context_length:
        raise OptionError(f"--tokens {num_tokens} is beyond the model's context of {model.config.context_length}")
    real_ids = torch.tensor([i for i in range(tokenizer.vocab_size) if i not in tokenizer.padding_token_ids])
    logits = forward(model, token_ids)[:, real_ids]

    _progress("the same with the reference operations")
    reference = forward(load(path, backend=ReferenceBackend())[0], token_ids, torch.float32)[:, real_ids]
    pilotfish = compare(reference, logits)

    _progress("the same with llama.cpp")
    threads = backend.threads if isinstance(backend, NativeBackend) else torch.get_num_threads()
    peer = llama_cpp_forward(path, token_ids, threads)
    if peer is None:
        _progress("llama-cpp-python is not installed, so its column is left out: see requirements-peers.txt")
    llama_cpp = None if peer is None else compare(reference, peer.logits[:, real_ids])

    if not quiet:
        print(f"{model_name}, {num_tokens} tokens of {text.name}, against float32 activations on the same weights")
        print(f"pilotfish: {backend.name}")
        print(f"llama.cpp: {'not installed' if peer is None else peer.name}\n")
        print(table(pilotfish, llama_cpp), end="\n\n")
    print(json.dumps(figures(pilotfish, llama_cpp) | {"tokens": num_tokens, "model": model_name}, allow_nan=False))


def figures(pilotfish: Comparison, llama_cpp: Comparison | None) -> dict[str, float | None]:
    """The JSON object's numbers; the standard error is that of llama.cpp's agreement, which ours is held against."""
    peer: dict[str, float | None]
    if llama_cpp is None:
        peer = dict.fromkeys(("kl_llamacpp", "kl_ratio", "top1_llamacpp", "top1_standard_error"))
    else:
        peer = {
            "kl_llamacpp": llama_cpp.kl.value,
            "kl_ratio": pilotfish.kl.value / llama_cpp.kl.value,
            "top1_llamacpp": llama_cpp.top1.value,
            "top1_standard_error": llama_cpp.top1.error,
        }
    return {"kl_pilotfish": pilotfish.kl.value, "top1_pilotfish": pilotfish.top1.value} | peer


def table(pilotfish: Comparison, llama_cpp: Comparison | None) -> str:
    """The figures for a reader; with llama.cpp's, also the two against each other."""
    columns = {"pilotfish": pilotfish} | ({} if llama_cpp is None else {"llama.cpp": llama_cpp})
    rows = {
        "": columns,
        "mean KL divergence, nats": [_plus_minus(column.kl, ".6f") for column in columns.values()],
        "  largest, at one position": [f"{column.largest:.6f}" for column in columns.values()],
        "  mean of the others": [_plus_minus(column.kl_of_the_others, ".6f") for column in columns.values()],
        "same likeliest token": [_plus_minus(column.top1, ".2%") for column in columns.values()],
    }
    lines = [f"{label:<28}" + "".join(f"{cell:>22}" for cell in cells) for label, cells in rows.items()]
    if llama_cpp is not None:
        ratio = pilotfish.kl.value / llama_cpp.kl.value
        difference = Mean.of(pilotfish.divergences - llama_cpp.divergences)
        least = llama_cpp.top1.value - llama_cpp.top1.error
        only_pilotfish = int((pilotfish.agrees & ~llama_cpp.agrees).sum())
        only_llama_cpp = int((llama_cpp.agrees & ~pilotfish.agrees).sum())
        lines += [
            "",
            f"mean KL divergence {ratio:.3f} times llama.cpp's, at most {KL_RATIO_LIMIT}: "
            f"{_verdict(ratio <= KL_RATIO_LIMIT)} (paired difference {_plus_minus(difference, '+.6f')})",
            f"same likeliest token {pilotfish.top1.value:.2%}, at least {least:.2%}: "
            f"{_verdict(pilotfish.top1.value >= least)} (only pilotfish has it at {only_pilotfish} positions, only "
            f"llama.cpp at {only_llama_cpp})",
        ]
    return "\n".join(lines)


def _plus_minus(mean: Mean, spec: str) -> str:
    return f"{mean.value:{spec}} ± {mean.error:{spec.removeprefix('+')}}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


def _progress(line: str) -> None:
    print(f"accuracy.py: {line}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"accuracy.py: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="catalog name or path to a GGUF file")
    parser.add_argument("--tokens", type=int, default=512, help="length of the text, at least 2, default 512")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="UTF-8 file, default accuracy.txt beside this")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        parser.error(f"--tokens must be at least 2, got {options.tokens}")
    try:
        run(options.model, options.text, options.tokens, quiet=options.json)
    except PilotfishError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
