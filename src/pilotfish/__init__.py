"""Speculative decoding for local language models: the same words, sooner.

The public API is what `__all__` lists. Each name is imported when it is first asked for, so that `pilotfish --help`
need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pilotfish.drafters import Drafter, DraftModelDrafter, SingleSequenceDrafter
    from pilotfish.engine import (
        GenerationStream,
        generate,
        generate_answers,
        next_token_logits,
        speculative_generate,
        stream,
    )
    from pilotfish.errors import PilotfishError
    from pilotfish.kvcache import DenseCache, PagedCache, PagePool
    from pilotfish.loading import find_model, load
    from pilotfish.tokenizer import Tokenizer, check_pair
    from pilotfish.types import (
        Distribution,
        Draft,
        DraftRequest,
        FinishEvent,
        GenerationResult,
        GenerationStats,
        SamplingParams,
        TextEvent,
        TokenLogprobs,
        TokenOutput,
    )

__version__ = "0.1.0"

__all__ = [
    "DenseCache",
    "Distribution",
    "Draft",
    "DraftModelDrafter",
    "DraftRequest",
    "Drafter",
    "FinishEvent",
    "GenerationResult",
    "GenerationStats",
    "GenerationStream",
    "PagePool",
    "PagedCache",
    "PilotfishError",
    "SamplingParams",
    "SingleSequenceDrafter",
    "TextEvent",
    "TokenLogprobs",
    "TokenOutput",
    "Tokenizer",
    "check_pair",
    "find_model",
    "generate",
    "generate_answers",
    "load",
    "next_token_logits",
    "speculative_generate",
    "stream",
]

_HOMES = {
    "pilotfish.drafters": ("DraftModelDrafter", "Drafter", "SingleSequenceDrafter"),
    "pilotfish.engine": (
        "GenerationStream",
        "generate",
        "generate_answers",
        "next_token_logits",
        "speculative_generate",
        "stream",
    ),
    "pilotfish.errors": ("PilotfishError",),
    "pilotfish.kvcache": ("DenseCache", "PagePool", "PagedCache"),
    "pilotfish.loading": ("find_model", "load"),
    "pilotfish.tokenizer": ("Tokenizer", "check_pair"),
    "pilotfish.types": (
        "Distribution",
        "Draft",
        "DraftRequest",
        "FinishEvent",
        "GenerationResult",
        "GenerationStats",
        "SamplingParams",
        "TextEvent",
        "TokenLogprobs",
        "TokenOutput",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pilotfish' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
