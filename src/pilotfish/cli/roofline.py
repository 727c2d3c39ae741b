"""The command `pilotfish bench roofline`: measures, and prints tables or one JSON object."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pilotfish.cli.options import MODEL_FORMS, WholeNumber
from pilotfish.cli.pair import choose_pair, fetch
from pilotfish.cli.terminal import ProgressLine, one_line, print_parts
from pilotfish.config import MAX_THREADS

if TYPE_CHECKING:
    from pilotfish.bench.roofline import Limits, Roofline, StepCost


@dataclass(frozen=True)
class RooflineOptions:
    """The command's options, as given."""

    model: str | None
    draft_model: str | None
    threads: int | None
    context_length: int
    rounds: int
    json: bool


@click.command(short_help="What a step costs, and could cost at least.")
@click.option(
    "--model",
    metavar="MODEL",
    help=f"Target model: {MODEL_FORMS}. Given alone, guesses are taken to cost nothing. Without it: the "
    "default target.",
)
@click.option(
    "--draft-model",
    metavar="MODEL",
    help="Draft model, named likewise. Without --model and --draft-model: the default draft.",
)
@click.option(
    "--threads",
    type=WholeNumber(min=1, max=MAX_THREADS),
    metavar="N",
    help="Threads of the kernels. Default: one for each physical core.",
)
@click.option(
    "--context-length",
    type=WholeNumber(min=0),
    metavar="N",
    default=64,
    help="Tokens that stand in the caches before each step. Default: 64.",
)
@click.option(
    "--rounds",
    type=WholeNumber(min=1),
    metavar="N",
    default=7,
    help="How often each step is measured, after once that is not counted; the median counts. Default: 7.",
)
@click.option("--json", is_flag=True, help="Print one JSON object, which holds the samples as well.")
def roofline(**given: Any) -> None:
    """Measure where the limit is: this machine's read bandwidth and integer arithmetic, and the steps beside them.

    T(M) is one forward of the target over M rows, with logits for each: verifying k guesses takes T(k + 1). The floor
    is what reading all weights once, or the multiplications, would take at the least. From T(M) and the draft step
    follows the speedup that this machine allows at a given acceptance.

    \b
      pilotfish bench roofline
      pilotfish bench roofline --model path/to/model.gguf --threads 4 --json
    """
    run_roofline(RooflineOptions(**given))


def run_roofline(options: RooflineOptions) -> None:
    """Measures, with a line on stderr meanwhile where that is a terminal, and prints what was found."""
    target, draft = choose_pair(options.model, options.draft_model)
    with ProgressLine() as line:
        for name in (target, draft):
            if name is not None:
                fetch(name)
        line.show("starting")
        # It imports torch, which the options need not wait for.
        from pilotfish.bench import roofline

        found = roofline.run_roofline(
            target,
            draft,
            threads=options.threads,
            context_length=options.context_length,
            rounds=options.rounds,
            progress=line.show,
        )
    if options.json:
        print(json.dumps(dataclasses.asdict(found)), flush=True)
        return
    print_parts(render(found), width=100)


def render(found: Roofline) -> Iterator[RenderableType]:
    """What a person wants to see: the machine, each step against its floor, and what the curve allows."""
    # It imports torch, which the options need not wait for.
    from pilotfish.bench.roofline import STEADY_SPREAD

    measured = found.measurements
    yield Text(f"{found.backend}, {found.context_length} tokens of context, medians of {found.rounds} rounds\n")
    yield _machine(found)
    yield Text()
    yield _steps(measured.target_steps, measured.draft_step)
    yield Text()
    yield _speedups(found)
    if not found.is_steady:
        yield Text(
            f"\nNot steady: the samples of some steps spread by more than {STEADY_SPREAD:.0%} of their median. Either "
            "something else runs on this machine or its speed changes; measure again when it is idle, or with more "
            "--rounds.",
            style="bold",
        )
    guesses = "draft steps" if measured.draft_step else "guesses that cost nothing (no draft model was named)"
    yield Text(
        "\nper token: the probability that a guess is accepted where all before it were, the same for each; "
        "of all drafted: accepted over drafted, as `pilotfish generate` counts it. k: the proposal length that gives "
        f"most. A step is k {guesses} and T(k + 1), and gives (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al. 2022, "
        "section 3.3). This is a limit, not a measured speedup: prompts and all work outside the models come on top.",
        style="dim",
    )


def _machine(found: Roofline) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    measured = found.measurements
    table.add_row("memory", f"{_range(measured.bytes_per_second)} GB/s read")
    table.add_row("arithmetic", f"{_range(measured.macs_per_second)} billion integer multiply-accumulates/s")
    for role, name, step in (
        ("target", found.model, measured.target_steps[0]),
        ("draft", found.draft_model, measured.draft_step),
    ):
        if name is not None and step is not None:
            work = f"{step.num_bytes / 1e6:,.0f} MB and {step.num_macs / 1e9:.2f} billion multiply-accumulates a row"
            table.add_row(role, Text(f"{one_line(name)}: {work}"))
    return table


def _range(limits: Limits) -> str:
    """In billions."""
    middle, lowest, highest = (f"{value / 1e9:,.1f}" for value in dataclasses.astuple(limits))
    return f"{middle} ({lowest}–{highest})"


def _steps(target_steps: Sequence[StepCost], draft_step: StepCost | None) -> Table:
    table = _table("a step", "ms", "spread", "/ T(1)", "floor, ms", "of the floor", "floor set by")
    one_row = target_steps[0].seconds
    rows = [(f"T({step.num_rows})", step) for step in target_steps]
    for name, step in [*rows, *([("draft", draft_step)] if draft_step else [])]:
        table.add_row(
            name,
            f"{1e3 * step.seconds:.1f}",
            f"{step.spread:.0%}",
            f"{step.seconds / one_row:.2f}",
            f"{1e3 * step.floor_seconds:.1f}",
            f"{step.floor_share:.0%}",
            step.bound_by,
        )
    return table


def _speedups(found: Roofline) -> Table:
    table = _table("accepted per token", "of all drafted", "best k", "tokens/step", "step, ms", "allowed speedup")
    for allowed in found.speedups:
        drafts = allowed.proposal_length > 0
        table.add_row(
            f"{allowed.token_acceptance:.0%}",
            f"{allowed.acceptance_rate:.0%}" if drafts else "–",
            str(allowed.proposal_length),
            f"{allowed.tokens_per_step:.2f}",
            f"{1e3 * allowed.step_seconds:.1f}",
            f"{allowed.speedup:.2f}×" if drafts else "none",
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="right")
    return table
