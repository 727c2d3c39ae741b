"""The tokenizer in a GGUF header (keys `tokenizer.ggml.*` and `tokenizer.chat_template` of the format description)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import tokenizers

from pilotfish.errors import TokenizerError, UnsupportedModelError, brief
from pilotfish.tokenizer.parts import TokenizerParts
from pilotfish.tokenizer.split_rules import find_split_rule
from pilotfish.tokenizer.values import read_value
from pilotfish.tokenizer.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    check_tokens,
    read_merges,
    usual_eos_token_ids,
)

_MERGES = "tokenizer.ggml.merges"
_TEMPLATE = "tokenizer.chat_template"

T = TypeVar("T")


def read_gguf_metadata(metadata: Mapping[str, object]) -> TokenizerParts:
    """The tokenizer's parts in a GGUF header.

    Raises `UnsupportedModelError` for a vocabulary that is not byte-level BPE or a pre-tokenizer that this version does
    not know, and `TokenizerError`, naming the key, for anything missing, of a wrong type, out of range, or
    contradicting the rest.
    """
    vocabulary, eos_token_id = _read_vocabulary(metadata)
    rule = find_split_rule(read_value(metadata, "tokenizer.ggml.pre", str))
    add_bos_token = read_value(metadata, "tokenizer.ggml.add_bos_token", bool)
    if add_bos_token is None:
        add_bos_token = rule.add_bos_token
    if add_bos_token and vocabulary.bos_token_id is None:
        raise TokenizerError("tokenizer.ggml.bos_token_id is missing, but prompts are to start with that token")

    def text_or_empty(token_id: int | None) -> str:
        return "" if token_id is None else vocabulary.tokens[token_id]

    return TokenizerParts(
        vocabulary=vocabulary,
        rule=rule,
        merges=read_merges(_read_list(metadata, _MERGES, str), _MERGES),
        merges_source=_MERGES,
        added_tokens=[
            tokenizers.AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ],
        add_bos_token=add_bos_token,
        chat_template=read_value(metadata, _TEMPLATE, str),
        chat_template_source=_TEMPLATE,
        bos_token=text_or_empty(vocabulary.bos_token_id),
        eos_token=text_or_empty(eos_token_id),
    )


def _read_vocabulary(metadata: Mapping[str, object]) -> tuple[Vocabulary, int | None]:
    model = read_value(metadata, "tokenizer.ggml.model", str)
    if model is None:
        raise TokenizerError("tokenizer.ggml.model is missing: the file holds no tokenizer")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {brief(model)}; this version reads byte-level BPE ('gpt2') only"
        )
    tokens = _read_list(metadata, "tokenizer.ggml.tokens", str)
    token_types = _read_list(metadata, "tokenizer.ggml.token_type", int)
    _check_token_types(tokens, token_types)
    check_tokens(tokens, token_types, "tokenizer.ggml.tokens")
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
    vocabulary = Vocabulary(
        tokens=tuple(tokens),
        token_types=tuple(token_types),
        eos_token_ids=usual_eos_token_ids(tokens, token_types)
        | {token_id for token_id in named if token_id is not None},
        bos_token_id=read_id("bos"),
    )
    return vocabulary, eos_token_id


def _read_list(metadata: Mapping[str, object], key: str, kind: type[T]) -> list[T]:
    values = read_value(metadata, key, list)
    if values is None:
        raise TokenizerError(f"{key} is missing")
    if not values and key != _MERGES:
        raise TokenizerError(f"{key} is empty")
    others = set(map(type, values)) - {kind}
    if others:
        raise TokenizerError(f"{key} must hold only {kind.__name__}, not {min(other.__name__ for other in others)}")
    return values


def _check_token_types(tokens: Sequence[str], token_types: Sequence[int]) -> None:
    if len(token_types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(token_types)} entries, tokenizer.ggml.tokens has {len(tokens)}"
        )
    strange = set(token_types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
    if strange:
        raise TokenizerError(f"tokenizer.ggml.token_type holds {min(strange)}, which byte-level BPE does not have")
