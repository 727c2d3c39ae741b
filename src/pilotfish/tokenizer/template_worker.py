"""The program of the process that renders one chat template: run by its path, it needs `jinja2` and nothing of ours.

Arguments: processor seconds for each answer, megabytes of memory, bytes of an answer, and folders to import from.
Each line of stdin and stdout is one JSON value in UTF-8. The first line in is the template's source; each later one
has the template's `variables`, the time `now`, and `required`, a variable the template must look at, or null. For each
comes one line with `text`, `error`, or `unused`: the variable that it never looks at. The end of stdin ends the
process.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension
    from jinja2.parser import Parser

try:
    import resource
    import signal
except ImportError:  # not a POSIX system: only the parent's clock bounds a template there
    resource = None  # type: ignore[assignment]


class _TemplateProcess:
    def __init__(self, source: str) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._source = source
        self._now = datetime.min
        self._compiled: Template | None = None
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda format: self._now.strftime(format)

    def answer(self, line: bytes, max_bytes: int) -> bytes:
        try:
            text = encode(self._render(decode(line)))
        except MemoryError:
            return encode({"error": "it takes too much memory"})
        except Exception as error:  # noqa: BLE001 (a template is a program: it can raise anything)
            return encode({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
        if len(text) > max_bytes:
            return encode({"error": f"it writes more than {max_bytes // 2**20} MB"})
        return text

    def _render(self, request: dict[str, Any]) -> dict[str, str]:
        self._now = datetime.fromisoformat(request["now"])
        required = request["required"]
        if required is not None and required not in self._variables():
            return {"unused": required}
        if self._compiled is None:
            self._compiled = self._environment.from_string(self._source)
        return {"text": self._compiled.render(request["variables"])}

    def _variables(self) -> set[str]:
        from jinja2 import meta

        return meta.find_undeclared_variables(self._environment.parse(self._source))


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not, and takes only the indent.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> type[Extension]:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """`{% generation %}` … `{% endgeneration %}`, which marks for training what an assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationTag


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _limit_memory(megabytes: int) -> None:
    try:
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, own + megabytes * 2**20)
    except (OSError, ValueError):
        pass  # macOS: it has no such limit


def _limit_time(seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def encode(value: object) -> bytes:
    """One line, without its end. Raises `TypeError`, `ValueError` and `RecursionError` for what JSON does not have."""
    # Lone surrogates come in with messages; it is for the tokenizer to refuse them.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(line: bytes) -> Any:
    """The value of a line of `encode`. Raises `ValueError` for any other."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def main(seconds: int, megabytes: int, max_bytes: int) -> None:
    """Answers requests until stdin ends."""
    process = _TemplateProcess(decode(sys.stdin.buffer.readline()))
    if resource is not None:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        _limit_memory(megabytes)
    for line in sys.stdin.buffer:
        if resource is not None:
            _limit_time(seconds)
        sys.stdout.buffer.write(process.answer(line, max_bytes) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.path += sys.argv[4:]
    main(*map(int, sys.argv[1:4]))
