"""Tiny tokenizers as GGUF metadata, and texts to try tokenizers with."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from hypothesis import strategies as st

from pilotfish.tokenizer import Tokenizer
from pilotfish.tokenizer.byte_level import BYTE_TO_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
RECORDED = json.loads((Path(__file__).parent / "data" / "llama_cpp_token_ids.json").read_text("utf-8"))["models"]

SPECIAL = re.compile(r"<\|?/?\w+\|?>")

Metadata = dict[str, object]


def tiny_metadata(
    *, words: tuple[str, ...] = (), merges: tuple[str, ...] = (), pre: str = "smollm", **values: object
) -> Metadata:
    """256 bytes, `words`, and then <s> (control, BOS), <|im_end|> (control, EOS), <t> (user-defined) and padding."""
    tokens = [*BYTE_TO_CHAR.values(), *words, "<s>", "<|im_end|>", "<t>", "[PAD]"]
    num_normal = 256 + len(words)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * num_normal + [CONTROL, CONTROL, USER_DEFINED, UNUSED],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": num_normal,
        "tokenizer.ggml.eos_token_id": num_normal + 1,
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.{key}": value for key, value in values.items()}


def tiny_tokenizer(**values: object) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(tiny_metadata(**values))


def byte_id(byte: int) -> int:
    return list(BYTE_TO_CHAR).index(byte)


BOS, EOS, USER, PAD = 256, 257, 258, 259


def is_settled(char: str) -> bool:
    """Whether `char` has one meaning in every version of Unicode: libraries bring tables of different age."""
    old = unicodedata.ucd_3_2_0
    return old.category(char) == unicodedata.category(char) != "Cn"


settled_chars = st.characters(codec="utf-8").filter(is_settled)
texts = st.text(
    settled_chars | st.sampled_from(" \n\r\t'0159eEsStT<|>\u0301\u200d\u00e9\u4f60") | st.sampled_from("😀👩🏽🇨"),
    max_size=40,
).filter(lambda text: not SPECIAL.search(text))
