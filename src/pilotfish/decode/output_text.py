"""An answer's text as its tokens arrive: up to a stop string, and never a piece that may turn out to be part of one."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.tokenizer.detokenizer import IncrementalDetokenizer


class OutputText:
    """Turns tokens into the text that may be shown; it ends before the stop string that is complete first.

    Which one that is does not depend on how the text falls into tokens: of two that end at the same character, it is
    the one that starts first.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._longest_prefix = max(map(len, stop), default=1) - 1
        self._held = ""
        self.is_stopped = False
        """Whether a stop string is complete: nothing comes after it."""

    def append(self, token_id: int) -> str:
        """The text that one more token lets be shown."""
        return self._show(self._detokenizer.step(token_id), is_end=False)

    def finish(self) -> str:
        """What was held back until the end of the answer."""
        return self._show(self._detokenizer.finish(), is_end=True)

    def _show(self, text: str, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self.is_stopped = True
            return text[: min(matches)[1]]
        shown = len(text) if is_end else len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string starts."""
        for size in range(min(len(text), self._longest_prefix), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
