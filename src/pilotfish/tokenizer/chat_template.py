"""Chat messages to prompt text with the Jinja template that a model file carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.errors import ChatTemplateError


class ChatTemplate:
    """A model's chat template, compiled at its first use: a broken one stands in nobody's way who does not chat.

    What a template may use follows the convention of the files' authors (Hugging Face chat templating): the variables
    `messages`, `add_generation_prompt`, `bos_token` and `eos_token`, the functions `raise_exception` and
    `strftime_now`, the filter `tojson`, and loop controls.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._source = source
        self._bos_token = bos_token
        self._eos_token = eos_token
        self._now = now

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`. Raises `ChatTemplateError` for malformed messages and where the template fails."""
        _check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
            )
        except Exception as error:  # a template is a program: it can raise anything
            raise ChatTemplateError(f"the model's chat template failed: {_one_line(error)}") from error

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: self._now().strftime(format)
        return environment.from_string(self._source)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise ChatTemplateError("there are no messages to render")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"message {index} must be a mapping with role and content, not {message!r:.80}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ChatTemplateError(
                    f"message {index} must have a {name} of type str, not {message.get(name)!r:.80}"
                )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
