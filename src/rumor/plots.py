"""Draws pictures with matplotlib, an optional dependency: `pip install 'rumor[plots]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rumor.checkpoint.files import replacing
from rumor.cost import Prediction
from rumor.cost.network import in_python
from rumor.theory import Mixing
from rumor.topology import Topology
from rumor.topology.drawing import MOST_LINKS, NUMBERED_UP_TO, has_hidden_links, links, positions
from rumor.topology.matrix import Array

# The colours of Okabe and Ito, which colour-blind readers can tell apart
BLACK, ORANGE, SKY, GREEN, VERMILION, BLUE, PURPLE = "#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7"
FORMATS = (".png", ".svg", ".pdf")


def open_pyplot(path: str) -> Any:
    """Imports pyplot, or raises an error that says why no picture can be written to `path`."""
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"--out {path}: the name of a picture must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {Path(path).absolute().parent}")
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'rumor[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    with replacing(path) as aside:
        figure.savefig(aside, dpi=160, bbox_inches="tight")


def draw_topology(topology: Topology, values: Array | None, over_H: Sequence[Mixing], path: str) -> None:
    """Draws the graph, its spectrum (`values`), and C_beta and D_beta over H. The last of `over_H` is H = infinity."""
    pyplot = open_pyplot(path)
    figure, (graph, eigenvalues, periods) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    figure.suptitle(f"{topology.name}: beta = {topology.beta:.5f}")
    _draw_graph(graph, topology)
    _draw_spectrum(eigenvalues, topology, values)
    _draw_constants(periods, over_H)
    save(figure, path)
    pyplot.close(figure)


def _draw_graph(axes: Any, topology: Topology) -> None:
    from matplotlib.collections import LineCollection

    at, pairs = positions(topology), links(topology)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.invert_yaxis()
    title = f"{len(pairs):,} links"
    if len(pairs) <= MOST_LINKS:
        axes.add_collection(LineCollection(list(at[pairs]), colors=SKY, linewidths=1.4 if len(pairs) < 200 else 0.4, zorder=1))
    else:
        title += ", too many to draw"
    title += "; wraps around the edges" if has_hidden_links(topology) else ""
    is_small = topology.n <= NUMBERED_UP_TO
    axes.scatter(*at.T, s=170 if is_small else 6, color="white" if is_small else BLACK, edgecolors=BLACK, zorder=2)
    if is_small:
        for i, (x, y) in enumerate(at):
            axes.text(x, y, str(i), ha="center", va="center", fontsize=8, zorder=3)
    axes.set_title(title)


def _draw_spectrum(axes: Any, topology: Topology, values: Array | None) -> None:
    axes.set_title(f"|eigenvalues| of {'a cycle of W' if topology.period > 1 else 'W'}")
    axes.set(xlabel="rank by size", ylim=(-0.03, 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if values is None:
        axes.text(0.5, 0.5, f"left out for n = {topology.n:,}", transform=axes.transAxes, ha="center")
    else:
        axes.plot(np.arange(1, len(values) + 1), values, "o" if len(values) <= 100 else "-", color=VERMILION, markersize=4)
    axes.grid(alpha=0.3)


def _draw_constants(axes: Any, over_H: Sequence[Mixing]) -> None:
    *finite, gossip = over_H  # the last one is H = infinity: Gossip SGD
    H = [row.H for row in finite]
    for values, limit, name, color, mark in (
        ([row.C for row in finite], gossip.C, "C_beta", GREEN, "o-"),
        ([row.D for row in finite], gossip.D, "D_beta", ORANGE, "s--"),  # dashed with hollow marks: the two lines may coincide
    ):
        hollow = "none" if "--" in mark else color
        axes.plot(H, values, mark, color=color, markerfacecolor=hollow, markersize=6, label=f"{name} ({limit:.3g} at H = inf)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="H", title="C_beta and D_beta")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_plan(rows: Sequence[Prediction], chosen: Prediction | None, compute: float, title: str, path: str) -> None:
    """Draws the time of a step for each row of `rumor plan`, computing and communication. The recommended row is marked."""
    pyplot = open_pyplot(path)
    shown = [row for row in rows if row.method not in ("OSGP", "Gossip-AGA")]  # their times lie between those of the others
    names = [
        f"{row.label}{f', H = {row.H}' if (row.H or 1) > 1 else ''}{f', {in_python(row.topology)}' if row.topology else ''}"
        for row in shown
    ]
    figure, axes = pyplot.subplots(figsize=(8.5, 1.6 + 0.27 * len(shown)), layout="constrained")
    computing = [1e3 * min(compute, row.seconds) for row in shown]  # a whole step may have been measured in a faster moment
    axes.barh(names, computing, color=SKY, label="computing")
    communication = [1e3 * row.seconds - own for row, own in zip(shown, computing, strict=True)]
    axes.barh(names, communication, left=computing, color=VERMILION, label="communication")
    for label, row in zip(axes.get_yticklabels(), shown, strict=True):
        if row == chosen:
            label.set_fontweight("bold")
            axes.annotate(" recommended", (1e3 * row.seconds, shown.index(row)), va="center", fontsize=9)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(xlabel="ms per step: measured as a whole, or the sum of its parts without overlap")
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    save(figure, path)
    pyplot.close(figure)
