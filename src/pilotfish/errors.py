"""Every exception that pilotfish raises on purpose, in one tree.

`PilotfishError` is the root: the command line turns any of these into one line and exit status 2. A message says
what was wrong and what to do about it.
"""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 4
_MAX_SHOWN = 160


def brief(value: object) -> str:
    """`repr(value)` on one line of at most 160 characters, for messages about values that nobody has checked."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python writes out no integer of over 4300 digits
        text = f"{type(value).__name__} of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class PilotfishError(Exception):
    """Root of the tree."""


class OptionError(PilotfishError, ValueError):
    """An argument or option has a value it cannot have."""


class PromptError(PilotfishError, ValueError):
    """A prompt cannot be run: it encodes to nothing, cannot be encoded, or does not fit into the context."""


class ModelNotFoundError(PilotfishError):
    """What was named is no model: nothing on this machine, in the catalog or on the hub, or several files."""


class FetchError(PilotfishError):
    """A model file could not be fetched, or what came is not what was expected."""


class DiskFullError(FetchError):
    """There is not enough room on the disk for a model file."""


class FormatError(PilotfishError):
    """A model file is damaged, truncated or malformed."""


class UnsupportedModelError(PilotfishError):
    """A model file is sound, but holds something this version cannot run exactly."""


class TokenizerError(PilotfishError):
    """A tokenizer cannot be built from a model file, or an id it is asked about stands for no text."""


class ChatTemplateError(PilotfishError):
    """A chat template is missing, or fails on the given messages."""


class PairMismatchError(PilotfishError):
    """Draft and target model do not read the same token ids in the same way."""


class DrafterError(PilotfishError):
    """A drafter broke its contract in a way that cannot be repaired by ignoring its guesses."""


class NonFiniteLogitsError(PilotfishError):
    """A forward gave NaN, +infinity, or nothing above -infinity, where logits were expected."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(
            f"the model gave no usable logits (row {row}: NaN, +inf, or all -inf): the file is damaged or numerically "
            "unsound"
        )


class CacheError(PilotfishError):
    """A key/value cache was asked for something its contract forbids; it is unchanged."""


class CacheFullError(CacheError):
    """A key/value cache has no room for the slots asked for; it is unchanged."""


class ArtifactError(PilotfishError):
    """A file is no benchmark artifact that this version understands."""


class BenchmarkError(PilotfishError):
    """A process of a measurement ended without its result."""


class InvariantError(PilotfishError):
    """An internal invariant does not hold: a defect in pilotfish, never in its input."""
