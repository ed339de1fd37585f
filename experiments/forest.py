"""Draws differences to a reference with their intervals: a row for each method, a panel for each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rumor.checkpoint.files import replacing
from rumor.plots import BLACK, BLUE, VERMILION

Differences = Mapping[str, tuple[float, float]]  # by method: the mean, and half its interval
ROOM, FAR = 0.06, 4  # of the range, on either side; how many times as far as most methods a method may be


class Rows(NamedTuple):
    """The rows of a picture: what is written beside each method, the reference, and the method that is recommended."""

    labels: Mapping[str, str]
    reference: str
    recommended: str

    def colour(self, name: str) -> str:
        return {self.reference: BLACK, self.recommended: VERMILION}.get(name, BLUE)


def draw(panels: Mapping[str, Differences], rows: Rows, title: str, path: Path) -> None:
    """Draw the panels by title, two side by side. An arrow at the edge stands for a method that is far worse than most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines, columns = math.ceil(len(panels) / 2), min(2, len(panels))
    size = (7.2, 0.4 + lines * (0.6 + 0.2 * len(rows.labels)))
    figure, axes = pyplot.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    found = list(panels.items())
    for line, beside in enumerate(axes):
        pair = found[columns * line : columns * (line + 1)]
        low, high = range_of([differences for _, differences in pair])
        for axis, (setting, differences) in zip(beside, pair, strict=True):
            axis.set_xlim(low, high)
            axis.set_title(setting, fontsize=10)
            _draw_panel(axis, differences, rows)
        _label_rows(beside[0], rows)
    axes[0][0].set_ylim(len(rows.labels) - 0.4, -0.6)  # the first row at the top
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=160)
    pyplot.close(figure)


def _label_rows(axis: Any, rows: Rows) -> None:
    axis.set_yticks(range(len(rows.labels)), list(rows.labels.values()), fontsize=9)
    for label, name in zip(axis.get_yticklabels(), rows.labels, strict=True):
        if name == rows.recommended:
            label.set(color=rows.colour(name), fontweight="bold")
    heading = {"xytext": (-5, 5), "textcoords": "offset points", "ha": "right", "fontsize": 9, "style": "italic"}
    axis.annotate("method: share of the bytes", (0, 1), xycoords="axes fraction", **heading)


def _draw_panel(axis: Any, differences: Differences, rows: Rows) -> None:
    axis.axvline(0, color=BLACK, linewidth=0.8, linestyle=":")
    axis.grid(axis="x", alpha=0.3, linewidth=0.5)
    axis.tick_params(axis="x", labelsize=9)
    axis.tick_params(axis="y", length=0)
    low, high = axis.get_xlim()
    for row, name in enumerate(rows.labels):
        if name not in differences:
            axis.annotate("not run", (low, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color="#888888")
            continue
        (mean, half), colour = differences[name], rows.colour(name)
        axis.errorbar(mean, row, xerr=half, color=colour, marker="o", markersize=5, linewidth=1.5, capsize=2.5)
        if not low <= mean <= high:
            edge, back = (low, 18) if mean < low else (high, -18)
            axis.annotate("", (edge, row), (back, 0), textcoords="offset points", arrowprops={"arrowstyle": "->", "color": colour})


def range_of(panels: Sequence[Differences]) -> tuple[float, float]:
    """Return the range of the x-axis. Methods that are far worse than most would hide the differences, so it leaves them out.

    >>> range_of([{"a": (0.0, 0.0), "b": (-1.0, 0.5), "c": (-1.0, 0.5), "d": (-20.0, 1.0)}])
    (-1.59, 0.09)
    """
    values = [value for differences in panels for value in differences.values()]
    if not values:
        return -1.0, 1.0
    gaps = sorted(abs(mean) for mean, _ in values)
    most = FAR * max(gaps[int(0.8 * (len(gaps) - 1))], 1e-3)
    near = [(mean, min(half, most)) for mean, half in values if abs(mean) <= most]
    low, high = min(mean - half for mean, half in near), max(mean + half for mean, half in near)
    return low - ROOM * (high - low), high + ROOM * (high - low)
