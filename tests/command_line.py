"""What a run of the command line in this process leaves; see the fixture `cli`."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error that nothing was said before."""
        assert self.status == 2
        assert self.out == ""
        return self.error_line

    @property
    def error_line(self) -> str:
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        assert self.err.startswith("pilotfish: error: ")
        assert "Traceback" not in self.err
        return self.err

    @property
    def object(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1
        return json.loads(self.out)


class Stream(io.TextIOWrapper):
    """A stream whose bytes are kept; a terminal if told so."""

    def __init__(self, terminal: bool = False, encoding: str = "utf-8", content: bytes = b"") -> None:
        super().__init__(io.BytesIO(content), encoding=encoding, newline="", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]
