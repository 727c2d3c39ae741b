"""The commands of `pilotfish bench`: measure a pair, show an artifact, hold two side by side."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from pilotfish.cli.options import EXIT_INTERRUPTED, MODEL_FORMS, WholeNumber
from pilotfish.cli.pair import choose_pair, fetch
from pilotfish.cli.progress import BenchProgress
from pilotfish.cli.roofline import roofline
from pilotfish.config import MAX_THREADS
from pilotfish.errors import OptionError

if TYPE_CHECKING:
    from pilotfish.bench.artifact import Artifact

EXIT_DIFFERENT = 1

P = ParamSpec("P")
R = TypeVar("R")


def needs_extra(command: Callable[P, R]) -> Callable[P, R]:
    """What measures and draws comes with the extra `bench`; without it, one line says so."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return command(*arguments, **options)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in ("matplotlib", "pydantic", "scipy"):
                raise
            raise OptionError(
                f"this needs {package}, of pilotfish's extra `bench`: pip install 'pilotfish[bench]'"
            ) from None

    return run


def parse_lengths(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Proposal lengths, as in `0,2,4,8`."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 5 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 0,2,4,8", context, parameter)
    lengths = tuple(int(part) for part in parts)
    if len({*lengths}) < len(lengths):
        raise click.BadParameter(f"{value!r} names a length twice", context, parameter)
    return lengths


@click.group(invoke_without_command=True, short_help="Measure whether speculation pays.")
@click.option("--model", metavar="MODEL", help=f"Target model: {MODEL_FORMS}. Without it: the default target.")
@click.option(
    "--draft-model", metavar="MODEL", help="Draft model, named likewise. Without both: the default draft model."
)
@click.option(
    "--proposal-length",
    "proposal_lengths",
    callback=parse_lengths,
    metavar="N,N,…",
    default="0,2,4,8",
    help="Proposal lengths to measure; each is an arm beside target-only (0), which always runs. Default: 0,2,4,8.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prompts: a JSON list, or JSON lines, of objects with `user` and, if wanted, `system`, `id` and `class`. "
    "Default: the project's twelve.",
)
@click.option(
    "--max-tokens", type=WholeNumber(min=1), metavar="N", default=128, help="Most tokens in an answer. Default: 128."
)
@click.option(
    "--repeats",
    type=WholeNumber(min=1),
    metavar="N",
    default=4,
    help="Rounds: each takes one sample of every arm. A multiple of the number of arms balances best, twice that where "
    "it is odd. Default: 4.",
)
@click.option(
    "--threads",
    type=WholeNumber(min=1, max=MAX_THREADS),
    metavar="N",
    help="Threads of the kernels, in every arm. Default: PILOTFISH_THREADS, else one for each physical core.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for result.json and report.html; made if it is not there. Default: bench-DATE-TIME.",
)
@click.pass_context
def bench(context: click.Context, /, **given: Any) -> None:
    """Measure whether speculation pays on this machine, with these models, on these prompts.

    Target-only and each speculative arm answer all prompts in fresh processes, in balanced order. All greedy output
    must be identical; then rates are compared in pairs. Everything goes into DIR/result.json and DIR/report.html.
    Ctrl-C keeps the finished samples.

    \b
      pilotfish bench
      pilotfish bench --model target.gguf --draft-model draft.gguf --proposal-length 0,4 --out measured
      pilotfish bench show measured
      pilotfish bench compare measured another
    """
    if context.invoked_subcommand is None:
        run_bench(**given)
        return
    for parameter in context.command.params:
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} comes without {context.invoked_subcommand}", context)


@needs_extra
def run_bench(
    model: str | None,
    draft_model: str | None,
    proposal_lengths: tuple[int, ...],
    prompts: Path | None,
    max_tokens: int,
    repeats: int,
    threads: int | None,
    out: Path | None,
) -> None:
    """Measures, writes the artifact and prints its summary; every option is checked before a model is looked at."""
    import pilotfish
    from pilotfish.bench.artifact import RESULT_FILE, claim
    from pilotfish.bench.pair import PairOptions, measure_pair
    from pilotfish.bench.prompts import default_prompts, read_prompts
    from pilotfish.bench.report import write_report
    from pilotfish.cli.bench_tables import print_artifact

    target, draft = choose_pair(model, draft_model)
    if any(proposal_lengths) and draft is None:
        raise OptionError("give --draft-model, or --proposal-length 0 to measure the target alone")
    options = PairOptions(
        model=target,
        draft_model=draft if any(proposal_lengths) else None,
        proposal_lengths=proposal_lengths,
        prompts=default_prompts() if prompts is None else read_prompts(prompts),
        max_tokens=max_tokens,
        repeats=repeats,
        threads=threads,
    )
    folder = out or Path(datetime.now().strftime("bench-%Y%m%d-%H%M%S"))
    for name in dict.fromkeys(name for name in (options.model, options.draft_model) if name is not None):
        fetch(name)
        pilotfish.find_model(name)
    with claim(folder) as save, BenchProgress() as progress:
        artifact = measure_pair(options, save, progress)
    if artifact.samples:
        write_report(artifact, folder)
        print_artifact(artifact)
        click.echo(f"{folder / RESULT_FILE} and {folder / 'report.html'}", err=True)
    if artifact.mismatches:
        raise click.exceptions.Exit(EXIT_DIFFERENT)
    if not artifact.complete:
        click.echo(_interrupted(artifact), err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED)


def _interrupted(artifact: Artifact) -> str:
    return f"pilotfish: interrupted: {len(artifact.samples)} of {len(artifact.order)} samples are finished"


@bench.command(short_help="Print an artifact's summary.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@needs_extra
def show(folder: Path) -> None:
    """Print the summary of the artifact in DIR."""
    from pilotfish.bench.reading import load_artifact
    from pilotfish.cli.bench_tables import print_artifact

    print_artifact(load_artifact(folder))


@bench.command(short_help="Hold two artifacts side by side.")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@needs_extra
def compare(first: Path, second: Path) -> None:
    """Hold the artifacts in folders A and B side by side, and say what differs between them.

    Only the ratios within each artifact are paired. Rates of different runs are not: a machine's speed drifts.
    """
    from pilotfish.bench.reading import load_artifact
    from pilotfish.cli.bench_tables import print_comparison

    print_comparison(load_artifact(first), load_artifact(second))


bench.add_command(roofline)
