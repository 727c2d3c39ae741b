"""The tokenizer of a folder as Hugging Face's libraries write it: what its files say between them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish.errors import ModelNotFoundError, TokenizerError, brief
from pilotfish.files import open_file
from pilotfish.json_files import read_object
from pilotfish.tokenizer.parts import TokenizerParts
from pilotfish.tokenizer.tokenizer_json import read_tokenizer_json
from pilotfish.tokenizer.values import read_value
from pilotfish.tokenizer.vocabulary import UNUSED, Vocabulary, usual_eos_token_ids

MAX_CONFIG_BYTES = 4 << 20
"""Of each file but `tokenizer.json`; one that lists 6,000 added tokens has 1.2 MB."""
MAX_TEMPLATE_BYTES = 1 << 20
"""The longest templates have 20 kB."""

_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_ID_FILES = ("generation_config.json", "config.json")


def read_folder(folder: Path) -> TokenizerParts:
    """The parts of a folder's tokenizer; files and errors are those of `Tokenizer.from_folder`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json, without which its texts cannot be read; other forms of a tokenizer "
            "(tokenizer.model, vocab.json with merges.txt) are not supported"
        )
    found = read_tokenizer_json(read_object(path))
    config = _read_optional(folder / _TOKENIZER_CONFIG)
    ids_by_text = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(found.tokens, found.token_types, strict=True))
        if kind != UNUSED
    }
    real_ids = frozenset(ids_by_text.values())
    id_files = {name: _read_optional(folder / name) for name in _ID_FILES}

    def read_ids(name: str) -> list[int]:
        """What the files call the token, in the order of who is to be believed."""
        text = _read_token(config, name)
        if text is not None and text not in ids_by_text:
            raise TokenizerError(
                f"{_TOKENIZER_CONFIG}: {name} {brief(text)} is not in the vocabulary of tokenizer.json"
            )
        token_ids = [] if text is None else [ids_by_text[text]]
        for file_name, values in id_files.items():
            token_ids += _read_ids(values, f"{name}_id", file_name, real_ids)
        return token_ids

    bos_token_ids = read_ids("bos_token")
    if found.bos_token_id is not None:
        bos_token_ids.insert(0, found.bos_token_id)
    add_bos_token = read_value(config, "add_bos_token", bool, f"{_TOKENIZER_CONFIG}: ") or False
    if found.has_template:
        add_bos_token = found.bos_token_id is not None
    elif add_bos_token and not bos_token_ids:
        raise TokenizerError(f"{_TOKENIZER_CONFIG}: bos_token is missing, but prompts are to start with that token")
    return TokenizerParts(
        vocabulary=Vocabulary(
            tokens=tuple(found.tokens),
            token_types=tuple(found.token_types),
            eos_token_ids=usual_eos_token_ids(found.tokens, found.token_types).union(read_ids("eos_token")),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        ),
        rule=found.rule,
        merges=found.merges,
        merges_source="tokenizer.json: model.merges",
        added_tokens=found.added_tokens,
        add_bos_token=add_bos_token,
        chat_template=_read_template(folder, config),
        chat_template_source=f"{_TEMPLATE_FILE}, or chat_template in {_TOKENIZER_CONFIG}",
        bos_token=_read_token(config, "bos_token") or "",
        eos_token=_read_token(config, "eos_token") or "",
    )


def _read_optional(path: Path) -> Mapping[str, object]:
    return read_object(path, MAX_CONFIG_BYTES) if os.path.lexists(path) else {}


def _read_token(config: Mapping[str, object], name: str) -> str | None:
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{_TOKENIZER_CONFIG}: {name} must be of type str, not {type(value).__name__}")
    return value


def _read_ids(values: Mapping[str, object], key: str, file_name: str, real_ids: frozenset[int]) -> list[int]:
    value = values.get(key)
    token_ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in token_ids:
        if type(token_id) is not int or token_id not in real_ids:
            raise TokenizerError(f"{file_name}: {key} holds {brief(token_id)}, which is no token id of tokenizer.json")
    return token_ids


def _read_template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / _TEMPLATE_FILE
    if os.path.lexists(path):
        return _read_text(path)
    value = config.get("chat_template")
    if isinstance(value, list):  # several, each for a purpose
        value = next(
            (entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "default"),
            None,
        )
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{_TOKENIZER_CONFIG}: chat_template must be of type str, not {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    with open_file(path) as file:
        content = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(content) > MAX_TEMPLATE_BYTES:
        raise TokenizerError(f"{path} has more than {MAX_TEMPLATE_BYTES} bytes, which no chat template needs")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text (byte {error.start})") from None
