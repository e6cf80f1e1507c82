"""A benchmark's result as a picture: decode speed against depth beside its limit, and where the time of a step goes."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gptfast.bench.environment import Environment
from gptfast.bench.results import BenchmarkResult, Breakdown
from gptfast.bench.roofline import compute_floor_ms
from gptfast.cache import is_writable, replace_atomically
from gptfast.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 160
TITLE_POINTS = 13
TITLE_CHARACTERS_PER_INCH = 9
LABEL_ROOM = 0.4
"""For the text after the longest bar, as a share of what the bars span."""

# Of the palette of Okabe and Ito (2008), which does not depend on telling red from green.
STEPS_COLOUR = "#0072B2"
END_TO_END_COLOUR = "#56B4E9"
LIMIT_COLOUR = "#D55E00"
PART_COLOUR = "#8FBBD9"  # the first, lighter
TEXT_COLOUR = "#222222"
MUTED_COLOUR = "#666666"
GRID_COLOUR = "#E4E4E4"

STYLE: dict[Any, Any] = {  # matplotlib's own type for the names differs between versions
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED_COLOUR,
    "axes.grid": True,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlesize": 11,
    "font.size": 9.5,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": TEXT_COLOUR,
    "xtick.color": MUTED_COLOUR,
    "ytick.color": MUTED_COLOUR,
    "xtick.labelcolor": TEXT_COLOUR,
    "ytick.labelcolor": TEXT_COLOUR,
}


def check_plot_path(path: Path) -> None:
    """Refuse what would fail after minutes of measuring; raises UserError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('a plot needs matplotlib, which is not installed; run pip install "gptfast[plot]"')
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"the plot {path} must end in one of {', '.join(SUFFIXES)}, which tells its format")
    if path.is_dir():
        raise UserError(f"the plot {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise UserError(f"the plot's directory {path.parent} does not exist; make it first")
    if not is_writable(path.parent):
        raise UserError(f"the plot's directory {path.parent} is not writable; name a file in another one")


def draw(result: BenchmarkResult, path: Path) -> None:
    """Write the picture to `path`, in the format of its suffix, which `check_plot_path` has seen."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(STYLE, after_reset=True), replace_atomically(path) as partial:
        figure = Figure(figsize=(11, 5) if result.breakdown else (7, 5), layout="constrained")
        compose(figure, result)
        # What does not fit widens the picture and is not cut off.
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=DPI, bbox_inches="tight", pad_inches=0.2)


def compose(figure: Figure, result: BenchmarkResult) -> None:
    """The title over one panel, or over two if the step was taken apart."""
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.set(rect=(0, 0, 1, 0.84), wspace=0.06)  # type: ignore[call-arg]
    draw_title(figure, result)
    if result.breakdown is None:
        draw_decode(figure.add_subplot(), result)
        return
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    draw_decode(left, result)
    draw_breakdown(right, result.breakdown, result.bandwidth.ceiling_gb_per_s)


def draw_title(figure: Figure, result: BenchmarkResult) -> None:
    """What was measured, on what, with what and when."""
    title = describe_model(result)
    fitting = TITLE_CHARACTERS_PER_INCH * figure.get_figwidth()
    size = TITLE_POINTS * min(1, fitting / len(title))  # a long name is written smaller
    figure.text(0.01, 0.985, title, size=size, weight="bold", va="top")
    date = datetime.fromisoformat(result.date).astimezone(UTC)
    software = f"{describe_software(result.environment)}, {date:%Y-%m-%d %H:%M} UTC"
    figure.text(0.01, 0.93, f"{describe_machine(result.environment)}\n{software}", color=MUTED_COLOUR, va="top")


def describe_model(result: BenchmarkResult) -> str:
    """Name, precision and batch size."""
    model = result.model
    return f"{model.name}, {model.precision}, batch size {result.settings.batch_size}"


def describe_machine(environment: Environment) -> str:
    """The device and, on a CPU, the threads."""
    threads = f", {environment.threads} threads" if environment.device == "cpu" else ""
    return f"{environment.device_name}{threads}"


def describe_software(environment: Environment) -> str:
    """Versions and commit."""
    text = f"torch {environment.torch}, gptfast {environment.gptfast}"
    if environment.commit is None:
        return text
    return f"{text}, commit {environment.commit}{'' if environment.commit_is_clean else ' with changes'}"


def draw_decode(axes: Axes, result: BenchmarkResult) -> None:
    """Tokens/s against depth with what 80 % of the runs lie between, under the limit that the floor allows.

    The axes are linear and start at 0: the bytes of a step grow in proportion to the depth, and 0 is a depth.
    """
    entries = sorted(result.decode, key=lambda entry: entry.depth)
    depths = [entry.depth for entry in entries]
    rates = {
        "end to end": ([entry.end_to_end_tokens_per_s for entry in entries], END_TO_END_COLOUR, "s"),
        "steps alone": ([entry.tokens_per_s for entry in entries], STEPS_COLOUR, "o"),
    }
    limit_depths, limits = compute_limits(result)
    axes.plot(limit_depths, limits, color=LIMIT_COLOUR, linestyle="--", linewidth=1.6, label=label_limit(result))
    for label, (spreads, colour, marker) in rates.items():
        medians = [spread.median for spread in spreads]
        reach = [
            [spread.median - spread.p10 for spread in spreads],
            [spread.p90 - spread.median for spread in spreads],
        ]
        axes.errorbar(depths, medians, reach, color=colour, marker=marker, markersize=5, capsize=3, label=label)
    axes.set_ylim(bottom=0)
    axes.set_title("Decoding, median and 10 % to 90 % of the runs")
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("tokens/s")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower left", reverse=True)
    if len(set(depths)) == 1:
        axes.set_xticks(depths)


def compute_limits(result: BenchmarkResult) -> tuple[list[float], list[float]]:
    """Depths from the least to the largest measured, and the tokens/s of all rows at the floor of each.

    Between two depths the floor is interpolated, as it is a sum of bytes. A single depth becomes a line of its own.
    """
    floors = {entry.depth: entry.floor_ms for entry in sorted(result.decode, key=lambda entry: entry.depth)}
    least, largest = min(floors), max(floors)
    margin = 0.5 if least == largest else 0
    depths = np.linspace(least - margin, largest + margin, 100)
    floors_ms = np.interp(depths, list(floors), list(floors.values()))
    return depths.tolist(), (1e3 * result.settings.batch_size / floors_ms).tolist()


def label_limit(result: BenchmarkResult) -> str:
    """What the limit is, and which shares of it the steps reached."""
    shares = sorted(entry.share for entry in result.decode)
    reached = " to ".join(dict.fromkeys(format_share(share) for share in (shares[0], shares[-1])))
    return f"limit at {result.bandwidth.ceiling_gb_per_s:.1f} GB/s (steps reach {reached})"


def draw_breakdown(axes: Axes, breakdown: Breakdown, ceiling_gb_per_s: float) -> None:
    """A bar per part of a step, and across it a mark where the time that its bytes take at the ceiling ends."""
    parts = breakdown.parts
    floors_ms = [compute_floor_ms(part.bytes_read, ceiling_gb_per_s) for part in parts]
    ends = [max(part.ms, floor_ms, 0) for part, floor_ms in zip(parts, floors_ms, strict=True)]
    axes.barh(range(len(parts)), [part.ms for part in parts], height=0.62, color=PART_COLOUR)
    for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
        text = f"{part.ms:z.2f} ms, {format_share(part.ms / breakdown.step_ms)}"
        axes.annotate(text, (end, row), (6, 0), textcoords="offset points", va="center")
    reading = [row for row, part in enumerate(parts) if part.bytes_read]
    axes.vlines(
        [floors_ms[row] for row in reading],
        [row - 0.42 for row in reading],
        [row + 0.42 for row in reading],
        color=LIMIT_COLOUR,
        linewidth=2.2,
    )
    axes.set_yticks(range(len(parts)), [part.name for part in parts])
    axes.invert_yaxis()
    least, largest = min(0, *(part.ms for part in parts)), max(ends)
    axes.set_xlim(least - 0.01 * (largest - least), largest + LABEL_ROOM * (largest - least))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"A step at depth {breakdown.depth:,}: {breakdown.step_ms:.2f} ms, floor {sum(floors_ms):.2f} ms")
    axes.set_xlabel(f"ms; marks: what a part's bytes take at {ceiling_gb_per_s:.1f} GB/s")


def format_share(share: float) -> str:
    """A fraction as percent, without a sign before 0."""
    return f"{100 * share:z.0f} %"
