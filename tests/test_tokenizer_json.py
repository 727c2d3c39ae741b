"""The tokenizer of a folder: ids against `tokenizers` and GGUF, ends and starts of texts, templates, hostile files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, RECORDED, UNUSED, USER_DEFINED, settled_chars, texts
from tokenizer_folders import (
    ADDED,
    BOS,
    EOS,
    FAMILIES,
    FIM,
    THINK,
    Document,
    added_token,
    tiny_document,
    tiny_gguf,
    write_folder,
)
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from pilotfish.errors import (
    ChatTemplateError,
    FormatError,
    ModelNotFoundError,
    PilotfishError,
    PromptError,
    TokenizerError,
    UnsupportedModelError,
)
from pilotfish.tokenizer import Tokenizer, check_pair

MESSAGES = [{"role": "user", "content": "Hé"}]

texts_with_added_tokens = st.lists(
    st.text(settled_chars, max_size=8)
    | st.sampled_from([*ADDED, " ", "\n", "'s", "123456", "e\u0301", "the", "Hello, world!", "<|im_"]),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def from_document(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    folder = tmp_path_factory.mktemp("model")

    def make(document: Document, **files: Document | None) -> Tokenizer:
        return Tokenizer.from_folder(write_folder(folder, document, **files))

    return make


def oracle(document: Document) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def check_ids(tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    control = [i for i, kind in enumerate(tokenizer.vocabulary.token_types) if kind == CONTROL]
    kept = [token_id for token_id in ids if token_id not in control]
    assert tokenizer.decode(ids) == reference.decode(kept, skip_special_tokens=False)


# Ids


@cache
def tiny_pair(family: str, folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    document = tiny_document(family)
    return Tokenizer.from_folder(write_folder(folder / family, document)), oracle(document)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts_with_added_tokens)
def test_ids_are_those_of_tokenizers(family: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_ids(*tiny_pair(family, tmp_path_factory.getbasetemp()), text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merges_as_text", [False, True])
def test_both_spellings_of_merges(family: str, merges_as_text: bool, from_document: Callable[..., Tokenizer]) -> None:
    document = tiny_document(family, merges_as_text=merges_as_text)
    tokenizer, reference = from_document(document), oracle(document)
    num_ids = 0
    for case in RECORDED["smollm2-135m"]:
        check_ids(tokenizer, reference, case["text"])
        num_ids += len(tokenizer.encode(case["text"]))
    assert num_ids < sum(len(case["text"].encode()) for case in RECORDED["smollm2-135m"]) * 0.8  # merges took place


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}])
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_what_the_file_says_comes_before_what_its_family_does(
    family: str, normalizer: object, ignore_merges: bool, from_document: Callable[..., Tokenizer]
) -> None:
    document = tiny_document(family) | {"normalizer": normalizer}
    document["model"] |= {"ignore_merges": ignore_merges}
    document["model"]["merges"] = document["model"]["merges"][::2]
    kept = {"".join(merge) for merge in document["model"]["merges"]}
    document["model"]["merges"] = [m for m in document["model"]["merges"] if all(len(x) == 1 or x in kept for x in m)]
    tokenizer, reference = from_document(document), oracle(document)
    for case in RECORDED["smollm2-135m"]:
        check_ids(tokenizer, reference, case["text"])


@given(
    text=texts_with_added_tokens,
    flags=st.lists(st.fixed_dictionaries(dict.fromkeys(("lstrip", "rstrip", "normalized"), st.booleans())), min_size=4),
)
def test_added_tokens_do_what_their_flags_say(
    text: str, flags: list[dict[str, bool]], from_document: Callable[..., Tokenizer]
) -> None:
    document = tiny_document()
    added = [*ADDED[:3], "é\u0301"]
    document["added_tokens"] = [
        added_token(BOS + index, content, **own) for index, (content, own) in enumerate(zip(added, flags, strict=False))
    ]
    check_ids(from_document(document), oracle(document), text.replace("the", "e\u0301\u0301"))


def test_spaces_that_an_added_token_takes_in_are_no_lost_bytes(from_document: Callable[..., Tokenizer]) -> None:
    document = tiny_document("smollm")
    document["added_tokens"][3] |= {"lstrip": True}
    vocab = document["model"]["vocab"]
    vocab["nothing"] = vocab.pop("Ā")  # how byte 0 is spelled
    tokenizer = from_document(document)
    assert tokenizer.encode("a  <think>b") == oracle(document).encode("a  <think>b").ids
    with pytest.raises(PromptError, match=r"U\+0000"):
        tokenizer.encode("a  <think>\0")


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "family"), [("qwen2.5-coder-0.5b", "qwen2"), ("smollm2-135m", "smollm")])
def test_ids_of_a_real_vocabulary_are_those_of_its_gguf_file(
    name: str, family: str, real_metadata: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    metadata = real_metadata(name)
    gguf = Tokenizer.from_gguf_metadata(metadata)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [token_id for token_id, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED and (i not in added or family == "smollm")}
    written = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    for token_id in added:  # in their order, from the first free id on
        looks_special = tokens[token_id].startswith("<|")
        written.add_tokens([tokenizers.AddedToken(tokens[token_id], special=not looks_special and family == "smollm")])
    family_parts = {key: value for key, value in FAMILIES[family].items() if value is not None}
    document = json.loads(written.to_str()) | family_parts | {"decoder": {"type": "ByteLevel"}}
    folder = Tokenizer.from_folder(
        write_folder(tmp_path, document, tokenizer_config={}, generation_config=None, config={"eos_token_id": added[0]})
    )
    pair = check_pair(folder, gguf, "<|im_start|>user\nhé 12 😀<|im_end|>")
    assert pair == check_pair(gguf, folder)
    assert not pair.draft_only_token_ids | pair.target_only_token_ids
    assert folder.vocab_size == len(tokens) - len(gguf.padding_token_ids)
    for case in RECORDED[name]:
        assert folder.encode(case["text"]) == case["ids"]

    @given(text=texts)
    def same_ids(text: str) -> None:
        try:
            ids = gguf.encode(text)
        except PromptError:
            with pytest.raises(PromptError):
                folder.encode(text)
        else:
            assert folder.encode(text) == ids

    same_ids()


def test_ids_of_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    document = tiny_document()["model"]
    written = Qwen2Tokenizer(vocab=document["vocab"], merges=list(map(tuple, document["merges"])))
    written.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == {written.eos_token_id}
    for case in RECORDED["smollm2-135m"]:
        assert tokenizer.encode(case["text"], add_special_tokens=True) == written(case["text"])["input_ids"]


# A folder and a GGUF file of one model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_ids", [604, 640])
def test_a_folder_and_a_gguf_file_of_one_model_are_a_pair(
    family: str, num_ids: int, from_document: Callable[..., Tokenizer]
) -> None:
    folder, gguf = (
        from_document(tiny_document(family)),
        Tokenizer.from_gguf_metadata(tiny_gguf(family, num_ids=num_ids)),
    )
    assert folder.vocabulary.tokens == gguf.vocabulary.tokens[:604]
    assert folder.vocabulary.token_types == gguf.vocabulary.token_types[:604]
    assert folder.eos_token_ids == gguf.eos_token_ids == {EOS}
    assert folder.bos_token_id == gguf.bos_token_id == BOS
    for draft, target in ((folder, gguf), (gguf, folder)):
        pair = check_pair(draft, target, "a <think>é\u0301 12345<|im_end|>")
        assert not pair.draft_only_token_ids | pair.target_only_token_ids

    @given(text=texts_with_added_tokens)
    def same_ids(text: str) -> None:
        for add_special_tokens in (False, True):
            ids = folder.encode(text, add_special_tokens=add_special_tokens)
            assert ids == gguf.encode(text, add_special_tokens=add_special_tokens)
        assert folder.decode(ids) == gguf.decode(ids)

    same_ids()


def test_kinds_of_added_tokens(from_document: Callable[..., Tokenizer]) -> None:
    tokenizer = from_document(tiny_document())
    assert [tokenizer.vocabulary.token_types[i] for i in (BOS, EOS, FIM, THINK)] == [*[CONTROL] * 3, USER_DEFINED]
    assert tokenizer.decode([BOS, FIM, THINK, EOS]) == "<think>"


def test_ids_left_out_are_padding(from_document: Callable[..., Tokenizer]) -> None:
    document = tiny_document()
    document["added_tokens"][3]["id"] = 700
    document["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    tokenizer = from_document(document)
    assert tokenizer.vocab_size == 701
    assert tokenizer.padding_token_ids == set(range(603, 700))
    assert tokenizer.encode("a<think>") == oracle(document).encode("a<think>").ids
    for token_id in (603, 699, 701):
        assert tokenizer.token_text(token_id) is None
        with pytest.raises(TokenizerError, match="stands for no text"):
            tokenizer.decode([token_id])


# Ends and starts of texts


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {EOS}),
        ({"tokenizer_config": None, "generation_config": None, "config": None}, {EOS}),  # as a usual control token
        ({"config": {"eos_token_id": 5}}, {5, EOS}),
        ({"config": {"eos_token_id": [5, 6]}, "generation_config": {"eos_token_id": [6, 7]}}, {5, 6, 7, EOS}),
        ({"generation_config": {"eos_token_id": None}}, {EOS}),
        ({"tokenizer_config": {"eos_token": "<think>"}}, {THINK, EOS}),
        ({"tokenizer_config": {"eos_token": {"content": "<think>"}}}, {THINK, EOS}),
        ({"tokenizer_config": {"eos_token": None}}, {EOS}),
    ],
)
def test_eos_ids_are_those_of_all_files(
    files: dict[str, Any], expected: set[int], from_document: Callable[..., Tokenizer]
) -> None:
    assert from_document(tiny_document(), **files).eos_token_ids == expected


TEMPLATE = FAMILIES["llama-bpe"]["post_processor"]["processors"][1]
ONLY_TEXT = TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}]}


@pytest.mark.parametrize(
    ("post_processor", "config", "starts_with_bos"),
    [
        (TEMPLATE, {}, True),
        (TEMPLATE, {"add_bos_token": False}, True),
        (FAMILIES["llama-bpe"]["post_processor"], {"bos_token": None}, True),
        (ONLY_TEXT, {}, False),
        (ONLY_TEXT, {"add_bos_token": True}, False),
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        (FAMILIES["qwen2"]["post_processor"], {"add_bos_token": False}, False),
    ],
)
def test_prompts_start_with_bos_where_the_files_ask_for_it(
    post_processor: object, config: Document, starts_with_bos: bool, from_document: Callable[..., Tokenizer]
) -> None:
    document = tiny_document() | {"post_processor": post_processor}
    config = {"bos_token": "<s>"} | config
    tokenizer = from_document(document, tokenizer_config=config)
    text_ids = tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=True) == [BOS] * starts_with_bos + text_ids
    assert tokenizer.bos_token_id == BOS
    if post_processor is not None:
        assert tokenizer.encode("a", add_special_tokens=True) == oracle(document).encode("a").ids


def test_bos_of_the_post_processor_comes_first(from_document: Callable[..., Tokenizer]) -> None:
    document = tiny_document("llama-bpe")
    document["post_processor"]["processors"][1]["special_tokens"]["<s>"]["ids"] = [FIM]
    tokenizer = from_document(document)
    assert tokenizer.bos_token_id == FIM
    assert tokenizer.encode("a", add_special_tokens=True) == oracle(document).encode("a").ids


# Chat templates


def write_template(folder: Path, template: str | None) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        ("file é", "config", "file é"),
        ("file", None, "file"),
        ("file", 7, "file"),
        (None, "config", "config"),
        (None, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}], "default"),
        (None, [{"name": "tool_use", "template": "tools"}], None),
        (None, [], None),
        (None, None, None),
    ],
)
def test_where_the_chat_template_comes_from(
    file: str | None, config: object, expected: str | None, tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny_document(), tokenizer_config={"chat_template": config})
    write_template(tmp_path, file)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.has_chat_template == (expected is not None)
    assert tokenizer.encode("a")
    if expected is not None:
        assert tokenizer.render_chat(MESSAGES) == expected
    else:
        with pytest.raises(ChatTemplateError, match=r"no chat template \(chat_template.jinja, or chat_template in"):
            tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<think>{% if not enable_thinking %}\n</think>{% endif %}{% endif %}"
    )
    write_folder(tmp_path, tiny_document(family))
    write_template(tmp_path, template)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    messages = [{"role": "system", "content": " e\u0301 12345 "}, *MESSAGES]
    for enable_thinking in (False, True):
        text = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
        )
        assert tokenizer.render_chat(messages, enable_thinking=enable_thinking) == text
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_chat(messages, enable_thinking=enable_thinking) == ids
    assert reference("Hé 12")["input_ids"] == tokenizer.encode("Hé 12", add_special_tokens=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "chat_template.jinja is not UTF-8 text"), (b"a" * (2**20 + 1), "chat_template.jinja has more than")],
)
def test_a_template_file_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    (write_folder(tmp_path, tiny_document()) / "chat_template.jinja").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


# Hostile files


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_files_that_are_no_json(name: str, tmp_path: Path) -> None:
    (write_folder(tmp_path, tiny_document()) / name).write_text('{"a": NaN}')
    with pytest.raises(FormatError, match=name):
        Tokenizer.from_folder(tmp_path)


OPTIONAL = ["tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_file_that_is_there_counts(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, tiny_document()) / name
    for make, message in ((Path.mkdir, "it is not a file"), (lambda path: path.symlink_to("x"), "leads nowhere")):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(ModelNotFoundError, match=f"{name}: .*{message}"):
            Tokenizer.from_folder(tmp_path)
        if path.is_dir():
            path.rmdir()


def changed(document: Document, path: str, value: object) -> Document:
    """`document` with another value at a path such as `model.merges.0`; None takes it away."""
    document = copy.deepcopy(document)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner: Any = document
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return document


def sized(vocab: dict[str, int]) -> dict[str, int]:
    """`vocab` filled up to as many words as the tiny one has, so that its added tokens have their places."""
    return vocab | {f"word{index}": index for index in range(len(vocab), BOS)}


SENTENCE_PIECE = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace"}]}
SLOW = r"(a|a|a)*b"
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("model", None, TokenizerError, "model is missing"),
        ("model", [], TokenizerError, "model must be of type dict"),
        ("model.type", "Unigram", UnsupportedModelError, "model.type is 'Unigram'"),
        ("model.type", "WordPiece", UnsupportedModelError, "model.type is 'WordPiece'"),
        ("model.type", None, UnsupportedModelError, "model.type is None"),
        ("model.type", DEEP, UnsupportedModelError, "model.type is "),
        ("model.byte_fallback", True, UnsupportedModelError, "model.byte_fallback .* SentencePiece"),
        ("model.dropout", 0.1, UnsupportedModelError, "model.dropout is 0.1"),
        ("model.continuing_subword_prefix", "##", UnsupportedModelError, "model.continuing_subword_prefix is '##'"),
        ("model.end_of_word_suffix", "</w>", UnsupportedModelError, "model.end_of_word_suffix is '</w>'"),
        ("model.ignore_merges", 1, TokenizerError, "model.ignore_merges must be of type bool"),
        ("model.vocab", None, TokenizerError, "model.vocab is missing"),
        ("model.vocab", {"a": True}, TokenizerError, "model.vocab must hold only int"),
        ("model.vocab", {"a": 1.0}, TokenizerError, "model.vocab must hold only int"),
        ("model.vocab", {"a": -1}, TokenizerError, "model.vocab holds -1"),
        ("model.vocab", {"a": 2**20}, TokenizerError, "model.vocab holds 1048576"),
        ("model.vocab", {"a": 10**100}, TokenizerError, "model.vocab holds 1000"),
        ("model.vocab", sized({"a": 1, "b": 1}), TokenizerError, "the vocabulary gives two tokens the same id"),
        ("model.vocab", sized({"": 0}), TokenizerError, "holds an empty token"),
        ("model.vocab", sized({"\ud800": 0}), TokenizerError, "not Unicode"),
        ("model.vocab", {"<s>": 1}, TokenizerError, r"added_tokens\[0\] has the id 600, .* gives '<s>' 1"),
        ("model.vocab", {"x": BOS}, TokenizerError, r"added_tokens\[0\] has the id 600, .* gives '<s>' 1"),
        ("model.vocab.a", 5, TokenizerError, "the vocabulary gives two tokens the same id"),
        ("model.merges", None, TokenizerError, "model.merges is missing"),
        ("model.merges", {}, TokenizerError, "model.merges must be of type list"),
        ("model.merges.0", 1, TokenizerError, r"model.merges\[0\] is 1, not two"),
        ("model.merges.0", "ab", TokenizerError, r"model.merges\[0\] is 'ab', not two"),
        ("model.merges.0", ["a"], TokenizerError, r"model.merges\[0\] is \['a'\], not two"),
        ("model.merges.0", ["a", ""], TokenizerError, r"model.merges\[0\] is \['a', ''\], not two"),
        ("model.merges.0", ["a", 1], TokenizerError, r"model.merges\[0\] is \['a', 1\], not two"),
        ("model.merges.0", DEEP, TokenizerError, r"model.merges\[0\] is "),
        ("model.merges.0", ["\ud800", "a"], TokenizerError, r"model.merges\[0\].*not in the vocabulary"),
        ("model.merges.0", ["zz", "zzz"], TokenizerError, r"model.merges\[0\] is 'zz zzz', but 'zz' is not in the"),
        ("model.merges", ["a b", ["a", "b"]], TokenizerError, "model.merges lists 'a b' twice"),
        ("added_tokens", {}, TokenizerError, "added_tokens must be of type list"),
        ("added_tokens.0", "x", TokenizerError, r"added_tokens\[0\] must be an object, not 'x'"),
        ("added_tokens.0.id", None, TokenizerError, r"added_tokens\[0\].id must hold only int"),
        ("added_tokens.0.id", 2**20, TokenizerError, r"added_tokens\[0\].id holds 1048576"),
        ("added_tokens.1.id", BOS, TokenizerError, r"added_tokens\[1\] has the id 600, .* gives '<\|im_end\|>' 601"),
        ("added_tokens.3.id", 700, TokenizerError, r"added_tokens\[3\] has the id 700, .* gives '<think>' 603"),
        ("added_tokens.0.content", 7, TokenizerError, r"added_tokens\[0\].content must be of type str"),
        ("added_tokens.0.content", None, TokenizerError, r"added_tokens\[0\].content is missing"),
        ("added_tokens.0.content", "", TokenizerError, "holds an empty token"),
        ("added_tokens.0.content", "\ud800", TokenizerError, "not Unicode"),
        ("added_tokens.3.content", "<s>", TokenizerError, "added_tokens lists '<s>' twice"),
        ("added_tokens.0.special", 1, TokenizerError, r"added_tokens\[0\].special must be of type bool"),
        ("added_tokens.0.single_word", True, UnsupportedModelError, r"added_tokens\[0\].single_word is set for '<s>'"),
        ("normalizer", {"type": "NFKC"}, UnsupportedModelError, "normalizer is not one .* 'NFKC'"),
        ("normalizer", SENTENCE_PIECE, UnsupportedModelError, "normalizer is not one .* 'Prepend'"),
        ("normalizer", "NFC", UnsupportedModelError, "normalizers is not one"),
        ("pre_tokenizer", None, UnsupportedModelError, "pre_tokenizer is not one .* None"),
        ("pre_tokenizer", {"type": "Whitespace"}, UnsupportedModelError, "pre_tokenizer is not one .* 'Whitespace'"),
        ("pre_tokenizer", {"type": "Metaspace"}, UnsupportedModelError, "pre_tokenizer is not one .* 'Metaspace'"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": 7}, UnsupportedModelError, "pretokenizers is not one"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": DEEP}, UnsupportedModelError, "pretokenizers is not"),
        ("pre_tokenizer.pretokenizers.0.pattern.Regex", SLOW, UnsupportedModelError, r"does not know: .*\|a\)\*b"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"String": " "}, UnsupportedModelError, "pre_tokenizer is not one"),
        ("pre_tokenizer.pretokenizers.0.behavior", "Removed", UnsupportedModelError, "pre_tokenizer is not one"),
        ("pre_tokenizer.pretokenizers.0.invert", True, UnsupportedModelError, "pre_tokenizer is not one"),
        ("pre_tokenizer.pretokenizers.1.use_regex", True, UnsupportedModelError, "pre_tokenizer is not one"),
        ("pre_tokenizer.pretokenizers.1.add_prefix_space", True, UnsupportedModelError, "pre_tokenizer is not one"),
        ("decoder", {"type": "Metaspace"}, UnsupportedModelError, "decoder is not one .* 'Metaspace'"),
        ("decoder", None, UnsupportedModelError, "decoder is not one"),
        ("post_processor", {"type": "RobertaProcessing"}, UnsupportedModelError, "post_processor is not one"),
        ("post_processor", TEMPLATE | {"special_tokens": {}}, UnsupportedModelError, "post_processor is not one"),
        ("post_processor", TEMPLATE | {"single": TEMPLATE["pair"]}, UnsupportedModelError, "post_processor is not"),
        ("post_processor", TEMPLATE | {"single": TEMPLATE["single"][::-1]}, UnsupportedModelError, "post_processor"),
        (
            "post_processor",
            TEMPLATE | {"special_tokens": {"<s>": {"ids": [9999]}}},
            TokenizerError,
            "post_processor starts prompts with the id 9999",
        ),
    ],
)
def test_hostile_tokenizer_json(
    path: str, value: object, error: type[PilotfishError], message: str, from_document: Callable[..., Tokenizer]
) -> None:
    with pytest.raises(error, match=f"tokenizer.json.*{message}") as caught:
        from_document(changed(tiny_document(), path, value))
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", {"eos_token": 7}, "tokenizer_config.json: eos_token must be of type str"),
        ("tokenizer_config", {"eos_token": {"content": []}}, "tokenizer_config.json: eos_token must be of type str"),
        ("tokenizer_config", {"eos_token": "<no>"}, "tokenizer_config.json: eos_token '<no>' is not in the vocabulary"),
        ("tokenizer_config", {"bos_token": "<no>"}, "tokenizer_config.json: bos_token '<no>' is not in the vocabulary"),
        ("tokenizer_config", {"add_bos_token": 1}, "tokenizer_config.json: add_bos_token must be of type bool"),
        ("tokenizer_config", {"chat_template": 7}, "tokenizer_config.json: chat_template must be of type str"),
        (
            "tokenizer_config",
            {"chat_template": [{"name": "default", "template": 7}]},
            "tokenizer_config.json: chat_template must be of type str",
        ),
        ("config", {"eos_token_id": 604}, "config.json: eos_token_id holds 604, which is no token id"),
        ("config", {"eos_token_id": [EOS, -1]}, "config.json: eos_token_id holds -1"),
        ("config", {"eos_token_id": True}, "config.json: eos_token_id holds True"),
        ("config", {"bos_token_id": "1"}, "config.json: bos_token_id holds '1'"),
        ("generation_config", {"eos_token_id": [[1]]}, r"generation_config.json: eos_token_id holds \[1\]"),
    ],
)
def test_hostile_configurations(
    name: str, content: Document, message: str, from_document: Callable[..., Tokenizer]
) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_document(tiny_document(), **{name: content})


def test_no_bos_to_start_prompts_with(from_document: Callable[..., Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="bos_token is missing"):
        from_document(tiny_document(), tokenizer_config={"add_bos_token": True}, config={}, generation_config=None)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(["BPE", "ByteLevel", "Sequence", "TemplateProcessing", "Split", "NFC", "a b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "id", "content", "single", "processors", "a"]) | st.text(max_size=2),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
PATHS = [
    "version", "added_tokens", "added_tokens.0", "added_tokens.3.id", "added_tokens.1.content",
    "added_tokens.2.special", "normalizer", "normalizer.type", "pre_tokenizer", "pre_tokenizer.pretokenizers",
    "pre_tokenizer.pretokenizers.0", "pre_tokenizer.pretokenizers.0.pattern", "pre_tokenizer.pretokenizers.1",
    "post_processor", "decoder", "post_processor.processors", "post_processor.processors.1.single",
    "post_processor.processors.1.special_tokens", "post_processor.processors.1.special_tokens.<s>",
    "post_processor.processors.1.single.0", "model", "model.vocab", "model.vocab.a", "model.merges", "model.merges.5",
    "model.type", "model.unk_token",
]  # fmt: skip


@given(changes=st.dictionaries(st.sampled_from(PATHS), json_values, min_size=1, max_size=3))
def test_a_file_of_any_shape_gives_a_tokenizer_or_our_error(
    changes: dict[str, object], from_document: Callable[..., Tokenizer]
) -> None:
    document = tiny_document("llama-bpe") | {"normalizer": {"type": "NFC"}}
    for path, value in changes.items():
        try:
            document = changed(document, path, value)
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change has taken its place
    try:
        tokenizer = from_document(document)
    except (TokenizerError, UnsupportedModelError):
        return
    assert b"".join(map(tokenizer.vocabulary.token_bytes, tokenizer.encode("b c"))) == b"b c"


@given(
    files=st.dictionaries(
        st.sampled_from(["tokenizer_config", "config", "generation_config"]),
        st.dictionaries(
            st.sampled_from(
                ["bos_token", "eos_token", "bos_token_id", "eos_token_id", "chat_template", "add_bos_token"]
            ),
            json_values,
        ),
        min_size=1,
    )
)
def test_configurations_of_any_shape_give_a_tokenizer_or_our_error(
    files: dict[str, Document], from_document: Callable[..., Tokenizer]
) -> None:
    try:
        tokenizer = from_document(tiny_document(), **files)
    except TokenizerError:
        return
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
