"""What `pilotfish generate` does: find the prompt and the models, stream the answer, sum it up."""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.cli.pair import choose_pair, fetch
from pilotfish.cli.terminal import AnswerWriter, Waiting
from pilotfish.config import DEFAULT_PROPOSAL_LENGTH
from pilotfish.errors import ChatTemplateError, OptionError, PilotfishError, PromptError
from pilotfish.types import GenerationResult, GenerationStats, SamplingParams, TextEvent

if TYPE_CHECKING:
    import pilotfish

# json.dumps leaves these as they are, and a terminal would obey some of them.
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


@dataclass(frozen=True)
class GenerateOptions:
    """The command's options, as given."""

    prompt: str | None
    file: Path | None
    model: str | None
    draft_model: str | None
    proposal_length: int | None
    sampling: SamplingParams
    context_length: int | None
    threads: int | None
    system: str | None
    raw: bool
    enable_thinking: bool
    show: str | None
    json: bool


@dataclass(frozen=True)
class ModelChoice:
    """What runs: `draft` is None where there is no draft model, or none is needed."""

    target: str
    draft: str | None
    proposal_length: int

    @property
    def names(self) -> list[str]:
        return [self.target] if self.draft is None else [self.target, self.draft]


def run_generate(options: GenerateOptions) -> bool:
    """Answers the prompt; False where Ctrl-C ended the answer early. Every option is checked before a model loads.

    However an answer ends, stdout keeps what was said so far.
    """
    choice = choose_models(options)
    if options.json and options.show is not None:
        raise OptionError("--json and --show cannot be combined: a JSON object has no colours")
    if options.raw and options.system is not None:
        raise OptionError("--raw and --system cannot be combined: without the chat template there is no system message")
    if options.raw and options.enable_thinking:
        raise OptionError("--raw and --enable-thinking cannot be combined: the chat template is what asks for thinking")
    if options.sampling.logprobs is not None and not options.json:
        raise OptionError("--logprobs needs --json: a text has no room for them")
    text = read_prompt(options)

    num_answers = options.sampling.n
    writer = None if options.json else AnswerWriter(options.show == "drafts")
    answers: list[pilotfish.GenerationStream] = []
    completed = False
    try:
        with Waiting() as waiting:
            for name in choice.names:
                fetch(name)
            waiting.show(f"loading {' and '.join(choice.names)}")
            start = _load(options, choice, text)
            for number in range(num_answers):
                if writer is not None and num_answers > 1:
                    waiting.stop()
                    writer.head(f"--- answer {number + 1} of {num_answers} ---", is_first=number == 0)
                answers.append(start(number))
                waiting.show("reading the prompt")
                with answers[-1] as events:
                    for event in events:
                        if writer is not None and isinstance(event, TextEvent):
                            waiting.stop()
                            writer.write(event)
        completed = True
    except KeyboardInterrupt:
        if not answers and writer is not None:
            raise
    except PilotfishError:
        if any(answer.result.token_ids for answer in answers):
            _end(writer, [answer.result for answer in answers], num_answers)
        raise
    results = [answer.result for answer in answers] or [GenerationResult("", (), "abort", GenerationStats())]
    if writer is None or writer.wrote or completed:
        _end(writer, results, num_answers)
    for result in results:
        print(summary(result), file=sys.stderr)
    return completed


def choose_models(options: GenerateOptions) -> ModelChoice:
    """Target, draft model and proposal length. At length 0 the draft model is not even looked at."""
    target, draft = choose_pair(options.model, options.draft_model)
    length = options.proposal_length
    if length is None:
        length = DEFAULT_PROPOSAL_LENGTH if draft is not None else 0
    if length > 0 and draft is None:
        raise OptionError(f"--proposal-length {length} needs a draft model: add --draft-model, or use 0")
    return ModelChoice(target, draft if length > 0 else None, length)


def read_prompt(options: GenerateOptions) -> str:
    """The prompt from exactly one of: the argument, stdin (`-`), a file. Its text is taken as it is, line ends too."""
    if (options.prompt is None) == (options.file is None):
        raise OptionError("give one prompt: as the argument, as - for stdin, or with --file")
    if options.system is not None:
        _check_unicode("--system", options.system)
    if options.file is None and options.prompt is not None and options.prompt != "-":
        _check_unicode("the prompt", options.prompt)
        text = options.prompt
    else:
        text = _read_text(options.file)
    # Spaces are nothing to answer, but they are something to continue.
    if not (text if options.raw else text.strip()):
        raise PromptError("the prompt is empty: there is nothing to answer")
    return text


def _read_text(file: Path | None) -> str:
    """The text of a file, or of stdin for None. A byte order mark is no part of the text."""
    source = "stdin" if file is None else str(file)
    try:
        if file is not None:
            content = file.read_bytes()
        elif sys.stdin is not None:
            content = sys.stdin.buffer.read()
        else:
            raise PromptError("cannot read the prompt from stdin: it is closed")
    except OSError as error:
        raise PromptError(f"cannot read {source}: {error.strerror}") from None
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not UTF-8 text (character {error.start})") from None


def _load(options: GenerateOptions, choice: ModelChoice, text: str) -> Callable[[int], pilotfish.GenerationStream]:
    """Loads what runs; calling what comes back starts an answer, given its number."""
    # The package's names import torch, which the checks before this need not wait for.
    import pilotfish

    model, tokenizer = pilotfish.load(choice.target, threads=options.threads)
    prompt: str | list[dict[str, str]] = text
    rendered = text
    if not options.raw:
        if not tokenizer.has_chat_template:
            raise ChatTemplateError(f"{choice.target} has no chat template: add --raw to continue the prompt as it is")
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        prompt = [*system, {"role": "user", "content": text}]
        rendered = tokenizer.render_chat(prompt, enable_thinking=options.enable_thinking)
    drafter = None
    if choice.draft is not None:
        draft_model, draft_tokenizer = pilotfish.load(choice.draft, threads=options.threads)
        drafter = pilotfish.DraftModelDrafter(draft_model, pilotfish.check_pair(draft_tokenizer, tokenizer, rendered))
    return lambda number: pilotfish.stream(
        model,
        tokenizer,
        prompt,
        drafter=drafter,
        proposal_length=choice.proposal_length,
        sampling=options.sampling,
        context_length=options.context_length,
        enable_thinking=options.enable_thinking,
        answer=number,
    )


def _end(writer: AnswerWriter | None, results: Sequence[GenerationResult], num_answers: int) -> None:
    """What stdout still lacks: the last newline, or all of the JSON: an array where several answers were asked for."""
    if writer is not None:
        writer.finish()
    else:
        print(as_json(results if num_answers > 1 else results[0]), flush=True)


def as_json(answer: GenerationResult | Sequence[GenerationResult]) -> str:
    """One line; in ASCII where stdout's encoding may lack a character, since a `?` would be another text."""
    value = _as_object(answer) if isinstance(answer, GenerationResult) else [_as_object(result) for result in answer]
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    return json.dumps(value, ensure_ascii=not is_utf8).translate(_JSON_CONTROLS)


def _as_object(result: GenerationResult) -> dict[str, Any]:
    value: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": result.stats.as_dict(),
    }
    if result.logprobs is not None:
        value["logprobs"] = [
            {
                "token_id": token_id,
                "logprob": _finite(own.logprob),
                "top": [
                    {"token_id": other_id, "logprob": _finite(logprob)}
                    for other_id, logprob in zip(own.top_token_ids, own.top_logprobs, strict=True)
                ],
            }
            for token_id, own in zip(result.token_ids, result.logprobs, strict=True)
        ]
    return value


def _finite(logprob: float) -> float | None:
    """JSON has no infinity: null is a probability of nothing."""
    return logprob if math.isfinite(logprob) else None


def summary(result: GenerationResult) -> str:
    """One line: what came out, how fast, and what speculation did."""
    stats = result.stats
    if stats.num_draft_tokens:
        acceptance = f"acceptance {stats.acceptance_rate:.0%} ({stats.num_accepted_tokens}/{stats.num_draft_tokens})"
    else:
        acceptance = "nothing drafted"
    parts: Sequence[str] = (
        f"{stats.num_tokens} tokens ({result.finish_reason})",
        f"{stats.tokens_per_second:.2f} tokens/s",
        f"{stats.num_steps} steps",
        acceptance,
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
        f"draft {stats.draft_seconds:.1f} s",
        f"target {stats.target_seconds:.1f} s",
    )
    return ", ".join(parts)
