"""An answer's text as its tokens arrive: up to a stop string, and never a piece that may turn out to be part of one."""

from __future__ import annotations

from collections.abc import Iterable

from pilotfish.tokenizer.detokenizer import IncrementalDetokenizer


class OutputText:
    """Turns tokens into the text that may be shown; it ends before the stop string that is complete first.

    Which one that is does not depend on how the text falls into tokens: of two that end at the same character, it is
    the one that starts first.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Iterable[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = _StopStrings(stop)
        self._state = 0
        self._held = ""
        self.is_stopped = False
        """Whether a stop string is complete: nothing comes after it."""

    def append(self, token_id: int) -> str:
        """The text that one more token lets be shown."""
        return self._show(self._detokenizer.step(token_id), is_end=False)

    def finish(self) -> str:
        """What was held back until the end of the answer."""
        return self._show(self._detokenizer.finish(), is_end=True)

    def _show(self, piece: str, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            self._state = self._stop.read(self._state, character)
            if match := self._stop.match[self._state]:
                self.is_stopped = True
                return text[: end - match]
        shown = len(text) if is_end else len(text) - self._stop.length[self._state]
        self._held = text[shown:]
        return text[:shown]


class _StopStrings:
    """Finds strings in a text that is read once, character by character, whatever their number and length.

    A state stands for the longest start of a string with which the text so far ends; 0 is the empty one (Aho and
    Corasick 1975, "Efficient string matching").
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._longer: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """Per state: that of the next shorter start with which the text ends too."""
        self.length = [0]
        """Per state: of that start."""
        self.match = [0]
        """Per state: the length of the longest string with which the text ends, 0 for none."""
        for string in strings:
            state = 0
            for length, character in enumerate(string, 1):
                state = self._longer[state].setdefault(character, len(self.length))
                if state == len(self.length):
                    self._longer.append({})
                    self._shorter.append(0)
                    self.length.append(length)
                    self.match.append(0)
            self.match[state] = len(string)
        parents = [0]
        for parent in parents:  # grows meanwhile: shorter starts come before longer ones
            for character, state in self._longer[parent].items():
                shorter = self._shorter[state] = self.read(self._shorter[parent], character) if parent else 0
                self.match[state] = self.match[state] or self.match[shorter]
                parents.append(state)

    def read(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._longer[state]:
            state = self._shorter[state]
        return self._longer[state].get(character, 0)
