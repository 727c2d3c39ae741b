"""What reaches the screen: the model's own text, a colour for each kind of token, and what goes on meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.status import Status
from rich.text import Text

from pilotfish.types import TextEvent, TokenKind

# Bold as well, since red and green alone look alike to many.
_COLOURS: dict[TokenKind, str] = {"accepted": "32", "recovered": "1;31", "bonus": "36", "plain": ""}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
UNBROKEN = 10_000
"""A width in which no line is broken and no table squeezed."""
# Line and paragraph separators, and what turns the direction of the text about it.
_LINE_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))}
_LINE_CONTROLS |= {ord("\n"): "\\n", ord("\t"): "\\t"}


def printable(text: str) -> str:
    """`text` with every control character but newline and tab spelled out, as in `\\x1b`.

    A model can be talked into saying escape sequences, which would command the terminal: hide text, change its title,
    write to the clipboard. As `gh` and `less` do, a terminal is shown them; a pipe or a file gets the very bytes.
    """
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """`printable` for names and other texts that get one line: no part of them starts another or runs backwards."""
    return printable(text).translate(_LINE_CONTROLS)


class OutputConsole(Console):
    """A console whose reader may leave (`| head`): a `BrokenPipeError` says so, where rich ends with status 1."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls it where it handles the error


def print_parts(parts: Iterable[RenderableType], width: int) -> None:
    """Prints to stdout: as wide as a terminal is, or `width` columns where it is none."""
    console = OutputConsole() if sys.stdout.isatty() else OutputConsole(width=width)
    for part in parts:
        console.print(part)


def discard(stream: TextIO) -> None:
    """Sends all that is still written to `stream`, the interpreter's last flush included, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def paint(text: str, kind: TokenKind) -> str:
    """`text` in the colour of `kind`. Not by rich's layout, which wraps lines and rewrites tabs and markup."""
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if text and _COLOURS[kind] else text


class AnswerWriter:
    """Writes an answer to stdout, piece by piece: coloured where drafts are shown and stdout can show colours."""

    def __init__(self, show_drafts: bool) -> None:
        self.wrote = False
        self._colours = show_drafts and _shows_colours(Console())
        self._for_terminal = sys.stdout.isatty() or self._colours
        if self._colours:
            legend = " ".join(paint(kind, kind) if _shows_colours(Console(stderr=True)) else kind for kind in _COLOURS)
            print(f"tokens: {legend}", file=sys.stderr)
        elif show_drafts:
            print("pilotfish: --show drafts: stdout shows no colours; FORCE_COLOR=1 forces them", file=sys.stderr)

    def write(self, event: TextEvent) -> None:
        pieces = ((printable(token.text) if self._for_terminal else token.text, token.kind) for token in event.tokens)
        self.wrote = True
        sys.stdout.write("".join(paint(text, kind) if self._colours else text for text, kind in pieces))
        sys.stdout.flush()

    def head(self, line: str, is_first: bool) -> None:
        """A line above one of several answers; it ends the one before."""
        sys.stdout.write(f"{line}\n" if is_first else f"\n{line}\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """Ends the last line: stdout holds the answer and exactly one newline more."""
        sys.stdout.write("\n")
        sys.stdout.flush()


class Waiting:
    """A spinner on stderr with what is being waited for, until `stop`. Nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        # Not rich's own idea of a terminal, which FORCE_COLOR sways: a log file wants no spinner.
        self._status = Status("", console=Console(stderr=True)) if sys.stderr.isatty() else None

    def show(self, what: str) -> None:
        if self._status is not None:
            self._status.update(Text(printable(what)))
            self._status.start()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class ProgressLine:
    """One line on stderr, drawn anew at each `show` and gone in the end. Nothing at all where stderr is no terminal.

    Between two calls nothing runs, unlike with `Waiting`, whose spinner would take time from what is being measured.
    """

    def __init__(self) -> None:
        is_terminal = sys.stderr.isatty()
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True) if is_terminal else None

    def show(self, what: str) -> None:
        if self._live is not None:
            self._live.start()
            self._live.update(Text(one_line(what), no_wrap=True, overflow="ellipsis"), refresh=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _shows_colours(console: Console) -> bool:
    return console.color_system not in (None, "windows") and not console.no_color
