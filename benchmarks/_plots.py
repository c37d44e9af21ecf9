"""The style of all plots: our models in colours, peers grey and dashed, the name of every line at its end."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multilin.architectures import architectures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour-blind readers can tell them apart (after Okabe and Ito); they are dark enough for text on white.
COLOURS = ("#0072b2", "#d55e00", "#00845f", "#882255", "#222222")
MARKERS = "osD^v"
PEER = "#737373"
_GRID = "#e6e6e6"
_DPI = 150


def figure(rows: int, columns: int, *, height: float, share_y: bool = False) -> tuple["Figure", Any]:
    """A figure with text that is legible at a width of 800 pixels, and its panels as an array (rows, columns)."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, height * rows), dpi=_DPI, layout="constrained")
    panels = drawn.subplots(rows, columns, squeeze=False, sharey=share_y)
    for axis in panels.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return drawn, panels


def colour(model: str) -> str:
    """The colour of a model in every plot; `:` and options may follow the name."""
    names = list(architectures())
    name = model.partition(":")[0]
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else PEER


def line(axis: "Axes", x: Sequence[float], y: Sequence[float], name: str, shown: str, marker: str) -> None:
    """Draw a line with its name, for `name_ends`."""
    dashes = (0, (4, 2)) if shown == PEER else "solid"
    axis.plot(x, y, color=shown, marker=marker, markersize=5, linewidth=1.8, linestyle=dashes, label=name)


def lines_of_models(axis: "Axes", rows: Sequence[dict[str, Any]], x: str, y: str) -> None:
    """Draw one line for each model of the rows."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    for name in names:
        own = sorted((row for row in rows if row["model"] == name), key=lambda row: row[x])
        index = [other for other in names if colour(other) == PEER or colour(name) != PEER].index(name)
        marker = MARKERS[index % len(MARKERS)]
        line(axis, [row[x] for row in own], [row[y] for row in own], title(name), colour(name), marker)


def title(model: str) -> str:
    """The name of a model for readers."""
    name, colon, engine = model.partition(":")
    return {"gpt2": "GPT-2", "llama": "Llama"}.get(name, name) + colon + engine


def scale_x(axis: "Axes", values: Sequence[float], names: Sequence[str] | None = None) -> None:
    """Make x logarithmic, with ticks at these values."""
    shown = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(shown, names or [f"{value:,}" for value in shown])
    axis.minorticks_off()
    axis.grid(axis="y", color=_GRID)


def name_ends(axis: "Axes") -> None:
    """Write the name of every line at its right end, without overlaps."""
    axis.figure.draw_without_rendering()  # the limits are known only after this
    to_panel = axis.transData + axis.transAxes.inverted()
    named = [drawn for drawn in axis.get_lines() if not str(drawn.get_label()).startswith("_")]
    ends = {drawn: (drawn.get_xdata()[-1], drawn.get_ydata()[-1]) for drawn in named}
    places = {drawn: float(to_panel.transform(end)[1]) for drawn, end in ends.items()}
    gap = 11 / (axis.get_window_extent().height * 72 / _DPI)
    order = sorted(named, key=lambda drawn: places[drawn])
    for _ in range(100):
        for lower, upper in itertools.pairwise(order):
            overlap = max(gap - (places[upper] - places[lower]), 0)
            places[lower] -= overlap / 2
            places[upper] += overlap / 2
    for drawn, place in places.items():
        axis.annotate(
            str(drawn.get_label()), (ends[drawn][0], place), xycoords=("data", "axes fraction"), xytext=(7, 0),
            textcoords="offset points", color=drawn.get_color(), va="center", fontsize=9,
        )  # fmt: skip
