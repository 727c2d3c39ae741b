"""The tokenizer's part of a GGUF header, checked: which ids there are, what each means, and which ones end a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pilotfish.errors import TokenizerError, UnsupportedModelError
from pilotfish.tokenizer.byte_level import CHAR_TO_BYTE

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

_MERGES = "tokenizer.ggml.merges"

T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` and `token_types` by id. An id of type `UNUSED` is padding: the text that a file gives it is void."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    eos_token_id: int | None
    """The one EOS the file names as such; `eos_token_ids` holds all ids that end a text."""
    eos_token_ids: frozenset[int]
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


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in a GGUF header (keys `tokenizer.ggml.*` of the GGUF format description).

    Raises `UnsupportedModelError` for a vocabulary that is not byte-level BPE, and `TokenizerError`, naming the key,
    for anything missing, of a wrong type, out of range, or contradicting the rest.
    """
    model = read_value(metadata, "tokenizer.ggml.model", str)
    if model is None:
        raise TokenizerError("tokenizer.ggml.model is missing: the file holds no tokenizer")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {model!r}; this version reads byte-level BPE ('gpt2') only"
        )
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    token_types = _read_list(metadata, "tokenizer.ggml.token_type", int)
    _check_tokens(tokens, token_types)
    # An unknown-token is a mark that no text decodes to, which is all that `CONTROL` means here.
    token_types = [CONTROL if token_type == UNKNOWN else token_type for token_type in token_types]

    def read_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = read_value(metadata, key, int)
        if token_id is not None and not (0 <= token_id < len(tokens) and token_types[token_id] != UNUSED):
            raise TokenizerError(f"{key} is {token_id}, which is no token of this vocabulary of {len(tokens)} ids")
        return token_id

    eos_token_id = read_id("eos")
    named = (eos_token_id, read_id("eot"), read_id("eom"))
    usual = {
        token_id
        for token_id, (text, token_type) in enumerate(zip(tokens, token_types, strict=True))
        if token_type == CONTROL and text in END_OF_TURN_TEXTS
    }
    return Vocabulary(
        tokens=tuple(tokens),
        token_types=tuple(token_types),
        eos_token_id=eos_token_id,
        eos_token_ids=frozenset(token_id for token_id in named if token_id is not None) | usual,
        bos_token_id=read_id("bos"),
    )


def read_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """The merges of a GGUF header, best first, each two texts. Raises `TokenizerError` naming the first that is not."""
    lines = _read_list(metadata, _MERGES, str, may_be_empty=True)
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise TokenizerError(f"{_MERGES}[{index}] is {line!r}, not two tokens with a space between them")
        merges.append((left, right))
    if len(set(merges)) != len(merges):
        raise TokenizerError(f"{_MERGES} lists {_first_repeated(lines)!r} twice, so its rank is not defined")
    return merges


def refuse_unknown_merges(merges: Sequence[tuple[str, str]], ids_by_text: Mapping[str, int]) -> None:
    """Raises `TokenizerError` for the first merge that takes or makes a text which is not in the vocabulary."""
    for index, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            if text not in ids_by_text:
                raise TokenizerError(
                    f"{_MERGES}[{index}] is {f'{left} {right}'!r}, but {text!r} is not in the vocabulary"
                )


def read_value(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    """The value of `key`, None where the file has no such key. Raises `TokenizerError` for a value of another type."""
    value = metadata.get(key)
    if value is None:
        return None
    # Not isinstance: it would let True pass for the id 1.
    if type(value) is not kind:
        raise TokenizerError(f"{key} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _read_list(metadata: Mapping[str, object], key: str, kind: type[T], *, may_be_empty: bool = False) -> list[T]:
    values = read_value(metadata, key, list)
    if values is None:
        raise TokenizerError(f"{key} is missing")
    if not values and not may_be_empty:
        raise TokenizerError(f"{key} is empty")
    others = set(map(type, values)) - {kind}
    if others:
        raise TokenizerError(f"{key} must hold only {kind.__name__}, not {min(other.__name__ for other in others)}")
    return values


def _check_tokens(tokens: Sequence[str], token_types: Sequence[int]) -> None:
    if len(token_types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(token_types)} entries, tokenizer.ggml.tokens has {len(tokens)}"
        )
    strange = set(token_types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
    if strange:
        raise TokenizerError(f"tokenizer.ggml.token_type holds {min(strange)}, which byte-level BPE does not have")
    real = [text for text, token_type in zip(tokens, token_types, strict=True) if token_type != UNUSED]
    if len(set(real)) != len(real):
        raise TokenizerError(f"tokenizer.ggml.tokens lists {_first_repeated(real)!r} twice")
    if "" in real:
        raise TokenizerError("tokenizer.ggml.tokens holds an empty token that is not marked as unused")
    try:
        "".join(real).encode()
    except UnicodeEncodeError:
        raise TokenizerError("tokenizer.ggml.tokens holds text that is not Unicode") from None


def _first_repeated(values: Sequence[str]) -> str:
    return next(value for value, count in Counter(values).items() if count > 1)
