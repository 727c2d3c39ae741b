"""Reads `tokenizer.json`, the format of Hugging Face's `tokenizers`: byte-level BPE, and nothing on trust.

The library itself never sees the file: it runs regular expressions from it, which can hang, and allocates what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tokenizers

from pilotfish.errors import TokenizerError, UnsupportedModelError, brief
from pilotfish.tokenizer.split_rules import SPLIT_RULES, SplitRule
from pilotfish.tokenizer.values import read_value
from pilotfish.tokenizer.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, check_tokens, read_merges

MAX_TOKEN_ID = 2**20
"""The largest vocabularies have a quarter of it."""

_SOURCE = "tokenizer.json: "
_PATTERNS = {rule.pattern for rule in SPLIT_RULES.values()} - {None}


@dataclass(frozen=True)
class TokenizerJson:
    """What the file says, checked but for the merges, which may still name texts that there are not."""

    tokens: Sequence[str]
    token_types: Sequence[int]
    added_tokens: Sequence[tokenizers.AddedToken]
    rule: SplitRule
    merges: Sequence[tuple[str, str]]
    bos_token_id: int | None
    """The token that its post-processor puts in front of a prompt."""
    has_template: bool
    """Whether that post-processor says at all what stands around a prompt."""


def read_tokenizer_json(document: Mapping[str, object]) -> TokenizerJson:
    """The parts of a tokenizer in a `tokenizer.json`.

    Raises `UnsupportedModelError` for one that is not byte-level BPE, or does anything to a text that this version
    does not know, and `TokenizerError`, naming the key, for anything of a wrong type, out of range or contradictory.
    """
    model = _object(document, "model")
    rule = _read_rule(document, ignore_merges=_check_model(model))
    if _kind(document.get("decoder")) != "ByteLevel":
        _refuse("decoder", document.get("decoder"))
    vocab = _object(model, "vocab", "model.")
    ids = _check_ids(list(vocab.values()), "model.vocab")
    texts_by_id = dict(zip(ids, vocab, strict=True))
    types_by_id = dict.fromkeys(ids, NORMAL)
    added_tokens = _read_added_tokens(document, dict(zip(vocab, ids, strict=True)))
    for token_id, token, kind in added_tokens:
        texts_by_id[token_id] = token.content
        types_by_id[token_id] = kind
    if len(texts_by_id) != len(set(vocab).union(texts_by_id.values())):
        raise TokenizerError(f"{_SOURCE}the vocabulary gives two tokens the same id")
    if not texts_by_id:
        raise TokenizerError(f"{_SOURCE}model.vocab is empty")
    token_ids = range(max(texts_by_id) + 1)
    tokens = [texts_by_id.get(token_id, "") for token_id in token_ids]
    token_types = [types_by_id.get(token_id, UNUSED) for token_id in token_ids]
    check_tokens(tokens, token_types, f"{_SOURCE}the vocabulary")
    has_template, bos_token_id = _read_post_processor(document.get("post_processor"))
    if bos_token_id is not None and types_by_id.get(bos_token_id) is None:
        raise TokenizerError(f"{_SOURCE}post_processor starts prompts with the id {bos_token_id}, which is no token")
    return TokenizerJson(
        tokens,
        token_types,
        [token for _, token, _ in added_tokens],
        rule,
        read_merges(_required(model, "merges", list, "model."), f"{_SOURCE}model.merges"),
        bos_token_id,
        has_template,
    )


def _check_model(model: Mapping[str, object]) -> bool:
    """Whether the model ignores its merges for words that are in the vocabulary."""
    kind = model.get("type")
    if kind != "BPE":
        raise UnsupportedModelError(
            f"{_SOURCE}model.type is {brief(kind)}; this version reads byte-level BPE ('BPE') only"
        )
    if model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"{_SOURCE}model.byte_fallback is set: a SentencePiece vocabulary; this version reads byte-level BPE only"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedModelError(f"{_SOURCE}model.{key} is {brief(model[key])}, which this version does not do")
    return read_value(model, "ignore_merges", bool, f"{_SOURCE}model.") or False


def _read_rule(document: Mapping[str, object], *, ignore_merges: bool) -> SplitRule:
    normalizers = [_kind(step) for step in _steps(document.get("normalizer"), "normalizers")]
    if normalizers not in ([], ["NFC"]):
        _refuse("normalizer", document.get("normalizer"))
    steps = _steps(document.get("pre_tokenizer"), "pretokenizers")
    kinds = [_kind(step) for step in steps]
    if kinds not in (["ByteLevel"], ["Digits", "ByteLevel"], ["Split", "ByteLevel"]):
        _refuse("pre_tokenizer", document.get("pre_tokenizer"))
    pattern = None
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Split":
            pattern = _read_pattern(step)
        elif kind == "Digits" and step.get("individual_digits") is not True:
            _refuse("pre_tokenizer", step)
    byte_level = steps[-1]
    if byte_level.get("add_prefix_space") is not False or byte_level.get("use_regex", True) is not (pattern is None):
        _refuse("pre_tokenizer", byte_level)
    return SplitRule(
        pattern,
        individual_digits=kinds[0] == "Digits",
        nfc=bool(normalizers),
        ignore_merges=ignore_merges,
    )


def _read_pattern(step: Mapping[str, object]) -> str:
    match step:
        case {"pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            if pattern in _PATTERNS:
                return pattern
            raise UnsupportedModelError(
                f"{_SOURCE}pre_tokenizer splits text by a pattern that this version does not know: {brief(pattern)}"
            )
    _refuse("pre_tokenizer", step)


def _read_added_tokens(
    document: Mapping[str, object], vocab: Mapping[str, int]
) -> list[tuple[int, tokenizers.AddedToken, int]]:
    """Id, token and kind of each added token."""
    found: dict[str, tuple[int, tokenizers.AddedToken, int]] = {}
    next_id = len(vocab)
    for index, entry in enumerate(read_value(document, "added_tokens", list, _SOURCE) or []):
        key = f"added_tokens[{index}]"
        token_id, token, kind = _read_added_token(entry, key)
        text = token.content
        if text in found:
            raise TokenizerError(f"{_SOURCE}added_tokens lists {brief(text)} twice")
        # `tokenizers` ignores the id in the file, so that models are trained with the one that it gives.
        given_id = vocab.get(text, next_id)
        if token_id != given_id:
            raise TokenizerError(
                f"{_SOURCE}{key} has the id {token_id}, but the library that reads such files gives {brief(text)} "
                f"{given_id}"
            )
        found[text] = token_id, token, kind
        next_id = max(next_id, token_id + 1)
    return list(found.values())


def _read_added_token(entry: object, key: str) -> tuple[int, tokenizers.AddedToken, int]:
    if not isinstance(entry, dict):
        raise TokenizerError(f"{_SOURCE}{key} must be an object, not {brief(entry)}")
    prefix = f"{key}."
    (token_id,) = _check_ids([entry.get("id")], f"{prefix}id")
    text = _required(entry, "content", str, prefix)
    flags = {
        name: read_value(entry, name, bool, f"{_SOURCE}{prefix}") or False
        for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
    }
    if flags["single_word"]:
        raise UnsupportedModelError(
            f"{_SOURCE}{prefix}single_word is set for {brief(text)}, which this version does not do"
        )
    # Spelled as a control token, it is one: so llama.cpp's converter (convert_hf_to_gguf.py) has it, and with it the
    # GGUF file of the same model. Qwen2.5's <|fim_prefix|> is not marked as special.
    is_control = flags["special"] or (text.startswith("<|") and text.endswith("|>"))
    try:
        token = tokenizers.AddedToken(text, **flags)
    except UnicodeEncodeError:
        raise TokenizerError(f"{_SOURCE}{prefix}content is not Unicode") from None
    return token_id, token, CONTROL if is_control else USER_DEFINED


def _read_post_processor(value: object) -> tuple[bool, int | None]:
    """Whether there is a template for prompts, and the id that it puts in front of one."""
    templates = []
    for step in _steps(value, "processors"):
        kind = _kind(step)
        if kind == "TemplateProcessing":
            templates.append(step)
        elif kind != "ByteLevel":  # which is about offsets alone
            _refuse("post_processor", step)
    match templates:
        case []:
            return False, None
        case [{"single": [{"Sequence": _}]}]:
            return True, None
        case [
            {"single": [{"SpecialToken": {"id": str(name)}}, {"Sequence": _}], "special_tokens": dict(special_tokens)}
        ]:
            match special_tokens.get(name):
                case {"ids": [token_id]}:
                    return True, _check_ids([token_id], "post_processor.special_tokens")[0]
    _refuse("post_processor", templates[0])


def _check_ids(values: Sequence[object], key: str) -> list[int]:
    if set(map(type, values)) - {int}:
        raise TokenizerError(f"{_SOURCE}{key} must hold only int")
    ids: list[Any] = list(values)
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < MAX_TOKEN_ID:
            raise TokenizerError(f"{_SOURCE}{key} holds {token_id}, which is no token id")
    return ids


def _steps(value: object, key: str) -> list[Mapping[str, object]]:
    """The steps of a sequence, or the one step that stands alone; none for null."""
    if value is None:
        return []
    steps = value.get(key) if isinstance(value, dict) and value.get("type") == "Sequence" else [value]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        _refuse(key, value)
    return steps


def _kind(step: object) -> object:
    return step.get("type") if isinstance(step, dict) else None


def _required(values: Mapping[str, object], key: str, kind: type[Any], prefix: str = "") -> Any:
    value = read_value(values, key, kind, f"{_SOURCE}{prefix}")
    if value is None:
        raise TokenizerError(f"{_SOURCE}{prefix}{key} is missing")
    return value


def _object(values: Mapping[str, object], key: str, prefix: str = "") -> Mapping[str, object]:
    found: Mapping[str, object] = _required(values, key, dict, prefix)
    return found


def _refuse(key: str, value: object) -> NoReturn:
    raise UnsupportedModelError(f"{_SOURCE}{key} is not one that this version knows: {brief(value)}")
