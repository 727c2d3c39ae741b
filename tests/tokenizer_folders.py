"""Tokenizers in the files of Hugging Face's libraries, as real repositories spell them, and as GGUF metadata."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tiny_tokenizers import CONTROL, NORMAL, RECORDED, UNUSED, USER_DEFINED

from pilotfish.tokenizer.byte_level import BYTE_TO_CHAR

Document = dict[str, Any]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(**changes: Any) -> Document:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | changes


def _split(pattern: str) -> Document:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


FAMILIES: dict[str, Document] = {
    "qwen2": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _split(_WORDS.format("")),
        "post_processor": _byte_level(add_prefix_space=False, trim_offsets=False, use_regex=False),
    },
    "llama-bpe": {
        "normalizer": None,
        "pre_tokenizer": _split(_WORDS.format("{1,3}")),
        "post_processor": {
            "type": "Sequence",
            "processors": [
                _byte_level(add_prefix_space=True, trim_offsets=False),
                {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [
                        {"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"SpecialToken": {"id": "<s>", "type_id": 1}},
                        {"Sequence": {"id": "B", "type_id": 1}},
                    ],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [600], "tokens": ["<s>"]}},
                },
            ],
        },
    },
    "smollm": {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level()],
        },
        "post_processor": None,
    },
}
"""What differs, by the name that GGUF has for it (`tokenizer.ggml.pre`)."""

NUM_WORDS = 600
BOS, EOS, FIM, THINK = range(NUM_WORDS, NUM_WORDS + 4)
ADDED = ("<s>", "<|im_end|>", "<|fim_prefix|>", "<think>")
SPECIAL_TOKENS = frozenset({"<s>", "<|im_end|>"})
"""Those that `tokenizer.json` marks as special; for a GGUF file <|fim_prefix|> looks like one, too."""


def added_token(token_id: int, text: str, **flags: bool) -> Document:
    entry = {"id": token_id, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
    return entry | {"normalized": False, "special": text in SPECIAL_TOKENS} | flags


@cache
def _trained(family: str) -> Document:
    tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps(FAMILIES[family] | {"model": {"type": "BPE", "vocab": {}, "merges": []}})
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=NUM_WORDS, initial_alphabet=list(BYTE_TO_CHAR.values()), show_progress=False
    )
    tokenizer.train_from_iterator([case["text"] for case in RECORDED["smollm2-135m"]] * 2, trainer)
    model: Document = json.loads(tokenizer.to_str())["model"]
    assert len(model["vocab"]) == NUM_WORDS
    return model


def tiny_document(family: str = "qwen2", *, merges_as_text: bool = False) -> Document:
    """A `tokenizer.json` of 600 words, trained by `tokenizers`, and the four tokens `ADDED`."""
    model = copy.deepcopy(_trained(family))
    if merges_as_text:
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    model |= {"ignore_merges": family == "llama-bpe", "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(BOS + index, text) for index, text in enumerate(ADDED)],
        **copy.deepcopy(FAMILIES[family]),
        "decoder": _byte_level(),
        "model": model,
    }


def tiny_gguf(family: str = "qwen2", *, num_ids: int = NUM_WORDS + len(ADDED)) -> dict[str, object]:
    """The metadata of a GGUF file that was made from that folder, with padding up to `num_ids`."""
    document = tiny_document(family)
    words = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    num_padding = num_ids - len(words) - len(ADDED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": family,
        "tokenizer.ggml.tokens": [*words, *ADDED, *(f"[PAD{index}]" for index in range(num_padding))],
        "tokenizer.ggml.token_type": [NORMAL] * NUM_WORDS + [CONTROL] * 3 + [USER_DEFINED] + [UNUSED] * num_padding,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in document["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": family == "llama-bpe",
    }


CONFIGS: dict[str, Document] = {
    "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}},
    "generation_config.json": {"bos_token_id": BOS, "eos_token_id": [EOS]},
    "config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
}


def write_folder(folder: Path, document: Document, **files: Document | None) -> Path:
    """Writes `tokenizer.json` and `CONFIGS`, with other content for some names (before `.json`) or, for None, none."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {f"{name}.json": content for name, content in files.items()}
    for name, content in ({"tokenizer.json": document} | CONFIGS | changes).items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder
