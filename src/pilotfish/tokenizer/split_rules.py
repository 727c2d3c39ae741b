"""How text is cut into words before byte-pair merges, one row for each name that `tokenizer.ggml.pre` may hold."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from pilotfish.errors import UnsupportedModelError, brief


@dataclass(frozen=True)
class SplitRule:
    """One row of the table."""

    pattern: str | None
    """Words, as a regular expression; None stands for GPT-2's own."""
    individual_digits: bool = False
    """Every digit is cut off first."""
    nfc: bool = False
    """Text is brought into Unicode normalisation form C first."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, whatever the merges would make of it."""
    add_bos_token: bool = False
    """What holds where the file does not say."""

    def normalizer(self) -> normalizers.Normalizer | None:
        """What `tokenizers` applies to text outside control and user-defined tokens."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What `tokenizers` cuts that text with; words come out in the byte-level alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.individual_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)


# The two patterns differ in the number of digits a word may have.
SPLIT_RULES = {
    "smollm": SplitRule(pattern=None, individual_digits=True),
    "qwen2": SplitRule(
        pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        nfc=True,
    ),
    "llama-bpe": SplitRule(
        pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ignore_merges=True,
        add_bos_token=True,
    ),
}


def find_split_rule(name: str | None) -> SplitRule:
    """The row called `name`. Raises `UnsupportedModelError` for any other name and for none: a guessed rule gives
    plausible ids that are not the ones the model was trained on.
    """
    if name is None:
        raise UnsupportedModelError(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre); it was written by an old converter: "
            "use a newer conversion of this model"
        )
    if name not in SPLIT_RULES:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {brief(name)}; this version knows {', '.join(sorted(SPLIT_RULES))}"
        )
    return SPLIT_RULES[name]
