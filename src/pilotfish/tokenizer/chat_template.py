"""Chat messages to prompt text with the Jinja template that a model brings along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from pilotfish.errors import ChatTemplateError
from pilotfish.tokenizer.template_process import TemplateProcess


class ChatTemplate:
    """A model's chat template, compiled at its first use: a broken one stands in nobody's way who does not chat.

    What a template may use follows the convention of the files' authors (Hugging Face chat templating): the variables
    `messages`, `add_generation_prompt`, `enable_thinking`, `bos_token`, `eos_token`, and `tools` and `documents`, which
    are none; the functions `raise_exception` and `strftime_now`, the filter `tojson`, loop controls, and the tag
    `generation`. It runs in Jinja's sandbox, within the limits of `template_process`.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._process = TemplateProcess(source)
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The prompt for `messages`. Raises `ChatTemplateError` for malformed messages, where the template fails, and
        for `enable_thinking` with a template that never looks at it.
        """
        _check_messages(messages)
        answer = self._process.render(
            {
                "variables": {
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "enable_thinking": enable_thinking,
                    "tools": None,
                    "documents": None,
                    **self._special_tokens,
                },
                "now": self._now().isoformat(),
                "required": "enable_thinking" if enable_thinking else None,
            }
        )
        if "unused" in answer:
            raise ChatTemplateError(
                "this model's chat template has no thinking switch (it never reads enable_thinking): do not ask for it"
            )
        if "error" in answer:
            raise ChatTemplateError(f"the model's chat template failed: {answer['error']}")
        return answer["text"]


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
