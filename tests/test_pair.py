"""The pair contract: what makes a draft and a target tokenizer fit, and which difference is named first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.errors import PairMismatchError, PromptError
from pilotfish.formats.gguf import GGUFFile
from pilotfish.tokenizer import Tokenizer, TokenizerPair, check_pair

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
WORDS = ["a", "b", "c", "1", "2", "11", "Ġ", "<s>", "<|im_end|>", "<|eot_id|>", "[PAD10]", "[PAD11]"]
TYPES = [NORMAL] * 7 + [CONTROL] * 3 + [UNUSED] * 2
BOS, EOS, EOT = 7, 8, 9


def tiny(
    tokens: dict[int, str] | None = None, types: dict[int, int] | None = None, size: int = len(WORDS), **values: object
) -> Tokenizer:
    """`WORDS` cut to `size`, with single entries changed."""
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [(tokens or {}).get(i, text) for i, text in enumerate(WORDS)][:size],
        "tokenizer.ggml.token_type": [(types or {}).get(i, kind) for i, kind in enumerate(TYPES)][:size],
        "tokenizer.ggml.merges": ["1 1"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    return Tokenizer.from_gguf_metadata(metadata | {f"tokenizer.ggml.{key}": value for key, value in values.items()})


def only(
    *, draft: set[int] | None = None, target: set[int] | None = None, eos_token_ids: tuple[int, ...] = (EOS, EOT)
) -> TokenizerPair:
    return TokenizerPair(
        eos_token_ids=frozenset(eos_token_ids),
        draft_only_token_ids=frozenset(draft or ()),
        target_only_token_ids=frozenset(target or ()),
    )


def test_equal_tokenizers_fit() -> None:
    assert check_pair(tiny(), tiny(), "a b<|im_end|>") == only()
    assert check_pair(tiny(), tiny()) == only()


@pytest.mark.real_model
def test_real_pair_fits(model_path: Callable[[str], Path]) -> None:
    draft, target = (
        Tokenizer.from_gguf_metadata(GGUFFile.open(model_path(f"qwen2.5-coder-{size}")).metadata)
        for size in ("0.5b", "1.5b")
    )
    assert check_pair(draft, target, "<|im_start|>user\nhé 12 😀<|im_end|>") == only(eos_token_ids=(151643, 151645))


@pytest.mark.real_model
def test_real_strangers_do_not_fit(model_path: Callable[[str], Path]) -> None:
    smollm, qwen = (
        Tokenizer.from_gguf_metadata(GGUFFile.open(model_path(name)).metadata)
        for name in ("smollm2-135m", "qwen2.5-coder-0.5b")
    )
    with pytest.raises(PairMismatchError, match=r"encode the prompt differently: token 0 is 28120 .* 14990 "):
        check_pair(smollm, qwen, "hello")
    with pytest.raises(PairMismatchError, match="end texts with different tokens"):
        check_pair(smollm, qwen)


# The prompt


def test_different_pre_tokenizers_differ_by_prompt() -> None:
    draft, target = tiny(), tiny(pre="llama-bpe", add_bos_token=False)
    assert check_pair(draft, target, "a1") == only()
    with pytest.raises(
        PairMismatchError, match=r"token 1 is 3 \('1'\) to the draft model and 5 \('11'\) to the target model"
    ):
        check_pair(draft, target, "a11")


def test_a_prompt_that_ends_early() -> None:
    splits, joins = tiny(), tiny(tokens={10: "bc"}, types={10: USER_DEFINED})
    with pytest.raises(PairMismatchError, match=r"token 1 is 1 \('b'\) to the draft model and 10 \('bc'\)"):
        check_pair(splits, joins, "abc")
    with pytest.raises(PairMismatchError, match=r"token 1 is 2 \('c'\) to the draft model and nothing"):
        check_pair(tiny(), tiny(tokens={1: "bc"}, types={1: USER_DEFINED}), "bc")


def test_one_model_wants_bos_in_front() -> None:
    with pytest.raises(PairMismatchError, match=r"token 0 is 7 \('<s>'\) .* 0 \('a'\)"):
        check_pair(tiny(add_bos_token=True), tiny(), "a")


def test_a_prompt_that_cannot_be_encoded() -> None:
    with pytest.raises(PromptError):
        check_pair(tiny(), tiny(), "z")


# EOS


@pytest.mark.parametrize("values", [{"eos_token_id": 0}, {"eot_token_id": 0}])
def test_different_eos(values: dict[str, object]) -> None:
    with pytest.raises(PairMismatchError, match=r"end texts with different tokens: 8 \('<\|im_end\|>'\), 9 .* and 0 "):
        check_pair(tiny(), tiny(**values))


def test_eos_comes_before_vocabularies_and_after_the_prompt() -> None:
    draft, target = tiny(), tiny(tokens={0: "b", 1: "a"}, eom_token_id=2)
    with pytest.raises(PairMismatchError, match="encode the prompt differently"):
        check_pair(draft, target, "a")
    with pytest.raises(PairMismatchError, match="end texts"):
        check_pair(draft, target, "c")


# Vocabularies


def test_equal_size_is_no_evidence() -> None:
    with pytest.raises(PairMismatchError, match="token id 0 is 'a' to the draft model and 'b' to the target model"):
        check_pair(tiny(), tiny(tokens={0: "b", 1: "a"}), "c")


def test_an_id_that_both_have_must_be_of_one_kind() -> None:
    with pytest.raises(PairMismatchError, match="token id 7 is '<s>' to both models, but a control token to the draft"):
        check_pair(tiny(), tiny(types={7: NORMAL}), "a")
    with pytest.raises(PairMismatchError, match="a normal token to the draft model and a user-defined one"):
        check_pair(tiny(), tiny(types={2: USER_DEFINED}), "a")


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ({}, {"size": 11}, only()),
        ({}, {"size": 10}, only()),
        ({"size": 10}, {}, only()),
        ({}, {"tokens": {10: "<unused>", 11: ""}}, only()),
        ({"types": {10: NORMAL, 11: CONTROL}}, {}, only(draft={10, 11})),
        ({"types": {10: NORMAL, 11: CONTROL}}, {"size": 10}, only(draft={10, 11})),
        ({"types": {10: NORMAL}}, {"size": 11}, only(draft={10})),
        ({}, {"types": {10: USER_DEFINED, 11: NORMAL}}, only(target={10, 11})),
        ({"size": 10}, {"types": {11: NORMAL}}, only(target={11})),
        ({"types": {10: NORMAL}}, {"types": {11: NORMAL}}, only(draft={10}, target={11})),
        ({"types": {2: UNUSED}}, {}, only(target={2})),
    ],
)
def test_padding_is_no_difference_and_tokens_of_one_side_are_reported(
    draft: dict[str, object], target: dict[str, object], expected: TokenizerPair
) -> None:
    assert check_pair(tiny(**draft), tiny(**target), "a b") == expected


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        check_pair(tiny(), tiny()).draft_only_token_ids = frozenset()
