"""The values that layers hand to each other: weights, options, drafts, outcomes, events, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pilotfish.errors import OptionError, brief
from pilotfish.sampling_params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    import numpy

    from pilotfish.token_history import TokenHistory

FinishReason = Literal["stop", "length", "abort"]
NextKind = Literal["recovered", "bonus", "plain"]
TokenKind = Literal["accepted", "recovered", "bonus", "plain"]
"""How an output token came about: `accepted` was drafted and agreed to; the other three are the target's own."""


class WeightType(Enum):
    """How a tensor's numbers lie in a file: name, weights per block, bytes per block."""

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)
    # MLX's affine quantisation: bits, weights per group and the type of scales. A block is a group's scale, its bias
    # and its codes: `formats.mlx` brings the three together, which MLX keeps in three tensors.
    MLX4_32_F32 = ("MLX 4-bit, groups of 32, float32 scales", 32, 24)
    MLX4_32_F16 = ("MLX 4-bit, groups of 32, float16 scales", 32, 20)
    MLX4_32_BF16 = ("MLX 4-bit, groups of 32, bfloat16 scales", 32, 20)
    MLX4_64_F32 = ("MLX 4-bit, groups of 64, float32 scales", 64, 40)
    MLX4_64_F16 = ("MLX 4-bit, groups of 64, float16 scales", 64, 36)
    MLX4_64_BF16 = ("MLX 4-bit, groups of 64, bfloat16 scales", 64, 36)
    MLX4_128_F32 = ("MLX 4-bit, groups of 128, float32 scales", 128, 72)
    MLX4_128_F16 = ("MLX 4-bit, groups of 128, float16 scales", 128, 68)
    MLX4_128_BF16 = ("MLX 4-bit, groups of 128, bfloat16 scales", 128, 68)
    MLX8_32_F32 = ("MLX 8-bit, groups of 32, float32 scales", 32, 40)
    MLX8_32_F16 = ("MLX 8-bit, groups of 32, float16 scales", 32, 36)
    MLX8_32_BF16 = ("MLX 8-bit, groups of 32, bfloat16 scales", 32, 36)
    MLX8_64_F32 = ("MLX 8-bit, groups of 64, float32 scales", 64, 72)
    MLX8_64_F16 = ("MLX 8-bit, groups of 64, float16 scales", 64, 68)
    MLX8_64_BF16 = ("MLX 8-bit, groups of 64, bfloat16 scales", 64, 68)
    MLX8_128_F32 = ("MLX 8-bit, groups of 128, float32 scales", 128, 136)
    MLX8_128_F16 = ("MLX 8-bit, groups of 128, float16 scales", 128, 132)
    MLX8_128_BF16 = ("MLX 8-bit, groups of 128, bfloat16 scales", 128, 132)

    def __init__(self, label: str, block_size: int, block_bytes: int) -> None:
        self.label = label
        self.block_size = block_size
        self.block_bytes = block_bytes

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of one row of `num_columns` weights, a multiple of `block_size`."""
        return num_columns // self.block_size * self.block_bytes


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its file holds it."""

    name: str
    weight_type: WeightType
    shape: tuple[int, ...]
    read: Callable[[], numpy.ndarray[Any, Any]] = field(compare=False, repr=False)
    """Gives uint8 [num_rows, row_bytes]: a view into the memory map, or a copy of its own with each call where the
    bytes lie otherwise in the file."""
    evict: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    """Gives back the memory that `read` took of the map; who looks at it again reads the file again."""


def check_count(name: str, value: object) -> int:
    """`value` if it is a non-negative integer (`True` is not one), else `OptionError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name} must be a non-negative integer, got {brief(value)}")
    return value


@dataclass(frozen=True, eq=False)
class Distribution:
    """The ids that may be drawn, int32 [m] ascending, and their probabilities, float64 [m]; m is at least 1.

    Probabilities are above zero and add up to 1. Raises `ValueError` for arrays of other types, or not of one length.
    """

    token_ids: numpy.ndarray[Any, numpy.dtype[numpy.int32]]
    probs: numpy.ndarray[Any, numpy.dtype[numpy.float64]]

    def __post_init__(self) -> None:
        for name, array, kind, size in (("token_ids", self.token_ids, "i", 4), ("probs", self.probs, "f", 8)):
            dtype = array.dtype
            if (dtype.kind, dtype.itemsize) != (kind, size) or array.ndim != 1 or not array.flags.c_contiguous:
                expected = f"contiguous {'int32' if kind == 'i' else 'float64'} [m]"
                raise ValueError(f"a distribution's {name} must be {expected}, got {dtype} {list(array.shape)}")
        if not 0 < len(self.token_ids) == len(self.probs):
            raise ValueError(f"a distribution of {len(self.token_ids)} ids has {len(self.probs)} probabilities")


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest ids with theirs, the likeliest first; all of raw logits."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SequenceView(Protocol):
    """What a drafter, a verifier or a policy may see of a sequence: read only."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far; the newest token is not in the target's cache yet."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def history(self) -> TokenHistory:
        """What penalties need to know of `token_ids`."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end this request's text: EOS, unless it is to be ignored, and the request's own."""

    @property
    def noise_key(self) -> int:
        """What all random draws for this answer come from: a hash of seed and number, or of random bits."""


@dataclass(frozen=True)
class DraftRequest:
    """Asks a drafter for at most `max_draft_tokens` guesses that continue `sequence`."""

    sequence: SequenceView
    max_draft_tokens: int
    sampling: SamplingParams
    min_confidence_product: float = 0.0
    """A drafter may stop once the product of its confidences falls below this."""


@dataclass(frozen=True)
class Draft:
    """A drafter's guess.

    `probs` has, for each token, the very distribution that it was drawn from, after the drafter's temperature and
    filters; None means one-hot. Who gives `probs` must submit each token it draws, whatever its probability.
    `confidences` are estimates that each token is right, never a distribution to sample against.
    `prefill_seconds` is the part of the proposal's time that went into reading the prompt for the first time.
    """

    token_ids: tuple[int, ...]
    probs: tuple[Distribution, ...] | None = None
    confidences: tuple[float, ...] | None = None
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class VerifyOutcome:
    """What the target said to a draft: an accepted prefix and exactly one more token."""

    num_accepted_tokens: int
    next_token_id: int
    next_kind: NextKind


@dataclass
class GenerationStats:
    """Counts and seconds of one request. Counts are of committed tokens; `decode_seconds` starts at the first token."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    """Decode steps: target calls after the prompt's last chunk."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    """From the request's start to its first token."""
    decode_seconds: float = 0.0
    """From the first token to the last, the draft model's prefill included."""
    end_to_end_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    """All time inside drafters' `propose`, `draft_prefill_seconds` included."""
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    cache_seconds: float = 0.0
    """Reserving, rewinding and telling drafters what was committed."""

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first over `decode_seconds`; 0 where there were none."""
        return (self.num_tokens - 1) / self.decode_seconds if self.num_tokens > 1 and self.decode_seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decode step, the target's own included; 0 where there was no decode step."""
        return (self.num_tokens - 1) / self.num_steps if self.num_steps else 0.0

    def as_dict(self) -> dict[str, float]:
        """All counts, seconds and the three derived rates, by name."""
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass(frozen=True)
class TokenOutput:
    """One output token: `text` is what it adds to the text, empty while a character or a possible stop string is
    incomplete."""

    token_id: int
    text: str
    kind: TokenKind
    logprobs: TokenLogprobs | None = None
    """Where the request asks for them."""


@dataclass(frozen=True)
class TextEvent:
    """The tokens of one step."""

    tokens: tuple[TokenOutput, ...]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


@dataclass(frozen=True)
class GenerationResult:
    """A whole answer. `token_ids` includes the token that ended it, `text` neither that nor a stop string."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each id, where the request asks for them."""


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a stream."""

    result: GenerationResult


Event = TextEvent | FinishEvent
