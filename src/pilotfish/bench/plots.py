"""The plots of a report, each with the same in words and in numbers.

Arms differ by marker as well as by colour, phases by hatching, so that nothing hangs on colours alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pilotfish.bench import statistics
from pilotfish.bench.aggregates import ArmSummary, Rate, show_rate
from pilotfish.bench.artifact import Artifact, Interval
from pilotfish.bench.statistics import CONFIDENCE
from pilotfish.bench.svg import INK, draw_svg

# Each has a contrast of at least 3 with the page's light and with its dark ground; most are Okabe and Ito's.
COLOURS = ("#7d7d7d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a7400", "#7a63c9", "#b0413e")
_MARKERS = "os^DvPX*p"  # one more than colours, so that pairs do not repeat after a round
_PHASES = {
    "draft_seconds": ("draft model", COLOURS[2], "////"),
    "target_seconds": ("target model", COLOURS[1], ""),
    "verification_seconds": ("verification", COLOURS[3], "----"),
    "cache_maintenance_seconds": ("cache maintenance", COLOURS[4], "xxxx"),
    "other_seconds": ("other", COLOURS[0], "||||"),
}
_MAX_ROWS = 40


@dataclass(frozen=True)
class Plot:
    """A plot, its caption, and its numbers as a table. `svg` is None where there is nothing to draw."""

    name: str
    title: str
    caption: str
    svg: Markup | None
    columns: list[str]
    rows: list[list[str]]


Bounds = Rate | Interval
Look = tuple[str, str]
"""A colour and a marker."""


def draw_plots(artifact: Artifact, summaries: Sequence[ArmSummary]) -> list[Plot]:
    """All plots, in the order of the page. The same artifact gives the same bytes."""
    looks = {
        arm.name: (COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)])
        for index, arm in enumerate(artifact.arms)
    }
    return [
        _rates(summaries, looks),
        _ratios(artifact, looks),
        _acceptance(summaries, looks),
        _phases(summaries),
        _samples(artifact, looks),
    ]


def label(text: str, length: int = 24) -> str:
    """A name as plots show it: printable, with its middle left out where it is long."""
    shown = "".join(character if character.isprintable() else "·" for character in text)
    half = (length - 1) // 2
    return shown if len(shown) <= length else f"{shown[:half]}…{shown[-half:]}"


def _rates(summaries: Sequence[ArmSummary], looks: Mapping[str, Look]) -> Plot:
    classes = list(summaries[0].classes) if summaries else []
    series: dict[str, list[Bounds]] = {
        summary.arm: [summary.end_to_end, *(summary.classes[name] for name in classes)] for summary in summaries
    }
    caption = (
        "Tokens per second from prompt in to last token out, for all prompts and for each class of prompts: the "
        f"geometric mean over prompts and rounds, with its {CONFIDENCE:.0%} interval over rounds. Further "
        "right is faster."
    )
    rows = ["all", *classes] if summaries else []
    return _dots("rates", "Speed by class of prompts", "tokens/s, end to end", caption, rows, series, looks)


def _ratios(artifact: Artifact, looks: Mapping[str, Look]) -> Plot:
    by_prompt = len(artifact.prompts) <= _MAX_ROWS
    what = "prompt" if by_prompt else "class"
    compared = artifact.comparisons
    names = list(dict.fromkeys(name for c in compared for name in (c.prompts if by_prompt else c.classes)))
    series: dict[str, list[Bounds]] = {
        c.arm: [c.overall, *((c.prompts if by_prompt else c.classes)[name] for name in names)] for c in compared
    }
    caption = (
        f"Each arm's end-to-end tokens per second over its baseline's in the same round, for each {what} and over all, "
        f"with the {CONFIDENCE:.0%} interval over rounds. Right of the line at 1 the arm is faster "
        "than its baseline."
    )
    title = f"Paired ratio by {what}"
    rows = ["all", *names] if compared else []
    return _dots("ratios", title, "ratio to the baseline (×)", caption, rows, series, looks, reference=1.0)


def _dots(
    name: str,
    title: str,
    x_label: str,
    caption: str,
    rows: Sequence[str],
    series: Mapping[str, Sequence[Bounds]],
    looks: Mapping[str, Look],
    reference: float | None = None,
) -> Plot:
    """A row for each name, and in it a marker with its interval for each arm."""
    table = [[row, *(_text(values[index]) for values in series.values())] for index, row in enumerate(rows)]
    if len(rows) > _MAX_ROWS:
        caption += f" Drawn are the first {_MAX_ROWS} of {len(rows)} rows; the table has all of them."
        rows = rows[:_MAX_ROWS]
    if any(values[0].low is None for values in series.values()):
        caption += " A single round has no interval."

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (arm, values) in enumerate(series.items()):
            colour, marker = looks[arm]
            offset = 0.8 * ((index + 0.5) / len(series) - 0.5)
            for row, value in enumerate(values[: len(rows)]):
                centre, low, high = _numbers(value)
                axes.plot([low, high], [row + offset] * 2, color=colour, linewidth=1.2)
                axes.plot(centre, row + offset, color=colour, marker=marker, markersize=4.5, markeredgewidth=0)
        for row in range(1, len(rows)):
            axes.axhline(row - 0.5, color=INK, alpha=0.2 if row > 1 else 0.6, linewidth=0.6)
        if reference is not None:
            axes.axvline(reference, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [label(row, 16) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(x_label)
        _legend(figure, {arm: looks[arm] for arm in series})

    height = 0.9 + len(rows) * (0.12 + 0.1 * len(series))
    overall = "; ".join(f"{arm} {_text(values[0])}" for arm, values in series.items())
    svg = draw_svg(name, height, draw, f"{title}, {x_label}. Over all: {overall}.") if series else None
    return Plot(name, title, caption, svg, ["", *series], table)


def _acceptance(summaries: Sequence[ArmSummary], looks: Mapping[str, Look]) -> Plot:
    told = {summary.arm: summary.positions for summary in summaries if summary.positions}
    caption = (
        "How often the token at each place of a draft was accepted, which takes all before it as well, among drafts "
        "that reach this place."
    ) + _left_out(summaries, told, "nothing was drafted, or the system does not tell")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for arm, positions in told.items():
            colour, marker = looks[arm]
            places, shares = [p.position for p in positions], [p.share for p in positions]
            axes.plot(places, shares, color=colour, marker=marker, markersize=5, linewidth=1.2, clip_on=False)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        _count_from_one(axes, max(len(positions) for positions in told.values()))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted")
        _legend(figure, {arm: looks[arm] for arm in told})

    title = "Acceptance by position"
    words = "; ".join(f"{arm}: {', '.join(f'{p.share:.0%}' for p in positions)}" for arm, positions in told.items())
    svg = draw_svg("acceptance", 2.8, draw, f"{title}, from the first on. {words}.") if told else None
    longest = max((len(positions) for positions in told.values()), default=0)
    rows = [[arm, *(f"{p.share:.1%}" for p in ps), *["–"] * (longest - len(ps))] for arm, ps in told.items()]
    return Plot("acceptance", title, caption, svg, ["position", *map(str, range(1, longest + 1))], rows)


def _phases(summaries: Sequence[ArmSummary]) -> Plot:
    told = {s.arm: s.phases_per_100_tokens for s in summaries if s.phases_per_100_tokens is not None}
    seconds = {arm: [max(0.0, getattr(phases, name)) for name in _PHASES] for arm, phases in told.items()}
    caption = (
        "Seconds for 100 output tokens, prefills included, stacked by what they went into. Other is what no phase "
        "accounts for. Shorter is faster."
    ) + _left_out(summaries, told, "the system does not tell")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bars: list[Artist] = []
        for index, (name, colour, hatch) in enumerate(_PHASES.values()):
            values = [parts[index] for parts in seconds.values()]
            lefts = [sum(parts[:index]) for parts in seconds.values()]
            look = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.5, "height": 0.6}
            bars.append(axes.barh(range(len(seconds)), values, left=lefts, label=name, **look))  # type: ignore[arg-type]
        for row, parts in enumerate(seconds.values()):
            axes.annotate(f"{sum(parts):.3g} s", (sum(parts), row), (3, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, 1.18 * max(map(sum, seconds.values())))
        axes.set_ylim(len(seconds) - 0.5, -0.5)
        axes.set_yticks(range(len(seconds)), [label(arm) for arm in seconds])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds per 100 tokens")
        figure.legend(handles=bars, loc="outside upper left", ncols=3)

    title = "Where the time went"
    words = "; ".join(f"{arm} {sum(parts):.3g} s" for arm, parts in seconds.items())
    svg = draw_svg("phases", 1.2 + 0.36 * len(told), draw, f"{title}, per 100 tokens. {words}.") if told else None
    rows = [[arm, *(f"{value:.3f} s" for value in parts)] for arm, parts in seconds.items()]
    return Plot("phases", title, caption, svg, ["for 100 tokens", *(name for name, _, _ in _PHASES.values())], rows)


def _samples(artifact: Artifact, looks: Mapping[str, Look]) -> Plot:
    samples = artifact.samples
    arms = [arm.name for arm in artifact.arms if any(sample.arm == arm.name for sample in samples)]
    rates = {sample.place: statistics.rate(sample) for sample in samples}
    bandwidths = {s.place: s.bandwidth_bytes_per_second / 1e9 for s in samples if s.bandwidth_bytes_per_second}
    caption = (
        "Every process in the order in which they ran: its tokens per second, the geometric mean over prompts, and the "
        "memory bandwidth read just before it. Lines that rise or fall mean that the machine drifted."
    )
    if samples and not bandwidths:
        caption += " No bandwidth was measured."

    def draw(figure: Figure) -> None:
        ratios = [3, 1] if bandwidths else [1]
        panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for arm in arms:
            colour, marker = looks[arm]
            places = [sample.place for sample in samples if sample.arm == arm]
            look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 0.7, "linestyle": ":"}
            panels[0].plot([place + 1 for place in places], [rates[place] for place in places], **look)
        panels[0].set_ylabel("tokens/s, end to end")
        if bandwidths:
            panels[1].plot([place + 1 for place in bandwidths], list(bandwidths.values()), color=INK, linewidth=1)
            panels[1].plot([place + 1 for place in bandwidths], list(bandwidths.values()), ".", color=INK)
            panels[1].set_ylabel("GB/s")
            panels[1].margins(y=0.3)
        _count_from_one(panels[-1], len(artifact.order))
        panels[-1].set_xlabel("process, in the order run")
        _legend(figure, {arm: looks[arm] for arm in arms})

    title = "Every sample in process order"
    words = "; ".join(f"process {place + 1}: {value:.2f}" for place, value in rates.items())
    svg = draw_svg("samples", 3.6, draw, f"{title}, tokens per second. {words}.") if samples else None
    columns = [
        "process",
        "arm",
        "round",
        "tokens/s",
        "bandwidth",
        "load before",
        "load after",
        "opening",
        "peak memory",
    ]
    rows = [
        [
            str(sample.place + 1),
            sample.arm,
            str(sample.round + 1),
            f"{rates[sample.place]:.2f}",
            f"{bandwidths[sample.place]:.1f} GB/s" if sample.place in bandwidths else "–",
            f"{sample.load_average_before:.2f}",
            f"{sample.load_average_after:.2f}",
            f"{sample.load_seconds:.1f} s",
            f"{sample.peak_memory_bytes / 2**30:.2f} GiB",
        ]
        for sample in samples
    ]
    return Plot("samples", title, caption, svg, columns, rows)


def _left_out(summaries: Sequence[ArmSummary], told: Mapping[str, object], reason: str) -> str:
    missing = [summary.arm for summary in summaries if summary.arm not in told]
    return f" Left out: {', '.join(missing)} ({reason})." if missing else ""


def _numbers(value: Bounds) -> tuple[float, float, float]:
    centre = value.ratio if isinstance(value, Interval) else value.tokens_per_second
    return centre, centre if value.low is None else value.low, centre if value.high is None else value.high


def _text(value: Bounds) -> str:
    return statistics.show(value) if isinstance(value, Interval) else show_rate(value)


def _count_from_one(axes: Axes, last: int) -> None:
    axes.set_xlim(0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))


def _legend(figure: Figure, looks: Mapping[str, Look]) -> None:
    names = [label(arm) for arm in looks]
    handles = [Line2D([], [], color=colour, marker=marker, linewidth=1) for colour, marker in looks.values()]
    columns = max(1, 60 // (max(map(len, names)) + 4))
    figure.legend(handles, names, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.2)
