"""Text to token ids and back, as the authors of a model meant it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from pilotfish.errors import ChatTemplateError, PromptError, TokenizerError
from pilotfish.tokenizer.byte_level import BYTE_TO_CHAR
from pilotfish.tokenizer.chat_template import ChatTemplate
from pilotfish.tokenizer.detokenizer import IncrementalDetokenizer
from pilotfish.tokenizer.gguf_metadata import read_gguf_metadata
from pilotfish.tokenizer.hf_folder import read_folder
from pilotfish.tokenizer.parts import TokenizerParts
from pilotfish.tokenizer.vocabulary import NORMAL, UNUSED, refuse_unknown_merges

MAX_ADDED_BYTES = 1 << 20
"""Of the text of all control and user-defined tokens; the largest vocabularies have a tenth. What `tokenizers` makes to
find them in a prompt takes eighty times their bytes."""


class Tokenizer:
    """The tokenizer of one model, made by `from_gguf_metadata` or `from_folder`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.vocabulary = vocabulary = parts.vocabulary
        self.padding_token_ids = frozenset(
            token_id for token_id, token_type in enumerate(vocabulary.token_types) if token_type == UNUSED
        )
        """Ids that the file lists as unused, or leaves out; ids from `vocab_size` on are padding too."""
        self._normalizer = parts.rule.normalizer()
        self._backend = _build_backend(parts)
        spellings = {
            text for text, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True) if kind == NORMAL
        }
        self._missing_bytes = frozenset(byte for byte, char in BYTE_TO_CHAR.items() if char not in spellings)
        self._add_bos_token = parts.add_bos_token
        self._chat_template_source = parts.chat_template_source
        self._chat_template = (
            None
            if parts.chat_template is None
            else ChatTemplate(parts.chat_template, bos_token=parts.bos_token, eos_token=parts.eos_token)
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF header describes (keys `tokenizer.ggml.*` and `tokenizer.chat_template`).

        Raises `UnsupportedModelError` for a kind of vocabulary or a pre-tokenizer that this version does not know, and
        `TokenizerError`, naming the key, for anything missing, of a wrong type, out of range or contradictory.
        """
        return cls(read_gguf_metadata(metadata))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a folder as Hugging Face's libraries write it.

        `tokenizer.json` describes it; `tokenizer_config.json`, `generation_config.json` and `config.json` name the
        tokens that start and end a text; the chat template is `chat_template.jinja`, or else stands in
        `tokenizer_config.json`. All but the first may be missing. Raises `ModelNotFoundError` where it is, or where
        one that is there cannot be opened,
        `UnsupportedModelError` for a kind of tokenizer that this version does not know, and `FormatError` or
        `TokenizerError`, naming file and key, for anything of a wrong type, out of range or contradictory.
        """
        return cls(read_folder(folder))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the file lists, padding included."""
        return len(self.vocabulary.tokens)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer: those the file names, and the usual control tokens for it."""
        return self.vocabulary.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary.bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`; the text of a control or user-defined token in it becomes that token.

        `add_special_tokens` puts BOS in front where the file asks for it and `text` does not start with it. Raises
        `PromptError` for text that is not Unicode, or that this vocabulary cannot spell.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at position {error.start}): "
                f"it is not Unicode text"
            ) from None
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._missing_bytes:
            self._check_nothing_lost(text, token_ids)
        bos_token_id = self.vocabulary.bos_token_id
        if add_special_tokens and self._add_bos_token and bos_token_id is not None and token_ids[:1] != [bos_token_id]:
            token_ids.insert(0, bos_token_id)
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`: control tokens give none, bytes that are not UTF-8 give U+FFFD.

        Raises `TokenizerError` for padding and for ids outside the vocabulary.
        """
        return b"".join(map(self.vocabulary.output_bytes, token_ids)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's own entry for `token_id`, in the byte-level alphabet; None where there is none."""
        return self.vocabulary.tokens[token_id] if self.vocabulary.is_real(token_id) else None

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh detokenizer for one answer."""
        return IncrementalDetokenizer(self.vocabulary)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The prompt text for `messages`; the template is told `enable_thinking`, whether the model may think first.

        Raises `ChatTemplateError` for malformed messages, where there is no chat template or it fails, and for
        `enable_thinking` with a template that does not know it.
        """
        if self._chat_template is None:
            raise ChatTemplateError(f"the model has no chat template ({self._chat_template_source})")
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, enable_thinking: bool = False) -> list[int]:
        """The ids of the prompt for `messages`; the template itself writes BOS where it wants one. Raises as
        `render_chat` and `encode` do.
        """
        return self.encode(self.render_chat(messages, enable_thinking=enable_thinking))

    def _check_nothing_lost(self, text: str, token_ids: Sequence[int]) -> None:
        # A byte without a token of its own vanishes in `tokenizers` without a word, and with it a part of the prompt.
        try:
            encoded = b"".join(map(self.vocabulary.token_bytes, token_ids)).decode()
        except UnicodeDecodeError:
            pass
        else:
            if self._normalize(encoded) == self._normalize(text):
                return
        # Normalising all at once can compose what a control token keeps apart, so look at both forms.
        candidates = text + self._normalize(text)
        for char in candidates:
            if not self._missing_bytes.isdisjoint(char.encode()):
                raise PromptError(
                    f"the text holds {char!r} (U+{ord(char):04X}), which the model's vocabulary cannot spell"
                )
        # What is lost is spaces next to an added token that takes them in.

    def _normalize(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(text)


def _build_backend(parts: TokenizerParts) -> tokenizers.Tokenizer:
    num_bytes = sum(len(token.content.encode()) for token in parts.added_tokens)
    if num_bytes > MAX_ADDED_BYTES:
        raise TokenizerError(
            f"the control and user-defined tokens have {num_bytes} bytes of text; {MAX_ADDED_BYTES} are possible"
        )
    typed_tokens = zip(parts.vocabulary.tokens, parts.vocabulary.token_types, strict=True)
    ids_by_text = {text: token_id for token_id, (text, kind) in enumerate(typed_tokens) if kind != UNUSED}
    try:
        model = tokenizers.models.BPE(vocab=ids_by_text, merges=parts.merges, ignore_merges=parts.rule.ignore_merges)
    except Exception:
        # It refuses merges of unknown tokens but does not say where; looking first would be a tenth of a second.
        refuse_unknown_merges(parts.merges, ids_by_text, parts.merges_source)
        raise
    backend = tokenizers.Tokenizer(model)
    normalizer = parts.rule.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = parts.rule.pre_tokenizer()
    backend.add_tokens(list(parts.added_tokens))
    return backend
