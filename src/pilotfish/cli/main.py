"""The commands of `pilotfish`, and how their errors reach a person: one line on stderr, exit status 2."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import click
import typer

from pilotfish import __version__, catalog
from pilotfish.cli.generate import GenerateOptions, run_generate
from pilotfish.cli.models import print_models
from pilotfish.cli.progress import PullProgress
from pilotfish.errors import PilotfishError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Speculative decoding for local language models: the same words, sooner.",
)


class Show(str, Enum):
    drafts = "drafts"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pilotfish {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# typer reads these annotations at run time, where Python 3.10 needs Optional spelled out.
@app.command()
def generate(
    prompt: Annotated[Optional[str], typer.Argument(help="What to ask; - reads it from stdin.")] = None,  # noqa: UP045
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Target model: a catalog name or a path to a GGUF file. Alone, it runs without a draft model."
        ),
    ] = None,
    draft_model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Draft model, likewise. Without --model and --draft-model the default pair runs."),
    ] = None,
    proposal_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Most tokens drafted per step; 0 is target only. Default: 4 with a draft model."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to put out.")] = 512,
    context_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Most tokens, prompt and answer together. Default: the model's own limit."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Only 0 (greedy) so far.")] = 0.0,
    system: Annotated[Optional[str], typer.Option(help="System message put before the prompt.")] = None,  # noqa: UP045
    file: Annotated[Optional[Path], typer.Option(help="Read the prompt from this file.")] = None,  # noqa: UP045
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    show: Annotated[
        Optional[Show],  # noqa: UP045
        typer.Option(help="Colour tokens by how they came about: accepted, recovered, bonus, plain."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a prompt, streaming the text as it is decided; a summary goes to stderr."""
    options = GenerateOptions(
        prompt=prompt,
        file=file,
        model=model,
        draft_model=draft_model,
        proposal_length=proposal_length,
        max_tokens=max_tokens,
        context_length=context_length,
        temperature=temperature,
        system=system,
        raw=raw,
        show_drafts=show is Show.drafts,
        json=json,
    )
    if not run_generate(options):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A name that `pilotfish models` lists.")]) -> None:
    """Fetch a model of the catalog."""
    with PullProgress() as progress:
        path = catalog.pull(name, progress)
    typer.echo(str(path))


@app.command()
def models() -> None:
    """List the models of the catalog: size, licence, and whether they are on this machine."""
    print_models()


def main() -> NoReturn:
    """Runs the command line and exits: 0, 2 for an error a user can cause, 130 after Ctrl-C."""
    # A model may say anything: what the terminal's encoding lacks must not end the answer.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = EXIT_ERROR
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "pilotfish"
        status = _fail(f"{error.format_message()} (see {command} --help)")
    except PilotfishError as error:
        status = _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        print("pilotfish: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`| head`). Keep the interpreter's last flush from failing once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _fail(message: str) -> int:
    print("pilotfish: error: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_ERROR
