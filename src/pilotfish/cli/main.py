"""The commands of `pilotfish`, and how their errors reach a person: one line on stderr, exit status 2."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from pilotfish import __version__, catalog
from pilotfish.cli.bench import bench
from pilotfish.cli.generate import GenerateOptions, run_generate
from pilotfish.cli.models import print_models
from pilotfish.cli.options import EXIT_INTERRUPTED, MODEL_FORMS, WholeNumber
from pilotfish.cli.progress import PullProgress
from pilotfish.cli.sampling_options import sampling_options, take_sampling
from pilotfish.cli.terminal import discard, printable
from pilotfish.config import MAX_THREADS
from pilotfish.errors import PilotfishError

EXIT_ERROR = 2


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="pilotfish %(version)s", help="Print the version and exit.")
@click.pass_context
def app(context: click.Context) -> None:
    """Speculative decoding for local language models: the same words, sooner.

    A small draft model guesses the next tokens, the target model checks all guesses in one pass. The answer is the
    target model's own, token for token.

    \b
      pilotfish generate "Write a function that reverses a list"
      pilotfish models
      pilotfish COMMAND --help
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@app.command(short_help="Answer a prompt.")
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(path_type=Path), metavar="FILE", help="Read the prompt from this file.")
@click.option(
    "--model",
    metavar="MODEL",
    help=f"Target model: {MODEL_FORMS}. Given alone, it runs without a draft model. Without it: the default target.",
)
@click.option(
    "--draft-model",
    metavar="MODEL",
    help="Draft model, named likewise; it must have the target's vocabulary. Without --model and --draft-model: the "
    "default draft.",
)
@click.option(
    "--proposal-length",
    type=WholeNumber(min=0),
    metavar="N",
    help="Most tokens drafted per step. 0 runs the target alone: the draft model is not loaded. Default: 4 with a "
    "draft model, else 0.",
)
@click.option(
    "--context-length",
    type=WholeNumber(min=1),
    metavar="N",
    help="Most tokens of prompt and answer together. Default: the target model's limit, which is also the most.",
)
@sampling_options
@click.option(
    "--threads",
    type=WholeNumber(min=1, max=MAX_THREADS),
    metavar="N",
    help="Threads of the kernels; the answer does not depend on it. Default: one for each physical core.",
)
@click.option("--system", metavar="TEXT", help="System message to put before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option(
    "--enable-thinking",
    is_flag=True,
    help="Let the model think before it answers. Off unless asked for; an error where its chat template has no such "
    "switch.",
)
@click.option(
    "--show",
    type=click.Choice(["drafts"]),
    help="Colour each token by how it came about: accepted (drafted and agreed to), recovered (replaces a rejected "
    "guess), bonus (follows a fully accepted draft), plain (nothing was drafted).",
)
@click.option(
    "--json",
    is_flag=True,
    help="Print one JSON object (text, token_ids, finish_reason, stats, and logprobs with --logprobs) at the end; with "
    "--n above 1 an array of them.",
)
def generate(**given: Any) -> None:
    """Answer PROMPT, streaming the text to stdout as it is decided and a summary to stderr.

    PROMPT is one argument, so quote it; - reads it from stdin, and -- goes before one that starts with a dash. Models
    of the catalog and the hub are fetched at first use. Ctrl-C keeps what was said so far.

    \b
      pilotfish generate "Write a function that merges two sorted lists"
      pilotfish generate --show drafts --max-tokens 100 --file prompt.txt
      pilotfish generate --model path/to/model.gguf --raw "Once upon a time"
      pilotfish generate --temperature 0.8 --top-p 0.95 --seed 7 --n 3 "Write a haiku about the sea"
      pilotfish generate --model qwen3-4b --draft-model qwen3-0.6b "Why is the sky blue?"
    """
    sampling = take_sampling(given)
    if not run_generate(GenerateOptions(sampling=sampling, **given)):
        raise click.exceptions.Exit(EXIT_INTERRUPTED)


@app.command(short_help="Fetch a model.")
@click.argument("name")
def pull(name: str) -> None:
    """Fetch a model of the catalog or the hub.

    NAME is one that `pilotfish models` lists, or a hub repository ORG/NAME, with :FILE or :QUANTISATION where it has
    several GGUF files. Prints the path of the file or folder, at once where it is already present.

    \b
      pilotfish pull qwen3-4b:mlx-4bit
      pilotfish pull Qwen/Qwen3-4B-GGUF:Q8_0
    """
    with PullProgress(name) as progress:
        path = catalog.pull(name, progress)
    click.echo(path)


@app.command(short_help="List the models of the catalog.")
def models() -> None:
    """List the models of the catalog, by name or NAME:VARIANT: size, licence, and whether they are on this machine."""
    print_models()


app.add_command(bench)


def main() -> NoReturn:
    """Runs the command line and exits: 0, 2 for an error a user can cause, 130 after Ctrl-C."""
    _prepare_streams()
    try:
        status = _run(sys.argv[1:])
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "pilotfish"
        status = _fail(f"{error.format_message().rstrip('.')} (see {command} --help)")
    except PilotfishError as error:
        status = _fail(str(error))
    except KeyboardInterrupt:
        status = _say("pilotfish: interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader has left (`| head`): it has all it wanted.
        discard(sys.stdout)
        status = 0
    except OSError as error:
        discard(sys.stdout)
        status = _fail(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    # Not `app.main`, which expands wildcards in prompts on Windows and has its own words for Ctrl-C and closed pipes.
    try:
        with app.make_context("pilotfish", arguments) as context:
            app.invoke(context)
    except click.exceptions.Exit as request:
        return request.exit_code
    return 0


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
    # A model may say anything: what the terminal's encoding lacks must not end the answer.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def _fail(message: str) -> int:
    return _say("pilotfish: error: " + printable(" ".join(message.splitlines())), EXIT_ERROR)


def _say(line: str, status: int) -> int:
    with contextlib.suppress(OSError):  # where stderr cannot be written to, the status must do
        print(line, file=sys.stderr)
    return status
