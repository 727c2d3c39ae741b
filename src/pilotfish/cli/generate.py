"""What `pilotfish generate` does: find the prompt and the models, stream the answer, sum it up."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pilotfish import catalog
from pilotfish.cli.progress import PullProgress
from pilotfish.config import DEFAULT_PROPOSAL_LENGTH
from pilotfish.errors import OptionError, PromptError
from pilotfish.types import FinishEvent, GenerationResult, SamplingParams, TextEvent, TokenKind

if TYPE_CHECKING:
    import pilotfish

_STYLES: dict[TokenKind, str] = {"accepted": "green", "recovered": "red", "bonus": "cyan", "plain": "default"}


@dataclass(frozen=True)
class GenerateOptions:
    """The command's options, as given."""

    prompt: str | None
    file: Path | None
    model: str | None
    draft_model: str | None
    proposal_length: int | None
    max_tokens: int
    context_length: int | None
    temperature: float
    system: str | None
    raw: bool
    show_drafts: bool
    json: bool


def run_generate(options: GenerateOptions) -> bool:
    """Answers the prompt; False where Ctrl-C ended the answer early. Every option is checked before a model loads."""
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    target_name, draft_name, proposal_length = choose_models(options)
    if options.json and options.show_drafts:
        raise OptionError("--json and --show cannot be combined: a JSON object has no colours")
    if options.raw and options.system is not None:
        raise OptionError("--raw and --system cannot be combined: without the chat template there is no system message")
    text = read_prompt(options)

    # The package's names import torch, which the checks above need not wait for.
    import pilotfish

    names = [target_name] if draft_name is None else [target_name, draft_name]
    with PullProgress() as progress:
        for name in names:
            if name in catalog.entries():
                catalog.pull(name, progress)
    prompt: str | list[dict[str, str]] = text
    rendered = text
    drafter = None
    with Console(stderr=True).status(f"loading {' and '.join(names)}"):
        model, tokenizer = pilotfish.load(target_name)
        if not options.raw:
            system = [] if options.system is None else [{"role": "system", "content": options.system}]
            prompt = [*system, {"role": "user", "content": text}]
            rendered = tokenizer.render_chat(prompt)
        if draft_name is not None:
            draft_model, draft_tokenizer = pilotfish.load(draft_name)
            pair = pilotfish.check_pair(draft_tokenizer, tokenizer, rendered)
            drafter = pilotfish.DraftModelDrafter(draft_model, pair)
    events = pilotfish.stream(
        model,
        tokenizer,
        prompt,
        drafter=drafter,
        proposal_length=proposal_length,
        sampling=sampling,
        context_length=options.context_length,
    )
    completed = _show(events, options)
    result = events.result
    if options.json:
        print(json.dumps(_as_dict(result), ensure_ascii=False))
    print(summary(result), file=sys.stderr)
    return completed


def choose_models(options: GenerateOptions) -> tuple[str, str | None, int]:
    """Target, draft model (None where it is not even loaded) and proposal length."""
    default_target, default_draft = catalog.default_pair()
    target = options.model or default_target
    draft = options.draft_model or (default_draft if options.model is None else None)
    length = options.proposal_length
    if length is None:
        length = DEFAULT_PROPOSAL_LENGTH if draft is not None else 0
    if length > 0 and draft is None:
        raise OptionError(f"--proposal-length {length} needs a draft model: add --draft-model, or use 0")
    return target, draft if length > 0 else None, length


def read_prompt(options: GenerateOptions) -> str:
    """The prompt from exactly one of: the argument, stdin (`-`), a file."""
    if (options.prompt is None) == (options.file is None):
        raise OptionError("give one prompt: as the argument, as - for stdin, or with --file")
    source = "stdin" if options.prompt == "-" else str(options.file)
    try:
        if options.file is not None:
            text = options.file.read_bytes().decode("utf-8")
        elif options.prompt == "-":
            text = sys.stdin.buffer.read().decode("utf-8")
        else:
            text = options.prompt or ""
    except OSError as error:
        raise PromptError(f"cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise PromptError("the prompt is empty: there is nothing to answer")
    return text


def _show(events: pilotfish.GenerationStream, options: GenerateOptions) -> bool:
    """Streams the text to stdout; False where Ctrl-C ended it."""
    console = Console(highlight=False, soft_wrap=True) if options.show_drafts else None
    if console is not None:
        legend = Text("tokens: ") + Text(" ").join(Text(kind, style) for kind, style in _STYLES.items())
        Console(stderr=True, highlight=False).print(legend)
    completed = True
    try:
        for event in events:
            if isinstance(event, FinishEvent) or options.json:
                continue
            if console is not None:
                _print_styled(console, event)
            else:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        events.close()
        completed = False
    if not options.json:
        print(flush=True)
    return completed


def _print_styled(console: Console, event: TextEvent) -> None:
    for token in event.tokens:
        console.print(Text(token.text, style=_STYLES[token.kind]), end="")


def _as_dict(result: GenerationResult) -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": result.stats.as_dict(),
    }


def summary(result: GenerationResult) -> str:
    """One line: what came out, how fast, and what speculation did."""
    stats = result.stats
    parts: Sequence[str] = (
        f"{stats.num_tokens} tokens ({result.finish_reason})",
        f"{stats.tokens_per_second:.2f} tokens/s",
        f"{stats.num_steps} steps",
        f"acceptance {stats.acceptance_rate:.0%} ({stats.num_accepted_tokens}/{stats.num_draft_tokens})",
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
        f"draft {stats.draft_seconds:.1f} s",
        f"target {stats.target_seconds:.1f} s",
    )
    return ", ".join(parts)
