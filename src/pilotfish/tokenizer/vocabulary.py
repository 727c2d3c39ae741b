"""What the ids of a tokenizer stand for, checked: the text and kind of each, the merges, and which ids end a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pilotfish.errors import TokenizerError, brief
from pilotfish.tokenizer.byte_level import CHAR_TO_BYTE

T = TypeVar("T")

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

END_OF_TURN_TEXTS = frozenset(
    {
        "</s>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
    }
)
"""Control tokens with which chat models end a turn or a text: files often list only one of those a model uses."""


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` and `token_types` by id. An id of type `UNUSED` is padding: the text that a file gives it is void."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    eos_token_ids: frozenset[int]
    """All ids that end a text."""
    bos_token_id: int | None

    def is_real(self, token_id: int) -> bool:
        """Whether `token_id` stands for anything: it is listed, and not as padding."""
        return 0 <= token_id < len(self.tokens) and self.token_types[token_id] != UNUSED

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for in a prompt, those of a control token too.

        Raises `TokenizerError` for padding and for ids outside the vocabulary.
        """
        if not self.is_real(token_id):
            raise TokenizerError(
                f"token id {token_id} stands for no text: the vocabulary has the ids 0 to {len(self.tokens) - 1}, "
                f"padding among them"
            )
        text = self.tokens[token_id]
        if self.token_types[token_id] == NORMAL:
            try:
                return bytes([CHAR_TO_BYTE[char] for char in text])
            except KeyError:
                pass  # not spelled in the byte-level alphabet: it can only mean itself
        return text.encode()

    def output_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to an answer: none for a control token. Raises as `token_bytes` does."""
        spelling = self.token_bytes(token_id)
        return b"" if self.token_types[token_id] == CONTROL else spelling


def usual_eos_token_ids(tokens: Sequence[str], token_types: Sequence[int]) -> frozenset[int]:
    """The ids of the control tokens among `END_OF_TURN_TEXTS`."""
    return frozenset(
        token_id
        for token_id, (text, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type == CONTROL and text in END_OF_TURN_TEXTS
    )


def check_tokens(tokens: Sequence[str], token_types: Sequence[int], source: str) -> None:
    """Raises `TokenizerError`, which names `source`, unless each id but padding has a text, and one of its own."""
    real = [text for text, token_type in zip(tokens, token_types, strict=True) if token_type != UNUSED]
    if len(set(real)) != len(real):
        raise TokenizerError(f"{source} lists {brief(_first_repeated(real))} twice")
    if "" in real:
        raise TokenizerError(f"{source} holds an empty token that is not marked as unused")
    try:
        "".join(real).encode()
    except UnicodeEncodeError:
        raise TokenizerError(f"{source} holds text that is not Unicode") from None


def read_merges(entries: Iterable[object], source: str) -> list[tuple[str, str]]:
    """The merges of a list, best first, each two texts: a string with a space between them, or a list of both.

    Raises `TokenizerError`, naming `source` and the first entry that is neither, or that is there twice.
    """
    merges: list[tuple[str, str]] = []
    for index, entry in enumerate(entries):
        pair = entry.split(" ", 2) if isinstance(entry, str) else entry
        left, right = pair if isinstance(pair, list) and len(pair) == 2 else ("", "")
        if not (isinstance(left, str) and isinstance(right, str) and left and right):
            raise TokenizerError(f"{source}[{index}] is {brief(entry)}, not two tokens with a space between them")
        merges.append((left, right))
    if len(set(merges)) != len(merges):
        repeated = " ".join(_first_repeated(merges))
        raise TokenizerError(f"{source} lists {brief(repeated)} twice, so its rank is not defined")
    return merges


def refuse_unknown_merges(merges: Sequence[tuple[str, str]], ids_by_text: Mapping[str, int], source: str) -> None:
    """Raises `TokenizerError` for the first merge that takes or makes a text which is not in the vocabulary."""
    for index, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            if text not in ids_by_text:
                raise TokenizerError(
                    f"{source}[{index}] is {brief(f'{left} {right}')}, but {brief(text)} is not in the vocabulary"
                )


def _first_repeated(values: Sequence[T]) -> T:
    return next(value for value, count in Counter(values).items() if count > 1)
