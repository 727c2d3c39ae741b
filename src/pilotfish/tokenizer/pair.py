"""The pair contract: draft and target model must read the same token ids in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from pilotfish.errors import PairMismatchError, brief
from pilotfish.tokenizer.tokenizer import Tokenizer
from pilotfish.tokenizer.vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, Vocabulary

_KIND_NAMES = {NORMAL: "normal", CONTROL: "control", USER_DEFINED: "user-defined"}


@dataclass(frozen=True)
class TokenizerPair:
    """What `check_pair` found out about two tokenizers that fit together; nothing else makes one."""

    eos_token_ids: frozenset[int]
    """The ids that end a text, to both models."""
    draft_only_token_ids: frozenset[int]
    """Real ids of the draft vocabulary that the target lacks: never to be proposed."""
    target_only_token_ids: frozenset[int]
    """Real ids of the target that the draft lacks: a sequence holding one cannot be drafted by this model."""


def check_pair(draft_tokenizer: Tokenizer, tokenizer: Tokenizer, prompt: str | None = None) -> TokenizerPair:
    """Makes sure that a draft model's ids mean to the target what they mean to the draft model.

    Raises `PairMismatchError` for the first difference found in, in this order: the encodings of `prompt`, the EOS ids,
    the vocabularies. An id that both have must have one text and one kind; sizes are no evidence either way, and
    padding ids are no difference. `encode`'s `PromptError` passes through.
    """
    if prompt is not None:
        _check_prompt(draft_tokenizer, tokenizer, prompt)
    draft, target = draft_tokenizer.vocabulary, tokenizer.vocabulary
    if draft.eos_token_ids != target.eos_token_ids:
        raise PairMismatchError(
            "draft and target model end texts with different tokens: "
            f"{_describe_all(draft, draft.eos_token_ids)} and {_describe_all(target, target.eos_token_ids)}"
        )
    return _compare_vocabularies(draft, target)


def _check_prompt(draft_tokenizer: Tokenizer, tokenizer: Tokenizer, prompt: str) -> None:
    # With BOS: a model trained to see it in front is no match for one that was not.
    draft_ids = draft_tokenizer.encode(prompt, add_special_tokens=True)
    target_ids = tokenizer.encode(prompt, add_special_tokens=True)
    for position, (draft_id, target_id) in enumerate(zip_longest(draft_ids, target_ids)):
        if draft_id != target_id:
            raise PairMismatchError(
                f"draft and target model encode the prompt differently: token {position} is "
                f"{_describe(draft_tokenizer.vocabulary, draft_id)} to the draft model and "
                f"{_describe(tokenizer.vocabulary, target_id)} to the target model"
            )


def _compare_vocabularies(draft: Vocabulary, target: Vocabulary) -> TokenizerPair:
    draft_only: set[int] = set()
    target_only: set[int] = set()
    absent = ("", UNUSED)
    entries = zip_longest(
        zip(draft.tokens, draft.token_types, strict=True),
        zip(target.tokens, target.token_types, strict=True),
        fillvalue=absent,
    )
    for token_id, (draft_entry, target_entry) in enumerate(entries):
        if draft_entry == target_entry:
            continue
        (draft_text, draft_kind), (target_text, target_kind) = draft_entry, target_entry
        if draft_kind == UNUSED or target_kind == UNUSED:
            if draft_kind != UNUSED:
                draft_only.add(token_id)
            elif target_kind != UNUSED:
                target_only.add(token_id)
            continue
        difference = (
            f"{brief(draft_text)} to the draft model and {brief(target_text)} to the target model"
            if draft_text != target_text
            else f"{brief(draft_text)} to both models, but a {_KIND_NAMES[draft_kind]} token to the draft model "
            f"and a {_KIND_NAMES[target_kind]} one to the target model"
        )
        raise PairMismatchError(f"token id {token_id} is {difference}: this draft model cannot be used")
    return TokenizerPair(target.eos_token_ids, frozenset(draft_only), frozenset(target_only))


def _describe(vocabulary: Vocabulary, token_id: int | None) -> str:
    return (
        "nothing, the prompt has ended," if token_id is None else f"{token_id} ({brief(vocabulary.tokens[token_id])})"
    )


def _describe_all(vocabulary: Vocabulary, token_ids: frozenset[int]) -> str:
    return ", ".join(_describe(vocabulary, token_id) for token_id in sorted(token_ids)) or "none"
