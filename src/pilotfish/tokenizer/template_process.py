"""The process that renders one chat template, seen from ours: started at need, bounded, and replaced where it dies."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pilotfish.errors import ChatTemplateError
from pilotfish.tokenizer import template_worker

MAX_SECONDS = 5
"""Processor time of one rendering, where the system can limit it."""
MAX_MEGABYTES = 512
"""Memory of the process, its start not counted, where the system can limit it."""
MAX_WALL_SECONDS = 60.0
"""Time of one rendering on any system; alone where there is no module `resource` (Windows)."""
MAX_ANSWER_BYTES = 16 << 20


class TemplateProcess:
    """Renders one template in a process of its own, which may loop or fill its memory without harm to ours.

    Nothing inside one process bounds what a Jinja template takes: a single expression can ask for a string of any
    length. The process starts at the first `render` and serves the later ones; it ends with this object, and with ours.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def render(self, request: dict[str, Any]) -> dict[str, str]:
        """The answer to one request; what both hold stands in `template_worker`.

        Raises `ChatTemplateError` where the request is no JSON value, or the process cannot start, comes to an end, or
        is at a limit. It is then gone, and the next request starts another.
        """
        try:
            line = template_worker.encode(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the messages hold something that JSON does not have: {error}") from None
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = self._start()
                return self._exchange(self._process, line)
            except BaseException:  # Ctrl-C as well: a late answer must not be taken for that to the next request
                self._process = None
                self._stop()
                raise

    def _start(self) -> subprocess.Popen[bytes]:
        # With nothing but the standard library and these folders it starts in less than a tenth of a second.
        specs = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
        folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
        limits = map(str, (MAX_SECONDS, MAX_MEGABYTES, MAX_ANSWER_BYTES))
        try:
            process = subprocess.Popen(
                [sys.executable or "", "-I", "-S", template_worker.__file__, *limits, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for us alone
            )
        except OSError as error:
            raise ChatTemplateError(f"cannot start Python to render the model's chat template: {error}") from None
        self._stop = weakref.finalize(self, _stop, process)
        _send(process, template_worker.encode(self._source))
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
        assert process.stdout is not None
        timer = threading.Timer(MAX_WALL_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            _send(process, line)
            answer = process.stdout.readline(MAX_ANSWER_BYTES + 2)
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise ChatTemplateError(f"the model's chat template failed: {_why_ended(process)}")
        with contextlib.suppress(ValueError):
            found = template_worker.decode(answer)
            if isinstance(found, dict):
                return found
        raise ChatTemplateError("the process that renders the model's chat template answers nonsense")


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has died, as the answer that is missing will say
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "its process answers nonsense"
    name = {known.value: known.name for known in signal.Signals}.get(-status)
    if name == "SIGXCPU":
        return f"it takes more than {MAX_SECONDS} s of processor time"
    if name == "SIGKILL":
        return f"its process was killed, after {MAX_WALL_SECONDS:.0f} s or for want of memory"
    return f"its process ended with status {status}; it may take more than {MAX_MEGABYTES} MB of memory"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what it was not sent is lost
            pipe.close()
    process.wait()
