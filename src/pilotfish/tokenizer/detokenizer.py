"""Text from token ids that arrive one at a time, without ever showing half a character."""

from __future__ import annotations

import codecs

from pilotfish.tokenizer.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """Turns a growing answer into text deltas; made by `Tokenizer.detokenizer()`, one for each answer.

    The deltas of all `step` calls and of `finish` joined are `Tokenizer.decode` of all the ids, always: tokens are
    spelled as bytes, and cutting UTF-8 anywhere and going on gives what decoding it in one piece gives.

    `tokenizers.decoders.DecodeStream` is not used: it holds back everything after an invalid byte until a character
    that happens not to be U+FFFD (so a U+FFFD that is really there, too), decodes all that it holds again at each
    token (4000 stray bytes take over a second), and has no way to ask for the rest at the end.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes, empty while a character is incomplete and for control tokens.

        Raises `TokenizerError` for padding and for ids outside the vocabulary; the detokenizer is then unchanged.
        """
        return self._decoder.decode(self._vocabulary.output_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end of the answer: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
